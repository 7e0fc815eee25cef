"""The registry's promises about the shipped engines, against the catalogue."""

from __future__ import annotations

from fabric_pipelines.models import MODELS
from fabric_pipelines.models.recipes import RECIPES
from fabric_pipelines.records.shape import KINDS
from fabric_pipelines.worker.engines.registry import ENGINES


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
