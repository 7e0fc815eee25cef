"""A contradiction in an engine folder is refused by the field's name before anything is loaded."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from fabric_pipelines import models
from fabric_pipelines.errors import (
    DigestMismatch,
    EngineFailed,
    ManifestRefused,
    MissingDependency,
    ModelMissing,
    UsageError,
)
from fabric_pipelines.models.facts import roots
from fabric_pipelines.models.sources import sha256_file
from fabric_pipelines.worker.engines import registry
from fabric_pipelines.worker.engines.opening import read_folder

pytestmark = pytest.mark.usefixtures("tiny_known")
ENGINES = ("generate", "hidden", "embed")


@pytest.fixture
def own_cache(tiny_cache: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_cache, tmp_path / "cache"))


def _folder(name: str, cache: Path) -> Path:
    spec = registry.engine_spec(name)
    return models.part_folder(spec.model, spec.part, cache)


def _edit(folder: Path, **fields: object) -> None:
    path = folder / "manifest.json"
    manifest = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({k: v for k, v in manifest.items() if v != "absent"}))


@pytest.mark.parametrize("name", ENGINES)
def test_nine_fields_are_read_from_the_folder(name: str, tiny_cache: Path) -> None:
    engine = registry.construct_engine(name, cache=tiny_cache, threads=1)
    fields = json.loads((_folder(name, tiny_cache) / "manifest.json").read_text())
    assert len(fields) == 9
    assert engine.manifest.as_json() == fields
    assert engine.capabilities.kinds == registry.engine_spec(name).kinds
    told = engine.capabilities.vocab_size or engine.capabilities.dim
    assert told > 0, "results are compared with it"


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(
    ("fields", "at_fault"),
    [
        ({"version": "ctranslate2 0.1"}, "version"),
        ({"version": "absent"}, "version"),
        ({"max_input_len": 100_000, "max_seq_len": 100_000}, "max_input_len"),
        ({"max_seq_len": 100_000}, "max_seq_len"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"kv_quantisation": None}, "kv_quantisation"),
        ({"world_size": "1"}, "world_size"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_contradiction_is_refused_by_name(
    own_cache: Path, name: str, fields: dict[str, object], at_fault: str
) -> None:
    _edit(_folder(name, own_cache), **fields)
    with pytest.raises(ManifestRefused, match=at_fault) as refusal:
        registry.open_engine(name, cache=own_cache, threads=1)
    assert at_fault in refusal.value.fields


def test_a_quantisation_that_the_loaded_model_denies_is_refused(own_cache: Path) -> None:
    _edit(_folder("generate", own_cache), weight_quantisation="fp8")
    with pytest.raises(ManifestRefused, match="the loaded model says 'int8'") as refusal:
        registry.open_engine("generate", cache=own_cache, threads=1)
    assert refusal.value.fields == ("weight_quantisation",)


def test_a_manifest_that_is_no_json_is_refused(own_cache: Path) -> None:
    (_folder("embed", own_cache) / "manifest.json").write_text("[1]")
    with pytest.raises(ManifestRefused, match="not an object of nine fields"):
        registry.open_engine("embed", cache=own_cache, threads=1)
    (_folder("embed", own_cache) / "manifest.json").write_text("{")
    with pytest.raises(ManifestRefused, match="not a readable engine folder"):
        registry.open_engine("embed", cache=own_cache, threads=1)


def test_a_truncated_weight_file_is_refused_before_loading(own_cache: Path) -> None:
    weights = _folder("hidden", own_cache) / "trunk.weights"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ManifestRefused, match="has not the size it was written with"):
        registry.open_engine("hidden", cache=own_cache, threads=1)


@pytest.mark.parametrize(("name", "file"), [("generate", "model.bin"), ("hidden", "trunk.weights")])
def test_one_flipped_bit_of_the_weights_is_refused_before_loading(
    own_cache: Path, name: str, file: str
) -> None:
    path = _folder(name, own_cache) / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DigestMismatch, match=f"{file} changed .*run `fabric models pull tiny"):
        registry.open_engine(name, cache=own_cache, threads=1)


@pytest.mark.parametrize(("name", "file"), [("generate", "model.bin"), ("hidden", "trunk.onnx")])
def test_a_file_that_the_runtime_cannot_read_is_one_sentence(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, name: str, file: str
) -> None:
    path = _folder(name, own_cache) / file
    path.write_bytes(b"\xff" * path.stat().st_size)
    monkeypatch.setattr(models, "require_whole", lambda folder: None)
    with pytest.raises(
        EngineFailed, match=r"cannot be loaded (.|\n)*run `fabric models pull tiny-llama` again"
    ):
        registry.open_engine(name, cache=own_cache, threads=1)


def test_the_fingerprint_follows_manifest_and_weights(own_cache: Path) -> None:
    folder = _folder("generate", own_cache)
    first = read_folder(folder).fingerprint
    assert read_folder(folder).fingerprint == first
    _edit(folder, max_batch_size=2)
    second = read_folder(folder).fingerprint
    model = folder / "model.bin"
    model.write_bytes(model.read_bytes()[::-1])
    described = json.loads((folder / "contents.json").read_text())
    described["files"]["model.bin"]["sha256"] = sha256_file(model)
    (described["weights_sha256"],) = roots(described)
    (folder / "contents.json").write_text(json.dumps(described))
    assert len({first, second, read_folder(folder).fingerprint}) == 3


def test_constructing_touches_no_runtime(tiny_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for runtime in ("ctranslate2", "onnxruntime"):
        monkeypatch.setitem(sys.modules, runtime, None)
    for name in ENGINES:
        assert len(registry.construct_engine(name, cache=tiny_cache, threads=1).fingerprint) == 64


@pytest.mark.parametrize(
    ("name", "package"),
    [("generate", "ctranslate2"), ("hidden", "onnxruntime"), ("embed", "onnxruntime")],
)
def test_a_missing_runtime_is_one_sentence_with_the_command(
    tiny_cache: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency) as refusal:
        registry.open_engine(name, cache=tiny_cache, threads=1)
    assert f"needs the package '{package}'" in str(refusal.value)
    assert 'pip install "fabric-pipelines[embedded]"' in str(refusal.value)


def test_a_model_that_was_not_pulled_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match="fabric models pull tiny-llama"):
        registry.open_engine("generate", cache=tmp_path, threads=1)


def test_an_unknown_engine_is_refused_with_those_that_exist() -> None:
    with pytest.raises(UsageError, match="known are generate, hidden, embed"):
        registry.engine_spec("tiny@abacus")


def test_identity_is_known_before_a_model_is_pulled_and_differs_by_engine() -> None:
    assert len({registry.engine_identity(name) for name in ENGINES}) == 3
