"""What a backlog costs by its size: memory, leases, audits, checkpoints and restarts of the broker's core.

Every decision is the broker's own, without disk and socket; prompts are shapes and random keys, so that ten
million tasks need no gigabytes of tokens. Each size runs in a process of its own, since a peak of memory belongs to
a process. All times are CPU; disk time comes on top where a checkpoint is written or read.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fabric_pipelines.broker import snapshot
from fabric_pipelines.broker.checkpoint import decode, encode
from fabric_pipelines.broker.core import Core, Limits, Session
from fabric_pipelines.broker.facts import Enqueued, SubmissionOpened
from fabric_pipelines.broker.lanes import RULE, shapes
from fabric_pipelines.broker.state import BatchColumns, State
from fabric_pipelines.records.batch import Budget
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.records.submission import Submission

T = TypeVar("T")
SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
BATCH, LEASE, LEASES = 1000, 256, 2000
SAMPLING: dict[str, dict[str, Any]] = {
    "generate": {"kind": "generate", "temperature": 0.0, "top_k": 1, "seed": 0},
    "embed": {"kind": "embed", "pooling": "mean", "normalise": True},
}
ENGINE, JOURNAL = "bench@engine", "00" * 16
BUDGET = Budget(LEASE, 1 << 40, None)
SMALLEST_FOR_MEMORY = 1_000_000  # below, the process itself is most of it


@dataclass(frozen=True, slots=True)
class Scale:
    """Of one backlog. *_bytes are per task beyond what the process held before, without the log; *_peak_bytes the
    most at any moment of that phase; *_us and *_ms CPU."""

    tasks: int
    kind: str
    lanes: int
    enqueue_us: float  # of a batch of 1,000: index, accounts, order
    index_bytes: float
    index_peak_bytes: float
    first_lease_ms: float
    lease_median_us: float  # of 256: decision and state, without the log
    lease_p99_us: float
    audit_ms: float
    audit_first_ms: float  # before any fingerprint was kept
    checkpoint_ms: float  # in the owner's thread: the copy
    checkpoint_written_ms: float  # in the background: compression
    checkpoint_mib: float
    checkpoint_peak_bytes: float
    restart_ms: float  # from the bytes of the checkpoint to the first lease possible
    restart_peak_bytes: float
    restart_first_lease_ms: float


class Backlog:
    """A core with a growing number of ready tasks, log-normal prompts and keys that share nothing."""

    def __init__(self, kind: str) -> None:
        self.state = State(incarnation=7)
        self.core = Core(self.state, Limits())
        self._draw = np.random.default_rng(1)
        self._lsn = 0
        self._header = Submission(
            submission_id="0" * 64,
            function="generate",
            engine=ENGINE,
            sampling=SAMPLING[kind],
            vocab_size=1000,
            tasks=1 << 40,
            tokens=1 << 50,
            fingerprint="0" * 64,
            tenant="t",
        )
        self._apply(SubmissionOpened(self._header))

    def _apply(self, fact: Any, columns: BatchColumns | None = None) -> None:
        self._lsn += 1
        self.core.apply(fact, self._lsn, columns)

    def enqueue(self) -> None:
        """One batch, as if its tokens lay in the log."""
        draw, base = self._draw, self.state.index.count
        lengths = np.clip(draw.lognormal(6.0, 0.5, BATCH), 1, 8000).astype(np.int64)
        new = draw.integers(1, 500, BATCH)
        keys = draw.integers(0, 1 << 63, BATCH, dtype=np.uint64) << np.uint64(1)
        columns = BatchColumns(lengths, new, shapes(self._header, lengths, new), keys)
        batch = Enqueued("0" * 64, base // BATCH, base, base, BATCH, b"", RULE)
        self._apply(batch, columns)

    def grow(self, tasks: int) -> None:
        for _ in range(tasks // BATCH):
            self.enqueue()

    def lease(self, call: int) -> int:
        """Decide and apply one lease; how many tasks it has."""
        facts, grant = self.core.lease("w", BUDGET, 1.0, call)
        for fact in facts:
            self._apply(fact)
        return 0 if grant is None else len(grant.tasks)


class Memory:
    """Resident bytes of this process beyond what it held at the start, by Linux' own account; getrusage would count
    what the parent held when it forked."""

    def __init__(self) -> None:
        gc.collect()
        self._base = self._now()
        self.begin_peak()

    def held(self) -> int:
        return self._now() - self._base

    def peak(self) -> int:
        status = Path("/proc/self/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024 - self._base

    def begin_peak(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")

    @staticmethod
    def _now() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()


def _session() -> Session:
    profile = Profile(LEASE, 1 << 30, 0, 1 << 30)
    return Session("w", ENGINE, "f", "d", profile, deadline_s=1e12)


def cpu_ms(act: Callable[[], T]) -> tuple[float, T]:
    begin = time.process_time()
    found = act()
    return (time.process_time() - begin) * 1e3, found


def measure_one(tasks: int, kind: str = "generate", leases: int = LEASES) -> Scale:
    """All figures of one backlog; in this process, whose memory should hold nothing else."""
    memory = Memory()
    figures, raw, digest = _live(tasks, kind, leases, memory)
    gc.collect()  # of the live core nothing is left but its checkpoint
    memory.begin_peak()
    restart_ms, core = cpu_ms(lambda: _restart(raw, digest))
    restart_peak = memory.peak()
    core.sessions["w"] = _session()
    first_ms, (_, grant) = cpu_ms(lambda: core.lease("w", BUDGET, 1.0, 0))
    assert grant is not None
    return Scale(
        tasks=tasks,
        kind=kind,
        **figures,
        restart_ms=restart_ms,
        restart_peak_bytes=restart_peak / tasks,
        restart_first_lease_ms=first_ms,
    )


def _live(tasks: int, kind: str, leases: int, memory: Memory) -> tuple[dict[str, Any], bytes, str]:
    """Figures of a core that grows, leases, is audited and saved; bytes and digest of its checkpoint."""
    backlog = Backlog(kind)
    enqueue_ms, _ = cpu_ms(lambda: backlog.grow(tasks))
    held, peak = memory.held(), memory.peak()
    backlog.core.sessions["w"] = _session()
    first_ms, given = cpu_ms(lambda: backlog.lease(0))
    lease_us = _leases(backlog, leases, given)
    audit_first_ms, differences = cpu_ms(backlog.state.audit)
    audit_ms, again = cpu_ms(backlog.state.audit)
    assert not differences + again, differences
    memory.begin_peak()
    take_ms, taken = cpu_ms(lambda: snapshot.take(backlog.state))
    encode_ms, (pieces, digest) = cpu_ms(lambda: encode(taken.head, taken.drained(), 1, JOURNAL))
    checkpoint_peak = memory.peak()
    raw = b"".join(pieces)
    figures = {
        "lanes": len(backlog.state.lanes),
        "enqueue_us": enqueue_ms * 1e3 / (tasks // BATCH),
        "index_bytes": held / tasks,
        "index_peak_bytes": peak / tasks,
        "first_lease_ms": first_ms,
        "lease_median_us": float(np.median(lease_us)),
        "lease_p99_us": float(np.quantile(lease_us, 0.99)),
        "audit_ms": audit_ms,
        "audit_first_ms": audit_first_ms,
        "checkpoint_ms": take_ms,
        "checkpoint_written_ms": encode_ms,
        "checkpoint_mib": len(raw) / (1 << 20),
        "checkpoint_peak_bytes": checkpoint_peak / tasks,
    }
    return figures, raw, digest


def _leases(backlog: Backlog, count: int, given: int) -> list[float]:
    """CPU us of each of so many leases, while new tasks come as fast as these go."""
    took = []
    for call in range(1, count + 1):
        begin = time.thread_time()
        given += backlog.lease(call)
        took.append((time.thread_time() - begin) * 1e6)
        while given >= BATCH:
            backlog.enqueue()
            given -= BATCH
    return took


def _restart(raw: bytes, digest: str) -> Core:
    found = decode(memoryview(raw), 1, JOURNAL, digest)
    assert not isinstance(found, str), found
    return Core(snapshot.restore(found), Limits())


def measure(
    sizes: Sequence[int] = SIZES, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """JSON-able: each size with one lane, and the largest with the lanes of padded work as well."""
    rows = []
    for tasks, kind in [*((size, "generate") for size in sizes), (max(sizes), "embed")]:
        say(f"{tasks:,} tasks, {kind}")
        command = [sys.executable, "-m", __name__, "--tasks", str(tasks), "--kind", kind]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
    p99 = [row["lease_p99_us"] for row in rows if row["kind"] == "generate"]
    return {"lease_p99_growth": max(p99) / p99[0], "backlogs": rows}


COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("backlog", lambda row: f"{row['tasks']:,}"),
    ("lanes", lambda row: f"{row['lanes']}"),
    ("enqueue of 1,000", lambda row: f"{row['enqueue_us']:.0f} us"),
    ("B/task (peak)", lambda row: _bytes(row, "index_bytes", "index_peak_bytes")),
    ("first lease", lambda row: f"{row['first_lease_ms']:.1f} ms"),
    ("lease of 256: median", lambda row: f"{row['lease_median_us']:.0f} us"),
    ("p99", lambda row: f"{row['lease_p99_us']:.0f} us"),
    ("audit (first)", lambda row: f"{row['audit_ms']:.0f} ({row['audit_first_ms']:.0f}) ms"),
)
DURABLE: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("backlog", lambda row: f"{row['tasks']:,}"),
    ("lanes", lambda row: f"{row['lanes']}"),
    ("checkpoint: copy", lambda row: f"{row['checkpoint_ms']:.0f} ms"),
    ("in the background", lambda row: f"{row['checkpoint_written_ms']:.0f} ms"),
    ("file", lambda row: f"{row['checkpoint_mib']:.1f} MiB"),
    ("peak B/task", lambda row: _bytes(row, "checkpoint_peak_bytes")),
    ("restart", lambda row: f"{row['restart_ms']:.0f} ms"),
    ("its first lease", lambda row: f"{row['restart_first_lease_ms']:.1f} ms"),
    ("its peak B/task", lambda row: _bytes(row, "restart_peak_bytes")),
)


def _bytes(row: dict[str, Any], name: str, peak: str = "") -> str:
    if row["tasks"] < SMALLEST_FOR_MEMORY:
        return "-"
    return f"{row[name]:.1f} ({row[peak]:.1f})" if peak else f"{row[name]:.1f}"


def table(found: dict[str, Any]) -> str:
    """For the page and the terminal."""
    lines = []
    for columns in (COLUMNS, DURABLE):
        lines += [
            "| " + " | ".join(name for name, _ in columns) + " |",
            "|---" * len(columns) + "|",
        ]
        lines += [
            "| " + " | ".join(show(row) for _, show in columns) + " |" for row in found["backlogs"]
        ]
        lines.append("")
    lines.append(f"p99 of a lease grows {found['lease_p99_growth']:.2f}-fold at most.")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Figures of one backlog as JSON.")
    parser.add_argument("--tasks", type=int, required=True)
    parser.add_argument("--kind", choices=tuple(SAMPLING), default="generate")
    parser.add_argument("--leases", type=int, default=LEASES)
    given = parser.parse_args(argv)
    found = measure_one(given.tasks, given.kind, given.leases)
    sys.stdout.write(json.dumps(asdict(found)) + "\n")


if __name__ == "__main__":
    main()
