"""The registry's promises about the shipped engines, against the catalogue."""

from __future__ import annotations

from pathlib import Path

import pytest

from fabric_pipelines.errors import ModelMissing
from fabric_pipelines.models import MODELS
from fabric_pipelines.models.recipes import RECIPES
from fabric_pipelines.records.shape import KINDS
from fabric_pipelines.worker.engines.registry import ENGINES, GENERATE, spec_of
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
