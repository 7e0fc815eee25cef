"""What a CTranslate2 `model.bin` says of itself: its kind of model and the names, shapes and types of its variables.

The runtime's Python API tells none of it, so the file is read: little-endian, a header, then each variable with its
bytes, which are skipped. Format: `ModelSpec._serialize` of ctranslate2 4.8.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

BINARY_VERSION = 6
TYPES = ("float32", "int8", "int16", "int32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class ModelFile:
    """spec: CTranslate2's name of the model kind; shapes, types: by variable name; attributes are scalars."""

    spec: str
    shapes: Mapping[str, tuple[int, ...]]
    types: Mapping[str, str]

    @property
    def architecture(self) -> str:
        """The Hugging Face class with this structure, else CTranslate2's own name of the kind: a decoder with
        gated feed-forward, RMS norms (no beta), rotation and no bias is a Llama."""
        gated = "decoder/layer_0/ffn/linear_0_noact/weight" in self.shapes
        centred = "decoder/layer_norm/beta" in self.shapes
        rotates = "decoder/layer_0/self_attention/rotary_dim" in self.shapes
        biased = "decoder/layer_0/self_attention/linear_0/bias" in self.shapes
        is_decoder = self.spec == "TransformerDecoderSpec"
        if is_decoder and gated and rotates and not centred and not biased:
            return "LlamaForCausalLM"
        return self.spec


def read_model_file(path: Path) -> ModelFile:
    """RuntimeError when it is not such a file, or one of another version."""
    shapes: dict[str, tuple[int, ...]] = {}
    types: dict[str, str] = {}
    try:
        with path.open("rb") as file:
            (version,) = _numbers(file, "I")
            if version != BINARY_VERSION:
                raise RuntimeError(f"{path} is of binary version {version}, not {BINARY_VERSION}")
            spec = _text(file)
            _revision, count = _numbers(file, "II")
            for _ in range(count):
                name = _text(file)
                (rank,) = _numbers(file, "B")
                shapes[name] = _numbers(file, f"{rank}I")
                kind, length = _numbers(file, "<BI")
                types[name] = TYPES[kind]
                file.seek(length, 1)
    except (struct.error, UnicodeDecodeError, IndexError) as fault:
        raise RuntimeError(f"{path} is no CTranslate2 model file ({fault})") from fault
    return ModelFile(spec, shapes, types)


def _numbers(file: BinaryIO, layout: str) -> tuple[int, ...]:
    layout = layout if layout.startswith("<") else f"<{layout}"
    return struct.unpack(layout, file.read(struct.calcsize(layout)))


def _text(file: BinaryIO) -> str:
    (length,) = _numbers(file, "H")
    return file.read(length)[:-1].decode()
