"""Nine fields x {missing, unknown value, contradiction}: each refused by its name, and when.

Missing and unknown ones are refused while the engine is constructed, with every runtime made unimportable; a
contradiction with what the engine itself says when it is opened, which is before anything is leased.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from fabric_pipelines import models
from fabric_pipelines.errors import ManifestRefused
from fabric_pipelines.models.ctranslate2_file import ModelFile, read_model_file
from fabric_pipelines.models.facts import roots
from fabric_pipelines.models.sources import sha256_file
from fabric_pipelines.records.manifest import EngineManifest
from fabric_pipelines.worker.engines import ctranslate2, registry
from fabric_pipelines.worker.engines.agreement import Told, require_agreement

pytestmark = pytest.mark.usefixtures("tiny_known")
FIELDS = tuple(EngineManifest.__dataclass_fields__)
ENGINES = ("generate", "hidden", "embed")
RUNTIMES = ("ctranslate2", "onnxruntime", "vllm", "torch", "transformers", "tensorrt")
UNKNOWN: dict[str, Any] = {
    "version": "abacus 1.0",
    "architecture": "AbacusForCausalLM",
    "weight_quantisation": "int3",
    "kv_quantisation": "int3",
    "world_size": "one",
    "max_batch_size": 0,
    "max_num_tokens": True,
    "max_input_len": 1.5,
    "max_seq_len": -1,
}
# What each engine cannot be: another runtime version, a structure its file has not, sizes beyond its own bounds.
CONTRADICTS: dict[str, dict[str, dict[str, Any]]] = {
    "generate": {
        "version": {"version": "ctranslate2 0.1"},
        "architecture": {},  # its file is made another one's, see below
        "weight_quantisation": {"weight_quantisation": "fp8"},
        "kv_quantisation": {"kv_quantisation": "fp8"},
        "world_size": {"world_size": 2},
        "max_batch_size": {"max_batch_size": 4097},
        "max_num_tokens": {"max_num_tokens": 8193},
        "max_input_len": {"max_input_len": 4096},
        "max_seq_len": {"max_seq_len": 4097},
    },
    "hidden": {
        "version": {"version": "onnxruntime 0.1"},
        "architecture": {},
        "weight_quantisation": {"weight_quantisation": "int8"},
        "kv_quantisation": {"kv_quantisation": "none"},
        "world_size": {"world_size": 2},
        "max_batch_size": {"max_batch_size": 2049, "max_num_tokens": 2049},
        "max_num_tokens": {"max_num_tokens": 2049},
        "max_input_len": {"max_input_len": 2049, "max_seq_len": 2049},
        "max_seq_len": {"max_seq_len": 2049},
    },
    "embed": {
        "version": {"version": "onnxruntime 0.1"},
        "architecture": {},
        "weight_quantisation": {"weight_quantisation": "int8"},
        "kv_quantisation": {"kv_quantisation": "fp8"},
        "world_size": {"world_size": 2},
        "max_batch_size": {"max_batch_size": 4097, "max_num_tokens": 4097},
        "max_num_tokens": {"max_num_tokens": 4097},
        "max_input_len": {"max_input_len": 513, "max_seq_len": 513},
        "max_seq_len": {"max_seq_len": 513},
    },
}


@pytest.fixture
def own_cache(tiny_cache: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_cache, tmp_path / "cache"))


def _folder(name: str, cache: Path) -> Path:
    spec = registry.engine_spec(name)
    return models.part_folder(spec.model, spec.part, cache)


def _edit(folder: Path, fields: dict[str, Any], *, without: str = "") -> None:
    path = folder / "manifest.json"
    manifest = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({k: v for k, v in manifest.items() if k != without}))


def _without_runtimes(patch: pytest.MonkeyPatch) -> None:
    for runtime in RUNTIMES:
        patch.setitem(sys.modules, runtime, None)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("name", ENGINES)
def test_a_missing_field_is_refused_before_a_runtime_is_imported(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, name: str, field: str
) -> None:
    _edit(_folder(name, own_cache), {}, without=field)
    _without_runtimes(monkeypatch)
    with pytest.raises(ManifestRefused, match=f"{field} is missing") as refusal:
        registry.construct_engine(name, cache=own_cache, threads=1)
    assert refusal.value.fields == (field,)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("name", ENGINES)
def test_an_unknown_value_is_refused_before_a_runtime_is_imported(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, name: str, field: str
) -> None:
    _edit(_folder(name, own_cache), {field: UNKNOWN[field]})
    _without_runtimes(monkeypatch)
    with pytest.raises(ManifestRefused, match=field) as refusal:
        registry.construct_engine(name, cache=own_cache, threads=1)
    assert refusal.value.fields == (field,)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("name", ENGINES)
def test_a_contradiction_with_the_engines_own_word_is_refused_when_it_opens(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, name: str, field: str
) -> None:
    if field == "architecture":
        _other_structure(name, _folder(name, own_cache), monkeypatch)
    _edit(_folder(name, own_cache), CONTRADICTS[name][field])
    with pytest.raises(ManifestRefused, match=field) as refusal:
        registry.open_engine(name, cache=own_cache, threads=1)
    assert field in refusal.value.fields
    assert set(refusal.value.fields) <= {field, *CONTRADICTS[name][field]}


def _other_structure(name: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Behind the same manifest lies a file of another model class."""
    if (
        name == "generate"
    ):  # CTranslate2 would not load a Llama with biases, so only our reading of it changes
        real = ctranslate2.read_model_file

        def with_bias(path: Path) -> ModelFile:
            file = real(path)
            bias = "decoder/layer_0/self_attention/linear_0/bias"
            return replace(file, shapes={**file.shapes, bias: (128,)})

        patch.setattr(ctranslate2, "read_model_file", with_bias)
        return
    path = folder / "trunk.onnx"
    graph = onnx.load(str(path), load_external_data=False)
    for entry in graph.metadata_props:
        if entry.key == "architecture":
            entry.value = "MistralForCausalLM"
    path.write_bytes(graph.SerializeToString())
    described = json.loads((folder / "contents.json").read_text())
    described["files"]["trunk.onnx"] = {"size": path.stat().st_size, "sha256": sha256_file(path)}
    (described["weights_sha256"],) = roots(described)
    (folder / "contents.json").write_text(json.dumps(described))


@pytest.mark.parametrize("name", ENGINES)
def test_an_opened_engine_speaks_of_all_nine_fields_and_agrees(name: str, tiny_cache: Path) -> None:
    engine = registry.open_engine(name, cache=tiny_cache, threads=1)
    told = engine.introspect()
    engine.close()
    assert tuple(told) == FIELDS
    assert not [field for field in FIELDS if told[field].denies(getattr(engine.manifest, field))]


def test_all_contradictions_are_named_at_once() -> None:
    manifest = EngineManifest("a 1", "A", "none", "none", 1, 2, 4, 8, 16)
    told = {name: Told(value, "the engine") for name, value in manifest.as_json().items()}
    require_agreement(manifest, "toy", told)
    told |= {"world_size": Told(2, "the card"), "max_seq_len": Told(15, "the plan", at_most=True)}
    with pytest.raises(ManifestRefused) as refusal:
        require_agreement(manifest, "toy", told)
    assert refusal.value.fields == ("world_size", "max_seq_len")
    assert "world_size is 1, but the card says 2" in str(refusal.value)
    assert "max_seq_len is 16, but the plan says at most 15" in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\x07\0\0\0", "binary version 7"),
        (b"\x06\0\0\0\x09\0ab", "no CTranslate2 model file"),
        (b"", "no CTranslate2 model file"),
    ],
)
def test_a_file_that_is_no_model_file_is_said(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    with pytest.raises(RuntimeError, match=says):
        read_model_file(path)
