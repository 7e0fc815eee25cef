"""The runtime's own account of a long run on a card: what it takes, how often it waits, how busy it keeps the card.

    python -m tests.bench.runtime_on_cuda --seconds 65 --json OUT/runtime.json

Qwen2.5-7B's shape with random bfloat16 weights, hidden states of layers 8, 16 and 28 through the worker loop, which is fed
leases of log-normal rows (as tests.bench.hidden_on_cuda) without end; no broker and no database. The process starts itself once more with the library
that counts CUDA calls. A row of the table is a tenth of the run; with --seconds 600 it is the soak. Ends with 1 if after the
first second one call of ours took memory or waited.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa

from fabric_pipelines.device import calls
from fabric_pipelines.device.energy import CardMeter, visible
from fabric_pipelines.errors import DeviceRefused
from fabric_pipelines.models.description import CHECKPOINTS
from fabric_pipelines.models.recipes import Limits
from fabric_pipelines.records.lease import Lease
from fabric_pipelines.worker.engines import registry
from fabric_pipelines.worker.engines.checkpoint import QWEN_7B_SHAPE, describe
from fabric_pipelines.worker.loop import Pace, WorkerLoop
from fabric_pipelines.worker.meter import RunMeter
from tests.bench.hidden_on_cuda import BUDGET, LAYERS, LONGEST, prompts
from tests.tiny_models import lease_of

NAME = "qwen2.5-7b-shape-random-weights@transformers-bf16"
TENTHS = 10
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 28,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


@dataclass
class Answer:
    """Of the broker, for every call of it."""

    held: Collection[int] = ()
    hold: bool = False
    retry_after_s: float = 0.0
    accepted: int = 0
    duplicates: int = 0
    late: int = 0
    unknown: int = 0


@dataclass
class Endless:
    """Gives the same leases again under new ids until `end_s`, and takes every result."""

    leases: Sequence[Lease]
    end_s: float = float("inf")
    given: int = 0
    tasks: int = 0
    bad: int = 0
    hold_reason: str = ""
    seen: list[str] = field(default_factory=list)

    def hello(self) -> object:
        return None

    def attach(self, **_: Any) -> Answer:
        return Answer()

    def renew(self) -> Answer:
        return Answer()

    def detach(self) -> None:
        return None

    def nack(self, task_ids: Sequence[int], *, reason: str, attempted: bool = False) -> int:
        self.bad += len(task_ids)
        return len(task_ids)

    def lease(self, *, sequences: int, tokens: int, kv_tokens: int | None) -> Lease | None:
        if time.monotonic() >= self.end_s:
            return None
        lease = self.leases[self.given % len(self.leases)]
        batch = lease.tasks
        ids = pa.array(range(self.tasks, self.tasks + batch.num_rows), pa.int64())
        self.given, self.tasks = self.given + 1, self.tasks + batch.num_rows
        batch = batch.set_column(0, batch.schema.field("task_id"), ids)
        return Lease(self.given, lease.lane, lease.engine, lease.sampling, 0, 0, batch)

    def computed(self, batch: pa.RecordBatch) -> Answer:
        statuses = batch.column("status").to_pylist()
        self.bad += len(statuses) - statuses.count("ok")
        return Answer(accepted=len(statuses))


def leases(rows: Sequence[list[int]], budget: int, engine: str) -> list[Lease]:
    """The rows in order, each lease of at most `budget` tokens."""
    cut: list[list[list[int]]] = [[]]
    for row in rows:
        if cut[-1] and sum(map(len, cut[-1])) + len(row) > budget:
            cut.append([])
        cut[-1].append(row)
    sampling = {"kind": "hidden", "layers": list(LAYERS), "pooling": "mean"}
    made = []
    for part in cut:
        lease = lease_of(part, sampling, engine=engine)
        fresh = pa.array([0] * len(part), pa.uint8())
        place = lease.tasks.schema.get_field_index("attempts")
        tasks = lease.tasks.set_column(place, lease.tasks.schema.field("attempts"), fresh)
        made.append(Lease(1, "lane", engine, sampling, 0, 0, tasks))
    return made


@contextmanager
def opened(
    folder: Path, name: str, device: str, shape: dict[str, Any], budget: int
) -> Iterator[Any]:
    import transformers

    place = folder / CHECKPOINTS / name
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(shape))
    describe(place, Limits(min(1024, budget), budget, min(LONGEST, budget), min(LONGEST, budget)),
             version=f"transformers {transformers.__version__}",
             weight_quantisation="none", kv_quantisation="single_pass")  # fmt: skip
    engine = registry.construct_engine(name, cache=folder, threads=2, device=device)
    engine.open()
    try:
        yield engine
    finally:
        engine.close()


class Rows:
    """A row a tenth of the run, printed as it ends."""

    def __init__(self, seconds: float, device: str) -> None:
        self._every_s = seconds / TENTHS
        self._device = device
        self.rows: list[dict[str, Any]] = []
        self._before: dict[str, Any] = {"seconds": 0.0, "prompt_tokens": 0, "device_s": 0.0}
        self._before["joules"] = None
        sys.stdout.write(
            f"{'until s':>8}{'tok/s':>10}{'card busy':>11}{'tok/J':>8}{'RSS MB':>9}{'card MB':>9}"
            "  calls of ours since the first second: device, pinned, waits, copies | the engine's\n"
        )

    def look(self, report: dict[str, Any]) -> None:
        before = self._before
        if report["seconds"] < before["seconds"] + self._every_s:
            return
        seconds = report["seconds"] - before["seconds"]
        tokens = report["prompt_tokens"] - before["prompt_tokens"]
        device_s = (report["device_s"] or 0.0) - before["device_s"]
        joules = None if report["joules"] is None else report["joules"] - (before["joules"] or 0.0)
        row = {
            "until_s": report["seconds"],
            "tokens_per_s": tokens / seconds,
            "card_busy": device_s / seconds,
            "tokens_per_joule": tokens / joules if joules else None,
            "rss_mb": psutil.Process().memory_info().rss / 1e6,
            "card_mb": self._card_mb(),
            "calls": report["cuda_calls_settled"],
        }
        self.rows.append(row)
        self._before = {"seconds": report["seconds"], "prompt_tokens": report["prompt_tokens"],
                        "device_s": report["device_s"] or 0.0, "joules": report["joules"]}  # fmt: skip
        sys.stdout.write(
            f"{row['until_s']:8.1f}{row['tokens_per_s']:10,.0f}{100 * row['card_busy']:10.1f}%"
            f"{row['tokens_per_joule'] or 0:8.1f}{row['rss_mb']:9,.0f}{row['card_mb']:9,.0f}  {_calls(row['calls'])}\n"
        )
        sys.stdout.flush()

    def _card_mb(self) -> float:
        if self._device != "cuda":
            return 0.0
        import torch

        free, total = torch.cuda.mem_get_info()
        return (total - free) / 1e6


def _calls(told: dict[str, Any] | None) -> str:
    if told is None:
        return "not counted"
    return " | ".join(
        ", ".join(str(told[who][kind]) for kind in calls.KINDS) for who in calls.OWNERS
    )


@contextmanager
def card_meter(device: str) -> Iterator[Any]:
    try:
        card = CardMeter(visible("cuda:0")) if device == "cuda" else None
    except DeviceRefused as fault:
        sys.stdout.write(f"{fault}\n")
        card = None
    if card is None:
        yield lambda: None
        return
    with card:
        yield card.joules


def run(engine: Any, budget: int, seconds: float, device: str) -> dict[str, Any]:
    source = Endless(
        leases(prompts() if device == "cuda" else [[5] * 40] * 16, budget, engine.name)
    )
    with card_meter(device) as joules:
        meter = RunMeter(joules, calls.read)
        rows = Rows(seconds, device)
        loop = WorkerLoop(
            engine,
            source,
            device=f"{device}:0",
            wait=time.sleep,
            tell=lambda reason: rows.look(loop.report()),
            pace=Pace(until_idle=True),
            meter=meter,
        )
        source.end_s = time.monotonic() + seconds
        counts = loop.run()
        report = loop.report()
    assert source.bad == 0, f"{source.bad} tasks were not computed"
    assert counts.ok == source.tasks
    return {"report": report, "rows": rows.rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=65.0)
    parser.add_argument("--budget", type=int, default=BUDGET)
    parser.add_argument("--compiled", action="store_true", help="blocks through torch.compile")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a small model"
    )
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    if calls.read() is None:
        again = [sys.executable, "-m", "tests.bench.runtime_on_cuda", *sys.argv[1:]]
        os.execve(again[0], again, {**os.environ, **calls.environment()})
    import torch

    name = f"{NAME}-compiled" if given.compiled else NAME
    shape = dict(QWEN_7B_SHAPE) | ({} if given.device == "cuda" else SMALL)
    with tempfile.TemporaryDirectory() as place:
        started = time.monotonic()
        with opened(Path(place), name, given.device, shape, given.budget) as engine:
            opened_s = time.monotonic() - started
            told = run(engine, given.budget, given.seconds, given.device)
    card = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
    told = {"engine": name, "card": card, "torch": torch.__version__, "open_s": opened_s, **told}
    given.json.write_text(json.dumps(told, indent=1) + "\n")
    sys.stdout.write(json.dumps(told["report"], indent=1) + "\n")
    settled = told["report"]["cuda_calls_settled"]
    if settled is None:
        return 1
    return int(bool(settled["unseen"]) or any(settled["ours"].values()))


if __name__ == "__main__":
    sys.exit(main())
