"""What vLLM's own rate hangs on: one engine process, one variable at a time, work without end.

A stream keeps more requests waiting than ever run; per row it settles, then the tokens that the scheduler gave out (prompt and
generated, none reused: prompts are random) are counted for some seconds. So a row knows neither a beginning nor a drain.
Sequences only grow from row to row. A trace of some steps behind the first row says what share of the wall time kernels fill, and
the row is measured once more behind it: a profiler that stayed would show.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric_pipelines.bench.supply import Mix, draw_mix
from fabric_pipelines.worker.engines.vllm import VllmEngine
from tests.bench import vllm_inside
from tests.bench.vllm_inside import ask

WAITING = 700  # requests beyond those that run
CARD = "clocks.sm,power.draw,utilization.gpu,clocks_event_reasons.active"


@dataclass(frozen=True, slots=True)
class Lever:
    """A row: at most so many sequences, and tokens a step."""

    sequences: int
    step_tokens: int


class Stream:
    """The mix of table (a) again and again, driven by this thread."""

    def __init__(self, engine: VllmEngine) -> None:
        import vllm

        self._engine, self._llm = engine, engine.llm.llm_engine
        mix: Mix = draw_mix(6000, seed=5)
        self._prompts = itertools.cycle([prompt.tolist() for prompt in mix.prompts])
        self._params = itertools.cycle([
            vllm.SamplingParams(
                max_tokens=int(new), ignore_eos=True, detokenize=False, temperature=0.0,
                output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
            )
            for new in mix.new
        ])  # fmt: skip
        self._wrap = vllm.inputs.tokens_input
        self._inside: set[str] = set()
        self._given = itertools.count()

    def run(self, sequences: int, seconds: float) -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            self._step(sequences + WAITING)

    def steps(self, sequences: int, count: int) -> None:
        for _ in range(count):
            self._step(sequences + WAITING)

    def _step(self, most: int) -> None:
        for _ in range(min(most - len(self._inside), 256)):
            name = f"stream-{next(self._given)}"
            # A first token of its own: the same prompt must not find itself in the prefix cache.
            prompt = next(self._prompts)
            fresh = [10 + next(self._given) % 150_000, *prompt[1:]]
            self._llm.add_request(name, self._wrap(fresh), next(self._params))
            self._inside.add(name)
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
    profiles: Path | None,
) -> list[dict[str, Any]]:
    """A dictionary a row; the trace goes into `profiles`."""
    told = []
    stream = Stream(engine)
    ask(engine, vllm_inside.count_tokens)
    for number, row in enumerate(rows):
        ask(engine, vllm_inside.set_limits, row.sequences, row.step_tokens)
        stream.run(row.sequences, settle_s * (2 if number == 0 else 1))
        told.append(
            {"step_tokens": row.step_tokens, **counted(engine, stream, row.sequences, seconds)}
        )
        if profiles is not None and number == 0:
            told[-1]["profile"] = traced(engine, stream, row.sequences, profiles)
            stream.run(row.sequences, 2.0)
            again = counted(engine, stream, row.sequences, seconds / 2)
            told[-1]["after_profile_tok_s"] = again["total_tok_s"]
    stream.end()
    ask(engine, vllm_inside.stop_count)
    return told


def counted(engine: VllmEngine, stream: Stream, sequences: int, seconds: float) -> dict[str, Any]:
    tokens, steps, _ = ask(engine, vllm_inside.count_tokens)
    started = time.perf_counter()
    stream.run(sequences, seconds / 2)
    card = subprocess.Popen(
        ["nvidia-smi", f"--query-gpu={CARD}", "--format=csv,noheader"],
        stdout=subprocess.PIPE,
        text=True,
    )
    stream.run(sequences, seconds / 2)
    tokens_then, steps_then, running = ask(engine, vllm_inside.count_tokens)
    took = time.perf_counter() - started
    made = max(steps_then - steps, 1)
    return {
        "sequences": sequences,
        "seconds": took,
        "total_tok_s": round((tokens_then - tokens) / took),
        "running": running,
        "step_ms": round(1000 * took / made, 2),
        "tokens_a_step": round((tokens_then - tokens) / made),
        "card": card.communicate()[0].strip(),
    }


def traced(engine: VllmEngine, stream: Stream, sequences: int, profiles: Path) -> dict[str, Any]:
    before = set(profiles.rglob("*.json*"))
    engine.llm.start_profile()
    stream.steps(sequences, 25)
    engine.llm.stop_profile()
    until = time.monotonic() + 60
    while not (made := set(profiles.rglob("*.json*")) - before) and time.monotonic() < until:
        stream.steps(sequences, 1)
    return kernels(max(made, key=lambda path: path.stat().st_size)) if made else {}


def kernels(trace: Path) -> dict[str, Any]:
    """Share of the time between first and last kernel that kernels fill (overlaps once), and what they were."""
    told = trace.read_bytes()
    events = json.loads(gzip.decompress(told) if trace.suffix == ".gz" else told)["traceEvents"]
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in event
    )
    filled, reached = 0.0, spans[0][0]
    times: Counter[str] = Counter()
    for begun, ended, name in spans:
        filled += max(ended - max(begun, reached), 0.0)
        reached = max(reached, ended)
        times[family(name)] += ended - begun
    wall = reached - spans[0][0]
    total = sum(times.values())
    return {
        "kernels": len(spans), "wall_ms": round(wall / 1000, 1), "filled": round(filled / wall, 4),
        "shares": {name: round(took / total, 4) for name, took in times.most_common(25)},
    }  # fmt: skip


def family(name: str) -> str:
    """A kernel's name without its arguments, short enough for a table."""
    bare = re.sub(r"^(void|std::\w+) ", "", name)
    found = re.search(r"(flash|cutlass|nvjet|gemm|sm90)\w*", bare, re.IGNORECASE)
    return (found.group(0) + " " if found else "") + bare[:70]
