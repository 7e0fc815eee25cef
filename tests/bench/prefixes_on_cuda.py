"""Arrival order against the broker's on prefix-heavy work, by how many times the distinct prefixes fill the cache.

Documents of 300-699 tokens, each with several questions of 20-59 tokens and answers of 64-127, shuffled. *arrival* is vLLM
fed from memory with the shuffled list (supply.run_direct); *broker* the same list submitted as it is, through broker process
and worker loop. The cache is capped by holding blocks back in vLLM's own pool and emptied before each side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fabric_pipelines.bench.supply import Mix, run_direct, run_fabric
from fabric_pipelines.worker.engines.vllm import VllmEngine
from tests.bench import vllm_inside
from tests.bench.vllm_inside import ask

BLOCK = 16
DOCUMENT, QUESTION, ANSWER = (300, 700), (20, 60), (64, 128)
VOCABULARY = (10, 150_000)


@dataclass(frozen=True, slots=True)
class Row:
    """Distinct prefixes of `ratio` times the cache, `questions` to each; sides in this order. cache_tokens: 0 for the session's."""

    ratio: float
    questions: int
    sides: Sequence[str]
    cache_tokens: int = 0


def draw(tokens: int, questions: int, seed: int) -> Mix:
    """Documents of about `tokens` tokens together, each with its questions, shuffled."""
    random = np.random.default_rng(seed)
    prompts = []
    while tokens > 0:
        document = random.integers(*VOCABULARY, random.integers(*DOCUMENT))
        tokens -= len(document)
        for _ in range(questions):
            question = random.integers(*VOCABULARY, random.integers(*QUESTION))
            prompts.append(np.concatenate([document, question]))
    order = random.permutation(len(prompts))
    return Mix([prompts[row] for row in order], random.integers(*ANSWER, len(prompts)))


def bound(prompts: Sequence[Any]) -> float:
    """Share of the offered tokens that a cache without limit would give back: whole blocks, never a prompt's last token."""
    seen: set[int] = set()
    hit = 0
    for prompt in prompts:
        known = True
        for end in range(BLOCK, len(prompt) + 1, BLOCK):
            key = hash(prompt[:end].tobytes())
            if known and key in seen and end < len(prompt):
                hit += BLOCK
            else:
                known = False
                seen.add(key)
    return hit / sum(len(prompt) for prompt in prompts)


def measure(
    engine: VllmEngine,
    rows: Sequence[tuple[int, Row]],
    cache_tokens: int,
    home: Path,
    say: Callable[[dict[str, Any]], None],
) -> None:
    """Tells one dictionary a side; a row's number seeds its mix. The engine is as it was afterwards."""
    plain = engine.profile
    try:
        for number, row in rows:
            cache = row.cache_tokens or cache_tokens
            mix = draw(int(row.ratio * cache), row.questions, seed=number)
            limit = round(bound(mix.prompts), 4)
            for turn, way in enumerate(row.sides):
                left = ask(engine, vllm_inside.cap_cache, cache // BLOCK)
                engine.profile = replace(plain, kv_cache_tokens=left * BLOCK)
                side = (
                    run_direct(engine, mix)
                    if way == "arrival"
                    else run_fabric(engine, mix, home / f"prefixes{number}-{turn}")
                )
                say({
                    "table": "prefixes", "ratio": row.ratio, "order": way, "bound": limit,
                    "hit_rate": round(side.reused_tokens / side.offered_tokens, 4),
                    "cache_tokens": left * BLOCK, "questions": row.questions, **side.as_json(),
                })  # fmt: skip
    finally:
        engine.profile = plain
        ask(engine, vllm_inside.cap_cache, None)
