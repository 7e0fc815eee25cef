"""The registry's promises about the shipped engines, against the catalogue."""

from __future__ import annotations

from pathlib import Path

import pytest

from fabric_pipelines.errors import ModelMissing, UsageError
from fabric_pipelines.models import MODELS
from fabric_pipelines.models.recipes import RECIPES
from fabric_pipelines.records.shape import KINDS
from fabric_pipelines.worker.engines.building import Declared, build
from fabric_pipelines.worker.engines.names import folder_of
from fabric_pipelines.worker.engines.registry import ENGINES, GENERATE, engine_folder, spec_of
from tests.unit.engines.tensorrt_over_standin import TensorRtOverStandin, write_trunk
from tests.unit.engines.vllm_over_standin import VOCAB, VllmOverStandin


def test_every_engine_runs_a_conversion_that_its_model_declares() -> None:
    for spec in ENGINES.values():
        assert spec.part in MODELS[spec.model].variants
        assert spec.name == f"{spec.model}@{spec.part}"
        assert spec.kinds <= set(KINDS)


def test_every_declared_variant_has_a_recipe_with_limits() -> None:
    for model in MODELS.values():
        limited = {r.part for r in RECIPES[model.architecture] if r.limits is not None}
        assert limited == set(model.variants)


def test_every_model_is_pinned_and_says_its_licence() -> None:
    for model in MODELS.values():
        assert "==" in model.source
        assert len(model.wheel_sha256) == 64
        assert all(len(file.sha256) == 64 and file.size > 0 for file in model.files)
        assert model.licence == "Apache-2.0"
        assert model.licence_source


def test_a_described_engine_has_a_spec_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "tiny@vllm-fp8"
    with pytest.raises(ModelMissing, match=f"fabric engine build {name}"):
        spec_of(name, tmp_path)
    (tmp_path / "checkpoints").mkdir()
    VllmOverStandin(tmp_path / "checkpoints" / name, monkeypatch)
    spec = spec_of(name, tmp_path)
    assert (spec.model, spec.kinds, spec.vocab_size) == ("tiny", {"generate"}, VOCAB)
    assert (spec.device, spec.extra) == ("cuda", "vllm")
    assert "ignore_eos" in spec.generate_keys
    assert spec_of(GENERATE.name, tmp_path) is GENERATE


def test_a_built_plan_has_a_spec_with_its_deepest_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "tiny@tensorrt"
    trunk = write_trunk(tmp_path)
    TensorRtOverStandin(trunk, tmp_path / "plans" / name / "sm_90", monkeypatch).plan()
    spec = spec_of(name, tmp_path)
    assert (spec.kinds, spec.layers, spec.device) == ({"hidden"}, 3, "cuda")


@pytest.mark.parametrize("runtime", ["transformers-x", "vllm", "tensorrt_llm", "tensorrt-sm90"])
@pytest.mark.parametrize(
    "model",
    ["../../evil", "a/b", "/etc/x", "..\\x", ".hidden", "a\0b", "a\nb", "\u0661", "x" * 200],
)
def test_a_name_that_is_no_plain_folder_name_reads_and_writes_nothing(
    tmp_path: Path, model: str, runtime: str
) -> None:
    """Though the folder that it leads to is there, with a config of its own."""
    cache, name = tmp_path / "deep" / "cache", f"{model}@{runtime}"
    if "evil" in model or model == "a/b":
        outside = cache / "checkpoints" / name
        outside.mkdir(parents=True)
        (outside / "config.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match="is no name of a folder"):
        engine_folder(name, cache)
    with pytest.raises(UsageError, match="is no name of a folder"):
        build(name, Declared(1, 1, 1, 1, "none", "none"), cache=cache)
    with pytest.raises(UsageError, match="is no name of a folder"):
        folder_of(cache / "profiles", name)
    assert sorted(tmp_path.rglob("*")) == before
