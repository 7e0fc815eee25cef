"""Synthetic data: seeded puzzle generators make the prompts, their own verifiers judge the answers.

The verifier is exact and independent of any model, so the pass rate is a fact, not an opinion. A row is
(generator, index) under a seed: the puzzle is made again from these when its answer is scored, nothing is
kept in between. Held-out data is another seed. The library makes puzzle i of seed s from s + i, so two near
seeds share nearly all puzzles; ours are hashed apart first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa

from fabric_pipelines.errors import MissingDependency, UsageError
from fabric_pipelines.ids import digest
from fabric_pipelines.workloads.request import (
    WHOLE,
    EngineChoice,
    Prepared,
    Row,
    Tokeniser,
    prepare,
    request_from,
)

NAME = "synthetic"
ENGINE = "smollm2-135m-instruct@ctranslate2-int8"
FUNCTION = "generate"
CODE_VERSION = "1"
# Short questions with short answers; of the library's 106 generators these stay below 100 tokens a prompt.
GENERATORS = (
    "basic_arithmetic",
    "calendar_arithmetic",
    "chain_sum",
    "gcd",
    "letter_counting",
    "simple_equations",
    "spell_backward",
    "syllogism",
)
PASS_SCORE = 1.0  # what the verifiers give for a right answer; less is partial credit


@dataclass(frozen=True, slots=True)
class SyntheticRequest:
    """generators: names of reasoning-gym; per_generator: prompts of each; seed: same seed, same prompts;
    max_new_tokens: cap of each answer; salt: set it to recompute on purpose."""

    generators: tuple[str, ...] = GENERATORS
    per_generator: int = 6
    seed: int = 20261101
    max_new_tokens: int = 32
    salt: str = ""


def sampling() -> dict[str, Any]:
    return {"kind": "generate", "temperature": 0.0, "top_k": 1, "seed": 0}


@lru_cache(maxsize=256)
def _puzzles(generator: str, size: int, seed: int) -> Any:
    try:
        import reasoning_gym
    except ImportError as fault:
        raise MissingDependency("reasoning-gym", "embedded", "synthetic data") from fault
    try:
        apart = int(digest([generator, seed])[:8], 16) >> 1
        return reasoning_gym.create_dataset(generator, size=size, seed=apart)
    except ValueError as fault:
        raise UsageError(f"there is no generator {generator!r} in reasoning-gym") from fault


def rows(request: SyntheticRequest) -> list[Row]:
    """Generators interleaved, so that the first results show one of each."""
    count = len(request.generators)
    return [
        Row(
            index * count + at,
            str(
                _puzzles(generator, request.per_generator, request.seed)[index]["question"]
            ).strip(),
            {"generator": generator, "index": index},
        )
        for index in range(request.per_generator)
        for at, generator in enumerate(request.generators)
    ]


def prepare_synthetic(
    values: Mapping[str, Any],
    engine: EngineChoice,
    tokeniser: Tokeniser,
    partition: str = WHOLE,
) -> Prepared:
    request = request_from(SyntheticRequest, values)
    return prepare(
        rows(request),
        workload=NAME,
        partition=partition,
        code_version=CODE_VERSION,
        request=request,
        function=FUNCTION,
        sampling=sampling(),
        engine=engine,
        tokeniser=tokeniser,
        max_new_tokens=request.max_new_tokens,
        chat=True,
    )


def answer_in(text: str) -> str:
    """The answer inside a chatty reply: what follows the last "is", "=" or ":" of its last line, else the line.

    Verifiers compare whole strings; a model that says "The answer is 12." has answered 12.
    """
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if not lines:
        return ""
    tail = re.split(r"\bis\b|=|:", lines[-1])[-1]
    return tail.strip("*`\"'., ")


def score(
    request: SyntheticRequest, source_rows: Sequence[int], texts: Sequence[str]
) -> list[float]:
    """The verifier's score in [0, 1] for each reply, the better of the whole reply and the answer in it."""
    scores = []
    for source_row, text in zip(source_rows, texts, strict=True):
        index, at = divmod(source_row, len(request.generators))
        puzzles = _puzzles(request.generators[at], request.per_generator, request.seed)
        entry = puzzles[index]
        scores.append(
            max(
                float(puzzles.score_answer(reply, entry)) if reply else 0.0
                for reply in (text.strip(), answer_in(text))
            )
        )
    return scores


def results(values: Mapping[str, Any], landed: pa.Table) -> pa.Table:
    """Landed generations with prompt, true answer, the verifier's score and whether it passed."""
    request = request_from(SyntheticRequest, values)
    by_row = {row.source_row: row for row in rows(request)}
    source_rows = landed.column("source_row").to_pylist()
    texts = landed.column("text").to_pylist()
    scores = score(request, source_rows, texts)
    known = [by_row[row] for row in source_rows]
    return pa.table(
        {
            "task_id": landed.column("task_id"),
            "source_row": landed.column("source_row"),
            "generator": [row.metadata["generator"] for row in known],
            "prompt": [row.text for row in known],
            "reply": pa.array(texts, pa.string()),
            "answer": [answer_of(request, row) for row in source_rows],
            "score": pa.array(scores, pa.float64()),
            "passed": [value >= PASS_SCORE for value in scores],
            "finish_reason": landed.column("finish_reason"),
            "prompt_tokens": landed.column("prompt_tokens"),
            "output_tokens": landed.column("output_tokens"),
            "engine_fingerprint": landed.column("engine_fingerprint"),
            "seed": pa.array([request.seed] * len(known), pa.int64()),
        }
    )


def answer_of(request: SyntheticRequest, source_row: int) -> str:
    index, at = divmod(source_row, len(request.generators))
    puzzles = _puzzles(request.generators[at], request.per_generator, request.seed)
    return str(puzzles[index]["answer"])


def pass_rates(table: pa.Table) -> dict[str, float]:
    """Share of passed rows, by generator and under "all"."""
    grouped = table.select(["generator", "passed"])
    passed = grouped.column("passed").cast(pa.int64())
    grouped = (
        grouped.set_column(1, "passed", passed)
        .group_by("generator")
        .aggregate([("passed", "mean")])
    )
    rates = dict(
        zip(
            grouped.column("generator").to_pylist(),
            grouped.column("passed_mean").to_pylist(),
            strict=True,
        )
    )
    return {"all": sum(passed.to_pylist()) / max(len(passed), 1), **dict(sorted(rates.items()))}
