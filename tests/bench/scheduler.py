"""Who had the CPU while somebody waited for it, from the kernel's own account of switches and wakeups (tracefs, root only).

`with switches() as traced: ...; traced.read()` gives the account; `who_ran` makes lines of it: for chosen processes and
stretches of time, how long they stood in a run queue, and behind whom.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path("/sys/kernel/tracing")
EVENTS = ("sched_switch", "sched_wakeup")
BUFFER_KIB = 150_000
LONG_MS = 1.0
SWITCH = re.compile(
    r"\[(\d+)\].* (\d+\.\d+): sched_switch: prev_comm=(.*?) prev_pid=(\d+) prev_prio=\d+ "
    r"prev_state=(\S+) ==> next_comm=(.*?) next_pid=(\d+)"
)
WAKEUP = re.compile(r"(\d+\.\d+): sched_wakeup: comm=.*? pid=(\d+) prio=\d+ target_cpu=(\d+)")


@dataclass(frozen=True, slots=True)
class Traced:
    """`ahead_s`: what the wall clock shows more than the clock of the account."""

    ahead_s: float

    def read(self) -> list[str]:
        (ROOT / "tracing_on").write_text("0")
        return (ROOT / "trace").read_text(errors="replace").splitlines()


@contextmanager
def switches() -> Iterator[Traced]:
    for name, value in {
        "tracing_on": "0",
        "trace": "",
        "buffer_size_kb": str(BUFFER_KIB),
        "trace_clock": "mono",
    }.items():
        (ROOT / name).write_text(value)
    enables = [ROOT / "events/sched" / name / "enable" for name in EVENTS]
    for enable in enables:
        enable.write_text("1")
    (ROOT / "tracing_on").write_text("1")
    try:
        yield Traced(time.time() - time.monotonic())
    finally:
        for enable in enables:
            enable.write_text("0")
        (ROOT / "tracing_on").write_text("0")


def who_ran(
    lines: Sequence[str],
    pids: Collection[int],
    spans: Sequence[tuple[str, float, float]],
    ahead_s: float,
) -> list[str]:
    """Per name in `spans` (name, begin, end by the wall clock): what `pids` waited for a CPU, and who had it in waits
    of LONG_MS and more, as milliseconds a process's name and number."""
    stretches: dict[int, list[tuple[float, float, str]]] = defaultdict(list)
    waiting: dict[int, tuple[float, int]] = {}
    since: dict[int, float] = {}
    waits: list[tuple[float, float, int]] = []
    for line in lines:
        if found := SWITCH.search(line):
            cpu, at = int(found[1]), float(found[2])
            last, state, following = int(found[4]), found[5], int(found[7])
            if cpu in since:
                stretches[cpu].append((since[cpu], at, f"{found[3]}:{last}"))
            since[cpu] = at
            if last in pids and state.startswith("R"):
                waiting[last] = at, cpu
            if following in pids and following in waiting:
                waits.append((waiting.pop(following)[0], at, cpu))
        elif (found := WAKEUP.search(line)) and int(found[2]) in pids:
            waiting[int(found[2])] = float(found[1]), int(found[3])
    told = [
        "| bulk | waits for a CPU | p95 ms | p99 ms | most ms | who had it in waits of 1 ms and more |",
        "|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(span[0] for span in spans):
        within = [(begin - ahead_s, end - ahead_s) for way, begin, end in spans if way == name]
        mine = [wait for wait in waits if any(low <= wait[0] < high for low, high in within)]
        if not mine:
            continue
        took = np.array([(end - begin) * 1e3 for begin, end, _ in mine])
        whose: Counter[str] = Counter()
        for begin, end, cpu in mine:
            if (end - begin) * 1e3 >= LONG_MS:
                for low, high, who in stretches[cpu]:
                    if high > begin and low < end:
                        whose[who] += round((min(high, end) - max(low, begin)) * 1e6)
        p95, p99 = np.percentile(took, [95, 99])
        seen = ", ".join(f"{who} {us / 1e3:.1f}" for who, us in whose.most_common(5))
        told.append(
            f"| {name} | {len(mine):,} | {p95:.2f} | {p99:.2f} | {took.max():.2f} | {seen} |"
        )
    return told
