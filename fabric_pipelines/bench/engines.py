"""Speed and memory of the CPU engines through their door: `python -m fabric_pipelines.bench.engines`.

Prompts are random token ids with a fixed seed: speed does not depend on what they mean. Figures are per second of
wall time and per CPU-second of one core, the only one of the two that a busy machine leaves comparable.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

from fabric_pipelines import settings
from fabric_pipelines.errors import FabricError
from fabric_pipelines.records.lease import LEASE_SCHEMA, Lease
from fabric_pipelines.telemetry import timed
from fabric_pipelines.worker.engines.door import Engine
from fabric_pipelines.worker.engines.registry import ENGINES, engine_spec, open_engine

SEED = 1


@dataclass(frozen=True, slots=True)
class Case:
    """tasks prompts of `length` tokens, each to be answered with `new` tokens (0 = single pass)."""

    tasks: int
    length: int
    new: int
    sampling: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """What a case took. output_tokens is 0 for single-pass work; rss in bytes, after it."""

    case: Case
    prompt_tokens: int
    output_tokens: int
    seconds: float
    cpu_seconds: float
    rss: int

    def line(self) -> str:
        done = self.output_tokens or self.prompt_tokens
        case = self.case
        return (
            f"{case.tasks:>4} x {case.length:<4} new {case.new:<3} {self.seconds:7.2f} s "
            f"{done / self.seconds:8.0f} tok/s {done / self.cpu_seconds:8.0f} tok/cpu-s "
            f"{self.rss / 1e6:6.0f} MB"
        )


GREEDY = {"kind": "generate", "temperature": 0.0}
HIDDEN = {"kind": "hidden", "layers": [8, 16, 30], "pooling": "last"}
SHALLOW = {"kind": "hidden", "layers": [8], "pooling": "last"}
EMBED = {"kind": "embed", "pooling": "mean", "normalise": True}
CASES: Mapping[str, Sequence[Case]] = {
    "generate": [Case(count, 64, 32, GREEDY) for count in (1, 8, 32)],
    "hidden": [Case(32, 32, 0, HIDDEN), Case(8, 128, 0, HIDDEN), Case(32, 32, 0, SHALLOW)],
    "embed": [Case(128, 16, 0, EMBED), Case(64, 32, 0, EMBED), Case(16, 128, 0, EMBED)],
}


def measure(engine: Engine, cases: Sequence[Case], vocab_size: int) -> Iterator[Figure]:
    """One figure a case, on an open engine. A small task runs first, so that nobody pays for the first touch."""
    draw = np.random.default_rng(SEED)
    first = cases[0]
    _run(engine, Case(1, 8, min(first.new, 2), first.sampling), draw, vocab_size)
    for case in cases:
        yield _run(engine, case, draw, vocab_size)


def _run(engine: Engine, case: Case, draw: np.random.Generator, vocab_size: int) -> Figure:
    # The first ids of a vocabulary are control tokens.
    prompts = draw.integers(vocab_size // 10, vocab_size, (case.tasks, case.length), np.uint32)
    output_tokens = 0
    with timed() as took:
        engine.submit(_lease(engine.name, prompts, case))
        while engine.unfinished():
            for batch in engine.poll(1.0):
                failures = set(batch.column("status").to_pylist()) - {"ok"}
                assert not failures, f"{engine.name}: {batch.column('error_text')[0]}"
                output_tokens += len(batch.column("output").flatten())
    return Figure(
        case,
        prompts.size,
        output_tokens,
        took["seconds"],
        took["cpu_seconds"],
        psutil.Process().memory_info().rss,
    )


def _lease(engine: str, prompts: np.ndarray[Any, np.dtype[np.uint32]], case: Case) -> Lease:
    count = len(prompts)
    columns: dict[str, Any] = {
        "task_id": range(count),
        "tokens": list(prompts),
        "max_new_tokens": [case.new] * count,
        "source_row": range(count),
        "metadata": [b""] * count,
        "attempts": [1] * count,
        "leader": [False] * count,
    }
    arrays = [pa.array(columns[field.name], field.type) for field in LEASE_SCHEMA]
    batch = pa.RecordBatch.from_arrays(arrays, schema=LEASE_SCHEMA)
    return Lease(1, "bench", engine, case.sampling, case.length, 0, batch)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Speed and memory of the CPU engines.")
    parser.add_argument("--engine", choices=sorted(ENGINES), help="one engine; default: all")
    parser.add_argument("--threads", type=int, default=0, help="compute threads; 0: all cores")
    given = parser.parse_args(argv)
    cache: Path = settings.load().models
    for name in [given.engine] if given.engine else sorted(ENGINES):
        spec = engine_spec(name)
        (kind,) = spec.kinds
        started = time.perf_counter()
        engine = open_engine(name, cache=cache, threads=given.threads)
        loaded = time.perf_counter() - started
        sys.stdout.write(f"{name}: open in {loaded:.2f} s\n")
        for figure in measure(engine, CASES[kind], spec.vocab_size):
            sys.stdout.write(figure.line() + "\n")
        engine.close()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FabricError as fault:
        sys.stderr.write(f"{fault}\n")
        sys.exit(fault.exit_code)
