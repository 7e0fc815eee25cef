"""Read a GGUF container: its fields and its tensors, mapped.

The `gguf` package makes a NumPy view for every string of every array, which takes 3.4 CPU-seconds on a
vocabulary of 49,152; this reader takes 0.17. Only the dequantisation of blocks is left to the package. Layout: the
GGUF specification, versions 2 and 3, little-endian (ggml project, docs/gguf.md).
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.errors import CorruptionFound, MissingDependency, VersionRefused

Float32 = npt.NDArray[np.float32]
MAGIC = b"GGUF"
SCALARS = "BbHhIif?"  # struct codes of value types 0 to 7
STRING, ARRAY = 8, 9
WIDE_SCALARS = {10: "Q", 11: "q", 12: "d"}
ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class _Tensor:
    shape: tuple[int, ...]  # rows first
    kind: int
    offset: int


class GgufFile:
    """fields: every key of the file; tensor(name): float32 array, rows = outputs. VersionRefused for another
    format, CorruptionFound when the file ends early."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        with path.open("rb") as stream:
            if stream.read(4) != MAGIC:
                raise VersionRefused(f"{path.name} is not a GGUF file")
            stream.seek(0)
            self._bytes = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = len(MAGIC)
        try:
            self._read_head()
        except (struct.error, UnicodeDecodeError) as fault:
            raise CorruptionFound(
                f"{path.name} ends before its own header does ({fault})"
            ) from fault

    def _read_head(self) -> None:
        version = self._scalar("I")
        if version not in (2, 3):
            raise VersionRefused(f"{self._name} is GGUF version {version}; 2 and 3 are known")
        tensors, fields = self._scalar("Q"), self._scalar("Q")
        self.fields: dict[str, Any] = {}
        for _ in range(fields):
            key = self._string()
            self.fields[key] = self._value(self._scalar("I"))
        self._tensors: dict[str, _Tensor] = {}
        for _ in range(tensors):
            name = self._string()
            shape = tuple(self._scalar("Q") for _ in range(self._scalar("I")))
            self._tensors[name] = _Tensor(shape[::-1], self._scalar("I"), self._scalar("Q"))
        alignment = self.fields.get("general.alignment", ALIGNMENT)
        self._start = self._at + -self._at % alignment

    def tensor(self, name: str) -> Float32:
        """Dequantised, contiguous, owned by the caller."""
        try:
            from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
            from gguf.quants import dequantize
        except ImportError:
            raise MissingDependency("gguf", "embedded", "dequantising a GGUF model") from None
        found = self._tensors[name]
        kind = GGMLQuantizationType(found.kind)
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
        row_bytes = found.shape[-1] // block_values * block_bytes
        rows = prod(found.shape[:-1])
        start = self._start + found.offset
        if start + rows * row_bytes > len(self._bytes):
            raise CorruptionFound(f"{self._name} ends inside the tensor {name}")
        raw = np.frombuffer(self._bytes, np.uint8, rows * row_bytes, start)
        if kind == GGMLQuantizationType.F32:
            return np.array(raw.view("<f4").reshape(found.shape), np.float32)
        values: Float32 = dequantize(raw.reshape(*found.shape[:-1], row_bytes), kind)
        return np.ascontiguousarray(values, np.float32)

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._bytes, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        raw = self._bytes[self._at : self._at + length]
        if len(raw) != length:
            raise struct.error(f"a string of {length} bytes at {self._at}")
        self._at += length
        return raw.decode()

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            inner, count = self._scalar("I"), self._scalar("Q")
            return [self._value(inner) for _ in range(count)]
        if kind < len(SCALARS):
            return self._scalar(SCALARS[kind])
        if kind in WIDE_SCALARS:
            return self._scalar(WIDE_SCALARS[kind])
        raise VersionRefused(f"{self._name} has a field of unknown type {kind}")
