"""Our reader of the container agrees with the reference package, and a broken file is named."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from fabric_pipelines.errors import CorruptionFound, VersionRefused
from fabric_pipelines.models.catalogue import ModelSpec
from fabric_pipelines.models.gguf_file import GgufFile
from fabric_pipelines.models.gguf_llama import GgufLlama


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A file with every kind of field and four kinds of tensor."""
    path = tmp_path / "mixed.gguf"
    writer = gguf.GGUFWriter(str(path), "toy")
    for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{kind}")(f"toy.{kind}", 7)
    writer.add_float32("toy.float32", 0.5)
    writer.add_float64("toy.float64", 0.25)
    writer.add_bool("toy.bool", True)
    writer.add_string("toy.string", "größe")
    writer.add_array("toy.strings", ["a", "", "ü b"])
    writer.add_array("toy.numbers", [1, 2, 3])
    values = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    for kind in ("Q4_1", "Q8_0", "F16"):
        quantised = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(kind, gguf.quants.quantize(values, quantised), raw_dtype=quantised)
    writer.add_tensor("F32", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_fields_are_those_of_the_reference_reader(mixed: Path) -> None:
    reference = gguf.GGUFReader(mixed)
    theirs = {k: v.contents() for k, v in reference.fields.items() if k.startswith("toy.")}
    ours = {k: v for k, v in GgufFile(mixed).fields.items() if k.startswith("toy.")}
    assert ours == theirs
    assert ours["toy.strings"] == ["a", "", "ü b"]


def test_tensors_are_those_of_the_reference_reader(mixed: Path) -> None:
    ours = GgufFile(mixed)
    for tensor in gguf.GGUFReader(mixed).tensors:
        truth = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found = ours.tensor(tensor.name)
        assert found.dtype == np.float32
        assert found.flags.writeable
        np.testing.assert_array_equal(found, truth)


def test_a_file_that_ends_early_is_corrupt_and_named(mixed: Path) -> None:
    content = mixed.read_bytes()
    for size in (10, 60, 300):
        mixed.write_bytes(content[:size])
        with pytest.raises(CorruptionFound, match=r"mixed\.gguf ends before its own header"):
            GgufFile(mixed)
    mixed.write_bytes(content[:-200])
    with pytest.raises(CorruptionFound, match="ends inside the tensor F32"):
        GgufFile(mixed).tensor("F32")


def test_another_format_or_version_is_refused(mixed: Path) -> None:
    content = bytearray(mixed.read_bytes())
    struct.pack_into("<I", content, 4, 9)
    mixed.write_bytes(content)
    with pytest.raises(VersionRefused, match="GGUF version 9; 2 and 3 are known"):
        GgufFile(mixed)
    mixed.write_bytes(b"PK\x03\x04" + content[4:])
    with pytest.raises(VersionRefused, match="not a GGUF file"):
        GgufFile(mixed)


def test_a_model_of_another_architecture_is_refused(mixed: Path, tiny_llama: ModelSpec) -> None:
    with pytest.raises(VersionRefused, match="holds a 'toy' model, not 'llama'"):
        GgufLlama(mixed)
