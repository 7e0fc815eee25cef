"""Rows and held-out queries for tests/bench/search.py: drawn ones, and embeddings of the project's own corpus.

Real ones are all-MiniLM vectors of the verses that quickstart embeds (workloads.corpus) and, where more are asked for, of
every run of so many words in them, which overlap: a row's nearest neighbours are often its own text moved by a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fabric_pipelines.workloads.corpus import verses

CLUSTERS, SPREAD = 1000, 0.2
LATENT = 24
RUNS = (12, 8, 16, 24, 10, 14, 20, 6, 18, 22, 9, 11, 13, 15, 7, 17)  # words
TEXTS_AT_ONCE = 256


def drawn(kind: str, rows: int, dim: int, seed: int) -> np.ndarray:
    rng, fixed = np.random.default_rng(seed), np.random.default_rng(5)
    if kind == "uniform":
        return rng.random((rows, dim), dtype=np.float32)
    if kind == "clustered":
        centres = fixed.standard_normal((CLUSTERS, dim), dtype=np.float32)
        noise = SPREAD * rng.standard_normal((rows, dim), dtype=np.float32)
        return centres[rng.integers(0, CLUSTERS, rows)] + noise
    assert kind == "latent", kind
    maps = fixed.standard_normal((LATENT, dim), dtype=np.float32)
    latent = rng.standard_normal((rows, LATENT), dtype=np.float32)
    return np.tanh(latent @ maps / 4) + 0.05 * rng.standard_normal((rows, dim), dtype=np.float32)


def texts() -> Iterator[str]:
    """Verses, then runs of words inside them, each once."""
    seen = set()
    for verse in verses():
        if verse.text not in seen:
            seen.add(verse.text)
            yield verse.text
    for words in RUNS:
        for verse in verses():
            every = verse.text.split()
            for start in range(len(every) - words + 1):
                run = " ".join(every[start : start + words])
                if run not in seen:
                    seen.add(run)
                    yield run


def embedded(count: int) -> np.ndarray:
    """float32 [n, 384] of the first `count` texts; fewer where there are fewer. ModelMissing without the model."""
    # here: a machine with a card brings vectors in a file, and no engines
    from fabric_pipelines import models, settings
    from fabric_pipelines.worker.engines import registry
    from fabric_pipelines.worker.engines.tasks import tasks_of
    from tests.tiny_models import lease_of

    cache = settings.load().models
    engine = registry.open_engine(registry.EMBED.name, cache=cache, threads=0)
    try:
        tokeniser = models.tokeniser(registry.EMBED.model, cache)
        wanted = [text for text, _ in zip(texts(), range(count), strict=False)]
        out = np.empty((len(wanted), engine.capabilities.dim), np.float32)
        for start in range(0, len(wanted), TEXTS_AT_ONCE):
            prompts = tokeniser.encode(wanted[start : start + TEXTS_AT_ONCE])
            tasks = tasks_of(
                lease_of(prompts, {"kind": "embed", "pooling": "mean", "normalise": True})
            )
            order = sorted(range(len(tasks)), key=lambda at: tasks[at].length)
            for first in range(0, len(order), 16):
                part = order[first : first + 16]
                found = engine.vectors([tasks[at] for at in part])  # type: ignore[attr-defined]
                out[start + np.array(part)] = found
    finally:
        engine.close()
    return out


def split(vectors: np.ndarray, rows: int, queries: int) -> tuple[np.ndarray, np.ndarray]:
    """At most `rows` of them, and `queries` others; where there are too few, a tenth is asked, over and over."""
    mixed = vectors[np.random.default_rng(7).permutation(len(vectors))]
    held = min(queries, max(1, len(mixed) // 10))
    xb = np.ascontiguousarray(mixed[held : held + rows])
    return xb, np.resize(mixed[:held], (queries, vectors.shape[1]))


def real(rows: int, queries: int, file: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """From `file` (embedded's, saved by numpy) or made now, which takes some milliseconds a row."""
    vectors = np.load(file) if file else embedded(rows + min(queries, rows // 9 + 1))
    return split(vectors.astype(np.float32), rows, queries)
