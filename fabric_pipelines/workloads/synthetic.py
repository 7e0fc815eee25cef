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
# Of the library's 106 generators: short questions with short answers, in settings that a small model can get
# right now and then. Others may be asked for; they come in the library's own settings. Not all of them give the
# same puzzles for a seed in every process (ransom_note follows the hash seed); these do, and a test holds it.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "basic_arithmetic": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "calendar_arithmetic": {"tasks": ["is_leap_year", "weekday_of_date"]},
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 20},
    "lcm": {"min_value": 1, "max_value": 10},
    "letter_counting": {"min_words": 2, "max_words": 4},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "syllogism": {},
}
MARK = r"\bis\b|=|:"  # what comes before an answer
INSTRUCTION = "Reply with the answer only."
PASS_SCORE = 1.0  # what the verifiers give for a right answer; less is partial credit


@dataclass(frozen=True, slots=True)
class SyntheticRequest:
    """generators: names of reasoning-gym; per_generator: prompts of each; seed: same seed, same prompts;
    max_new_tokens: cap of each answer; salt: set it to recompute on purpose."""

    generators: tuple[str, ...] = tuple(SETTINGS)
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
        return reasoning_gym.create_dataset(
            generator, size=size, seed=apart, **SETTINGS.get(generator, {})
        )
    except ValueError as fault:
        raise UsageError(f"there is no generator {generator!r} in reasoning-gym") from fault


def _puzzle(request: SyntheticRequest, source_row: int) -> tuple[Any, Mapping[str, Any]]:
    """(generator with its verifier, entry) of a row."""
    index, at = divmod(source_row, len(request.generators))
    puzzles = _puzzles(request.generators[at], request.per_generator, request.seed)
    return puzzles, puzzles[index]


def rows(request: SyntheticRequest) -> list[Row]:
    """Generators interleaved, so that the first results show one of each."""
    count = len(request.generators)
    made = []
    for row in range(request.per_generator * count):
        _, entry = _puzzle(request, row)
        text = f"{entry['question'].strip()}\n{INSTRUCTION}"
        made.append(
            Row(row, text, {"generator": request.generators[row % count], "index": row // count})
        )
    return made


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
    """The answer inside a chatty reply: a leading yes, no, true or false; else what follows the last "is", "=" or
    ":" of the first sentence that has one; else the first sentence.

    Verifiers compare whole strings; a model that says "The answer is 12." has answered 12.
    """
    word = re.match(r"\W*(yes|no|true|false)\b", text, re.IGNORECASE)
    if word:
        return word[1]
    sentences = [part for part in re.split(r"(?:\.\s|\n)+", text.strip()) if part.strip()]
    telling = [part for part in sentences if re.search(MARK, part)] or sentences[:1]
    return re.split(MARK, telling[0])[-1].strip("*`\"'$., ") if telling else ""


def score(
    request: SyntheticRequest, source_rows: Sequence[int], texts: Sequence[str]
) -> list[float]:
    """The verifier's score in [0, 1] for each reply, the better of the whole reply and the answer in it."""
    scores = []
    for source_row, text in zip(source_rows, texts, strict=True):
        puzzles, entry = _puzzle(request, source_row)
        replies = {text.strip(), answer_in(text)} - {""}
        scores.append(max((_verified(puzzles, reply, entry) for reply in replies), default=0.0))
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


def _verified(puzzles: Any, reply: str, entry: Mapping[str, Any]) -> float:
    try:
        return float(puzzles.score_answer(reply, entry))
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, SyntaxError):
        # Some verifiers parse before they compare and fall over prose: no answer was recognised.
        return 0.0


def answer_of(request: SyntheticRequest, source_row: int) -> str:
    return str(_puzzle(request, source_row)[1]["answer"])


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
