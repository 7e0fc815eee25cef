"""The worker's engine, as a producer needs it: what pins its answers, and its tokeniser.

A producer never opens an engine: the identity comes from the pins of the model catalogue, so work can be
submitted before any worker has started.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from fabric_pipelines import models
from fabric_pipelines.ids import digest
from fabric_pipelines.worker.engines.registry import engine_spec
from fabric_pipelines.workloads.request import EngineChoice, Tokeniser
from resources.fabric import FabricResource


@lru_cache(maxsize=8)
def _tokeniser(model: str, cache: Path) -> models.Tokeniser:
    return models.tokeniser(model, cache)


class GpuWorkerResource(FabricResource):
    def engine(self, name: str) -> EngineChoice:
        spec = engine_spec(name)
        files = {file.name: file.sha256 for file in models.MODELS[spec.model].files}
        return EngineChoice(name, digest({"engine": name, "files": files}), spec.vocab_size)

    def tokeniser(self, engine: str) -> Tokeniser:
        return _tokeniser(engine_spec(engine).model, self.settings().models)
