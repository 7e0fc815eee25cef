"""What vLLM's own rate hangs on: one engine process, one variable at a time, work without end.

A stream gives the engine what it has places for; per row it settles, then the tokens that the scheduler gave out (prompt and
generated, none reused: prompts are random) are counted for some seconds. So a row knows neither a beginning nor a drain.
Sequences only grow from row to row. A trace of some steps behind a row says what share of the wall time kernels fill; it holds
kernels alone, since what the host does becomes slower by being recorded. `python -m tests.bench.levers_on_cuda TRACE...` looks at such traces
again.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fabric_pipelines.bench.supply import Mix, draw_mix
from fabric_pipelines.worker.engines.vllm import VllmEngine
from fabric_pipelines.worker.engines.vllm_driver import ADDS_PER_TURN
from tests.bench import vllm_inside
from tests.bench.vllm_inside import ask

WAITING = 700  # requests beyond those that run
TRACED, SKIPPED_US = 48, 300_000  # steps of a trace, and how much of its beginning is left out
STEP = re.compile(r"context_(\d+)\((\d+)\)_generation_(\d+)")  # vLLM's mark of a step
CARD = "clocks.sm,power.draw,utilization.gpu,clocks_event_reasons.active"


@dataclass(frozen=True, slots=True)
class Lever:
    """A row: at most so many sequences, and tokens a step; group: places that must be free before requests are added, 0 =
    there are always some waiting inside vLLM; ahead, whole_answers: see vllm_inside.set_ahead; traced: kernels of some steps are
    looked at behind it; collector: Python's, in the scheduler's process."""

    sequences: int
    step_tokens: int
    group: int = 0
    ahead: int = 1
    whole_answers: bool = False
    traced: bool = False
    collector: bool = True


class Stream:
    """The mix of table (a) again and again, driven by this thread."""

    def __init__(self, engine: VllmEngine) -> None:
        import vllm
        import vllm.inputs
        import vllm.sampling_params

        self._engine, self._llm = engine, engine.llm.llm_engine
        mix: Mix = draw_mix(6000, seed=5)
        self._prompts = itertools.cycle([prompt.tolist() for prompt in mix.prompts])
        kind = vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        params = {
            cap: vllm.SamplingParams(
                max_tokens=cap, ignore_eos=True, detokenize=False, temperature=0.0, output_kind=kind
            )
            for cap in set(mix.new.tolist())
        }
        self._params = itertools.cycle([params[cap] for cap in mix.new.tolist()])
        self._wrap = vllm.inputs.tokens_input
        self._inside: set[str] = set()
        self._given = itertools.count()

    def run(self, row: Lever, seconds: float) -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            self._step(row)

    def steps(self, row: Lever, count: int) -> None:
        for _ in range(count):
            self._step(row)

    def _step(self, row: Lever) -> None:
        free = row.sequences + (0 if row.group else WAITING) - len(self._inside)
        for _ in range(min(free, ADDS_PER_TURN) if free >= row.group else 0):
            number = next(self._given)
            # A first token of its own: the same prompt must not find itself in the prefix cache.
            fresh = [10 + number % 150_000, *next(self._prompts)[1:]]
            self._llm.add_request(f"stream-{number}", self._wrap(fresh), next(self._params))
            self._inside.add(f"stream-{number}")
        for output in self._llm.step():
            if output.finished:
                self._inside.discard(output.request_id)

    def end(self) -> None:
        self._llm.abort_request(list(self._inside))
        self._inside.clear()
        until = time.perf_counter() + 30
        while ask(self._engine, vllm_inside.count_tokens)[2] and time.perf_counter() < until:
            time.sleep(0.05)


def measure(
    engine: VllmEngine,
    rows: Sequence[Lever],
    settle_s: float,
    seconds: float,
    profiles: Path,
) -> Iterator[dict[str, Any]]:
    """A dictionary a row, as it comes; traces go into `profiles`. The last row's settings stay."""
    profiles.mkdir(parents=True, exist_ok=True)
    stream = Stream(engine)
    ask(engine, vllm_inside.count_tokens)
    try:
        for number, row in enumerate(rows):
            ask(engine, vllm_inside.set_limits, row.sequences, row.step_tokens)
            ask(engine, vllm_inside.set_ahead, row.ahead, row.whole_answers)
            ask(engine, vllm_inside.set_collector, row.collector)
            stream.run(row, settle_s * (4 if number == 0 else 1))
            told = counted(engine, stream, row, seconds)
            if row.traced:
                told["profile"] = traced(engine, stream, row, profiles / f"kernels-{number}.json")
            yield told
    finally:
        stream.end()
        ask(engine, vllm_inside.stop_count)
        ask(engine, vllm_inside.set_collector, True)


def counted(engine: VllmEngine, stream: Stream, row: Lever, seconds: float) -> dict[str, Any]:
    tokens, steps, _ = ask(engine, vllm_inside.count_tokens)
    started = time.perf_counter()
    stream.run(row, seconds / 2)
    card = subprocess.Popen(
        ["nvidia-smi", f"--query-gpu={CARD}", "--format=csv,noheader"],
        stdout=subprocess.PIPE,
        text=True,
    )
    stream.run(row, seconds / 2)
    tokens_then, steps_then, running = ask(engine, vllm_inside.count_tokens)
    took = time.perf_counter() - started
    made = max(steps_then - steps, 1)
    return {
        **asdict(row),
        "seconds": took,
        "total_tok_s": round((tokens_then - tokens) / took),
        "running": running,
        "step_ms": round(1000 * took / made, 2),
        "tokens_a_step": round((tokens_then - tokens) / made),
        "card": card.communicate()[0].strip(),
    }


def traced(engine: VllmEngine, stream: Stream, row: Lever, to: Path) -> dict[str, Any]:
    ask(engine, vllm_inside.start_trace)
    stream.steps(row, TRACED)
    ask(engine, vllm_inside.stop_trace, str(to))
    return kernels(to)


def kernels(trace: Path) -> dict[str, Any]:
    """Share of the time between two kernels far apart that kernels fill (overlaps once), and what they were; filled_whole: without
    leaving out its beginning."""
    spans = kernel_spans(read(trace))
    whole = filled(spans) / (max(ended for _, ended, _ in spans) - spans[0][0])
    # The first steps of a trace are slow on the host: their kernels are looked up by the tracer.
    spans = [span for span in spans if span[0] >= spans[0][0] + SKIPPED_US]
    times: Counter[str] = Counter()
    for begun, ended, name in spans:
        times[family(name)] += ended - begun
    wall = max(ended for _, ended, _ in spans) - spans[0][0]
    total = sum(times.values())
    return {
        "kernels": len(spans), "wall_ms": round(wall / 1000, 1), "filled": round(filled(spans) / wall, 4),
        "filled_whole": round(whole, 4),
        "shares": {name: round(took / total, 4) for name, took in times.most_common(25)},
    }  # fmt: skip


def by_step(trace: Path) -> dict[str, dict[str, float]]:
    """Of steps that only generate and of those that also hold prompts: how many, tokens, ms from one to the next, and ms of it
    that kernels fill. The first five are left out."""
    events = read(trace)
    spans = kernel_spans(events)
    marks = sorted(
        (event["ts"], int(found[2]) + int(found[3]), int(found[1]) > 0)
        for event in events
        if event.get("cat") == "gpu_user_annotation" and (found := STEP.search(event["name"]))
    )
    told: dict[str, list[tuple[float, float, int]]] = {"generate only": [], "with prompts": []}
    for (begun, tokens, prompts), (after, _, _) in itertools.pairwise(marks[5:]):
        own = [span for span in spans if begun <= span[0] < after]
        row = ((after - begun) / 1000, filled(own) / 1000, tokens)
        told["with prompts" if prompts else "generate only"].append(row)
    return {
        kind: {
            "steps": len(rows),
            "tokens": round(statistics.fmean(row[2] for row in rows)),
            "ms": round(statistics.fmean(row[0] for row in rows), 1),
            "kernels_ms": round(statistics.fmean(row[1] for row in rows), 1),
        }
        for kind, rows in told.items()
        if rows
    }


def read(trace: Path) -> list[dict[str, Any]]:
    told = trace.read_bytes()
    found: list[dict[str, Any]] = json.loads(
        gzip.decompress(told) if trace.suffix == ".gz" else told
    )["traceEvents"]
    return found


def kernel_spans(events: list[dict[str, Any]]) -> list[tuple[float, float, str]]:
    return sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in event
    )


def filled(spans: Sequence[tuple[float, float, str]]) -> float:
    """Time under one of them at least."""
    total, reached = 0.0, float("-inf")
    for begun, ended, _ in spans:
        total += max(ended - max(begun, reached), 0.0)
        reached = max(reached, ended)
    return total


def family(name: str) -> str:
    """A kernel's name without its arguments, short enough for a table."""
    bare = re.sub(r"^(void|std::\w+) ", "", name)
    found = re.search(r"(flash|cutlass|nvjet|gemm|sm90)\w*", bare, re.IGNORECASE)
    return (found.group(0) + " " if found else "") + bare[:70]


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        told = {"trace": path.name, "steps": by_step(path), **kernels(path)}
        sys.stdout.write(json.dumps(told, indent=1) + "\n")
