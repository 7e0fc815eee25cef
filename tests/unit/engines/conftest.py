"""The real engines over tiny models, and the registry that knows only them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from fabric_pipelines import models
from fabric_pipelines.models import catalogue
from fabric_pipelines.models.catalogue import ModelSpec
from fabric_pipelines.worker.engines import registry
from fabric_pipelines.worker.engines.door import Engine
from tests.tiny_models import write_bert, write_llama


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny-engines")


@pytest.fixture(scope="session")
def tiny_specs(tiny_folder: Path) -> Mapping[str, ModelSpec]:
    return {spec.name: spec for spec in (write_llama(tiny_folder), write_bert(tiny_folder))}


@pytest.fixture
def tiny_known(monkeypatch: pytest.MonkeyPatch, tiny_specs: Mapping[str, ModelSpec]) -> None:
    """For this test catalogue and registry hold the tiny models only."""
    monkeypatch.setattr(catalogue, "MODELS", tiny_specs)
    specs = (
        replace(registry.GENERATE, name="generate", model="tiny-llama"),
        replace(registry.HIDDEN, name="hidden", model="tiny-llama"),
        replace(registry.EMBED, name="embed", model="tiny-bert"),
    )
    monkeypatch.setattr(registry, "ENGINES", {spec.name: spec for spec in specs})


@pytest.fixture(scope="session")
def tiny_cache(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_folder: Path,
    tiny_specs: Mapping[str, ModelSpec],
) -> Path:
    cache = tmp_path_factory.mktemp("tiny-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalogue, "MODELS", tiny_specs)
        for name in tiny_specs:
            models.pull(name, cache, source=str(tiny_folder))
    return cache


@pytest.fixture
def generate(tiny_known: None, tiny_cache: Path) -> Iterator[Engine]:
    yield from _opened("generate", tiny_cache)


@pytest.fixture
def hidden(tiny_known: None, tiny_cache: Path) -> Iterator[Engine]:
    yield from _opened("hidden", tiny_cache)


@pytest.fixture
def embed(tiny_known: None, tiny_cache: Path) -> Iterator[Engine]:
    yield from _opened("embed", tiny_cache)


def _opened(name: str, cache: Path) -> Iterator[Engine]:
    engine = registry.open_engine(name, cache=cache, threads=1)
    yield engine
    engine.close()
