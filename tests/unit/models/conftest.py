"""Tiny models, written once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from fabric_pipelines.models import catalogue
from fabric_pipelines.models.catalogue import ModelSpec
from tests.tiny_models import write_bert, write_llama


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="session")
def tiny_llama(tiny_folder: Path) -> ModelSpec:
    return write_llama(tiny_folder)


@pytest.fixture(scope="session")
def tiny_bert(tiny_folder: Path) -> ModelSpec:
    return write_bert(tiny_folder)


@pytest.fixture
def known(
    monkeypatch: pytest.MonkeyPatch, tiny_llama: ModelSpec, tiny_bert: ModelSpec
) -> dict[str, ModelSpec]:
    """For this test the catalogue holds the tiny models only."""
    specs = {spec.name: spec for spec in (tiny_llama, tiny_bert)}
    monkeypatch.setattr(catalogue, "MODELS", specs)
    return specs
