"""Read a Llama-architecture GGUF file: shape, tokens, merges, and one dequantised tensor at a time.

The file stays mapped and tensors are made on demand, so a conversion holds one of them and not the whole
model. GGUF stores the rows of q and k permuted so that the two halves of a rotated pair lie side by side
("interleaved"); whoever needs the halves apart asks `deinterleaved`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.errors import VersionRefused
from fabric_pipelines.models.gguf_file import GgufFile

Float32 = npt.NDArray[np.float32]
CONTROL_TOKEN = 3  # token_type of control tokens in GGUF


@dataclass(frozen=True, slots=True)
class LlamaShape:
    layers: int
    dim: int
    ffn_dim: int
    heads: int
    kv_heads: int
    vocab_size: int
    context: int
    rope_base: float
    eps: float

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class GgufLlama:
    """An open GGUF file. Raises VersionRefused when it is not a Llama model."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        architecture = self.field("general.architecture")
        if architecture != "llama":
            raise VersionRefused(f"{path.name} holds a {architecture!r} model, not 'llama'")
        self.shape = LlamaShape(
            layers=self.field("llama.block_count"),
            dim=self.field("llama.embedding_length"),
            ffn_dim=self.field("llama.feed_forward_length"),
            heads=self.field("llama.attention.head_count"),
            kv_heads=self.field("llama.attention.head_count_kv"),
            vocab_size=self.field("llama.vocab_size"),
            context=self.field("llama.context_length"),
            rope_base=self.field("llama.rope.freq_base"),
            eps=self.field("llama.attention.layer_norm_rms_epsilon"),
        )

    def field(self, name: str) -> Any:
        return self._file.fields[name]

    @property
    def tokens(self) -> list[str]:
        return list(self.field("tokenizer.ggml.tokens"))

    @property
    def merges(self) -> list[tuple[str, str]]:
        pairs = (merge.split(" ") for merge in self.field("tokenizer.ggml.merges"))
        return [(left, right) for left, right in pairs]

    @property
    def control_ids(self) -> list[int]:
        kinds = self.field("tokenizer.ggml.token_type")
        return [index for index, kind in enumerate(kinds) if kind == CONTROL_TOKEN]

    def tensor(self, name: str) -> Float32:
        """float32, rows = outputs, columns = inputs; owned by the caller."""
        return self._file.tensor(name)

    def block(self, layer: int, part: str) -> Float32:
        return self.tensor(f"blk.{layer}.{part}.weight")


def deinterleaved(weight: Float32, heads: int) -> Float32:
    """Rows of each head from pair order (0, 0', 1, 1', ...) to half order (0, 1, ..., 0', 1', ...)."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2)
    return np.ascontiguousarray(halves.reshape(rows, columns))
