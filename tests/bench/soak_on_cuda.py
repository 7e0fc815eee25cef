"""A long run of steady supply: broker, completion and Postgres behind one worker loop, and a producer that never lets it run dry.

    python -m tests.bench.vllm_session_on_cuda --out FOLDER --parts soak --soak-s 490

The producer, a process of its own, keeps at least `BACKLOG` tasks open in the broker, all different, of the mix of table (a).
A row is 30 s: tokens of the tasks that ended in it, tasks that were retired (their rows are in Postgres), what each process
holds (RSS; PSS of Postgres, whose processes share memory), what the card holds, and CUDA calls of this process that took
memory or waited since one second after the engine first had work, where they are counted (LD_PRELOAD, see
device/calls.py). Of vLLM's own process those are told of the whole run, since nobody may ask it while it steps.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from fabric_pipelines.bench import behind, supply
from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.device import calls
from fabric_pipelines.worker.engines.vllm import VllmEngine
from fabric_pipelines.worker.loop import Pace, WorkerLoop
from fabric_pipelines.worker.meter import RunMeter
from tests.bench import vllm_inside
from tests.bench.vllm_inside import ask

ROW_S = 30.0
BACKLOG, PART = 6000, 2000
LOOK_S = 0.5
SEED = 1000  # of the producer's parts: none is drawn elsewhere
PROCESSES = {"fabric_pipelines.broker": "broker", "fabric_pipelines.completion": "completion",
             "soak_on_cuda": "producer", "EngineCore": "vllm"}  # fmt: skip


class Rows:
    """Told from the loop's thread, one each `ROW_S`."""

    def __init__(
        self, engine: VllmEngine, broker: BrokerClient, say: Callable[[dict[str, Any]], None]
    ) -> None:
        self._engine, self._broker, self._say = engine, broker, say
        self._card = supply.open_card()
        self._watch = supply.Watch(lambda: engine.inside, engine.profile.max_batch_size)
        self._started_s = 0.0
        self._before: dict[str, float] = {}

    def __enter__(self) -> Rows:
        self._watch.__enter__()
        self._before = self._counted()
        self._started_s = self._before["at_s"]
        return self

    def __exit__(self, *fault: object) -> None:
        self._watch.__exit__(*fault)

    @property
    def running_s(self) -> float:
        return time.perf_counter() - self._started_s

    def joules(self) -> float | None:
        return None if self._card is None else self._card.joules()

    def look(self, report: Callable[[], dict[str, Any]]) -> None:
        if time.perf_counter() < self._before["at_s"] + ROW_S:
            return
        before, now = self._before, self._counted()
        self._before = now
        took_s = now["at_s"] - before["at_s"]
        shares = self._watch.shares(before["at_s"], now["at_s"])
        self._say({
            "table": "soak", "until_s": round(now["at_s"] - self._started_s, 1),
            "total_tok_s": round((now["tokens"] - before["tokens"]) / took_s),
            "retired_a_s": round((now["retired"] - before["retired"]) / took_s, 1),
            "card_idle": shares["card_idle"], "batch_empty": shares["batch_empty"],
            "watts": round((now["joules"] - before["joules"]) / took_s),
            "memory_mb": memory_mb(),
            "card_mb": None if self._card is None else round((self._card.memory_used() or 0) / 1e6),
            "calls_settled": report()["cuda_calls_settled"],
        })  # fmt: skip

    def _counted(self) -> dict[str, float]:
        stats = self._engine.stats
        return {
            "at_s": time.perf_counter(),
            "tokens": float(stats.computed_tokens + stats.generated_tokens),
            "retired": float(self._broker.status().total.as_json()["retired"]),
            "joules": self.joules() or 0.0,
        }


def memory_mb() -> dict[str, float]:
    """Of this process and of each below it that is part of the run."""
    own = psutil.Process()
    told = {"worker": own.memory_info().rss / 1e6, "postgres": 0.0}
    for process in own.children(recursive=True):
        try:
            words = " ".join([process.name(), *process.cmdline()])
            if "postgres" in process.name():
                told["postgres"] += process.memory_full_info().pss / 1e6
            for mark, name in PROCESSES.items():
                if mark in words:
                    told[name] = process.memory_info().rss / 1e6
        except psutil.NoSuchProcess:
            continue
    return {name: round(held, 1) for name, held in told.items()}


def measure(
    engine: VllmEngine,
    seconds: float,
    home: Path,
    pg_url: str,
    say: Callable[[dict[str, Any]], None],
) -> None:
    """Rows as they come, at the end what became of the tasks. What had not begun when the time was up goes back."""
    vllm_before = ask(engine, vllm_inside.cuda_calls)
    with ExitStack() as stack:
        endpoint = stack.enter_context(behind.broker(home))
        watcher = stack.enter_context(BrokerClient(endpoint, role="producer"))
        stack.enter_context(behind.completion(home, pg_url))
        stack.enter_context(producing(endpoint, engine.name))
        client = stack.enter_context(BrokerClient(endpoint, role="consumer"))
        rows = stack.enter_context(Rows(engine, watcher, say))

        def turn(_: str) -> None:
            rows.look(loop.report)
            if rows.running_s >= seconds:
                loop.request_stop()

        loop = WorkerLoop(
            engine, client, device="cuda:0", wait=time.sleep, tell=turn, pace=Pace(),
            meter=RunMeter(rows.joules, calls.read),
        )  # fmt: skip
        counts = loop.run()
        report = loop.report()
        until_s = time.perf_counter() + supply.LANDING_S
        while watcher.status().total.as_json()["retired"] < counts.ok:
            assert time.perf_counter() < until_s, "what was computed did not land"
            time.sleep(LOOK_S)
        total = watcher.status().total.as_json()
    say({
        "soak": {name: supply.short(report[name]) for name in supply.TOLD},
        "ok": counts.ok, "seconds": round(counts.seconds, 1),
        "total_tok_s": round((counts.prompt_tokens + counts.output_tokens) / counts.seconds),
        "retired": total["retired"], "landed_rows": behind.landed_rows(pg_url),
        "calls": report["cuda_calls"], "calls_settled": report["cuda_calls_settled"],
        "calls_of_vllm": since(ask(engine, vllm_inside.cuda_calls), vllm_before),
    })  # fmt: skip


def since(now: dict[str, int] | None, before: dict[str, int] | None) -> dict[str, int] | None:
    if now is None or before is None:
        return None
    return {kind: now[kind] - before[kind] for kind in now}


@contextmanager
def producing(endpoint: str, engine: str) -> Iterator[None]:
    """The producer's process, once its first backlog is there."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.soak_on_cuda", endpoint, engine],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert "ready" in process.stdout.readline(), "the producer did not start"
        yield
    finally:
        process.terminate()
        process.wait(30)


def main(argv: Sequence[str] | None = None) -> int:
    """The producer."""
    parser = argparse.ArgumentParser(description="Keeps a broker full until it is told to end.")
    parser.add_argument("endpoint")
    parser.add_argument("engine")
    parser.add_argument("--backlog", type=int, default=BACKLOG)
    parser.add_argument("--part", type=int, default=PART)
    given = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    parts = 0
    with BrokerClient(given.endpoint, role="producer") as client:
        for looks in itertools.count():
            retired = client.status().total.as_json()["retired"]
            while parts * given.part - retired < given.backlog:
                supply.submit(client, given.engine, supply.draw_mix(given.part, seed=SEED + parts))
                parts += 1
            if looks == 0:
                sys.stdout.write("ready\n")
                sys.stdout.flush()
            time.sleep(LOOK_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
