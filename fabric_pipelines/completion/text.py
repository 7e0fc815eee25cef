"""Text of generated tokens, by the tokeniser of the engine that made them, where that model is installed.

A model that is not on this machine leaves text null: token ids are the result, text is a convenience.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from fabric_pipelines import models
from fabric_pipelines.errors import FabricError

LOOK_AGAIN_S = 30.0
"""A model may be pulled while completion runs."""


@dataclass(slots=True)
class Decoder:
    """Callable (engine, list<uint32>) -> strings, or None without a tokeniser."""

    cache: Path
    _open: dict[str, models.Tokeniser] = field(default_factory=dict)
    _absent_s: dict[str, float] = field(default_factory=dict)

    def __call__(self, engine: str, outputs: pa.Array) -> pa.Array | None:
        tokeniser = self._tokeniser(engine.split("@", 1)[0])
        if tokeniser is None:
            return None
        # a null row has no output, and decodes to nothing
        texts = tokeniser.decode(ids or [] for ids in outputs.to_pylist())
        return pa.array(texts, pa.string(), mask=outputs.is_null().to_numpy(zero_copy_only=False))

    def _tokeniser(self, model: str) -> models.Tokeniser | None:
        if model in self._open:
            return self._open[model]
        if time.monotonic() - self._absent_s.get(model, -LOOK_AGAIN_S) < LOOK_AGAIN_S:
            return None
        try:
            self._open[model] = models.tokeniser(model, self.cache)
        except FabricError:
            # not pulled here, or not one of our models: null text says so
            self._absent_s[model] = time.monotonic()
            return None
        return self._open[model]
