"""Counters and progress: what a person sees while work goes on, and what an exporter reads afterwards.

Progress is counted in tokens, since rows differ by a factor of a hundred. On a terminal it is a bar with an
ETA; elsewhere a heartbeat line every 30 s *including when nothing moved*, so silence never means "maybe hung", and a
line when it is done.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

HEARTBEAT_S = 30.0
ACCOUNT_EVERY_S = 1.0
ACCOUNT_STALE_S = (
    120.0  # a landing that waits for a lock keeps its loop from writing for half a minute
)
STALLED_S = 60.0  # three half-lives of the rate


def format_eta(seconds: float | None) -> str:
    if seconds is None:
        return "ETA unknown"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"ETA {hours}:{minutes:02d}:{rest:02d}" if hours else f"ETA {minutes}:{rest:02d}"


@dataclass(slots=True)
class TokenRate:
    """Remaining time from tokens done per second over a sliding window (exponential, 20 s). What has not moved for a
    minute has no rate and no remaining time."""

    total: int
    done: int = 0
    rate: float = 0.0
    seen_s: float | None = None
    moved_s: float | None = None

    def update(self, done: int, now_s: float) -> None:
        if self.seen_s is not None and now_s > self.seen_s:
            span = now_s - self.seen_s
            weight = 1 - 0.5 ** (span / 20)
            self.rate += weight * ((done - self.done) / span - self.rate)
        if self.moved_s is None or done != self.done:
            self.moved_s = now_s
        self.done, self.seen_s = done, now_s
        if now_s - self.moved_s > STALLED_S:
            self.rate = 0.0

    @property
    def eta_s(self) -> float | None:
        return (self.total - self.done) / self.rate if self.rate > 0 else None

    @property
    def eta(self) -> str:
        return "done" if self.done >= self.total else format_eta(self.eta_s)


class ProgressBoard:
    """Named progress lines. `advance_to(name, tokens)` is idempotent: it takes the absolute count."""

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._quiet = quiet
        self._rates: dict[str, TokenRate] = {}
        self._held: dict[str, str] = {}
        self._bars: dict[str, TaskID] = {}
        self._beat_s = time.monotonic()
        console = Console(file=self._stream)
        self._live = None
        if console.is_terminal and not quiet:
            self._live = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),  # what the words leave of the width
                TextColumn("{task.completed:,.0f} / {task.total:,.0f} tokens", justify="right"),
                TextColumn("{task.fields[eta]}"),
                TimeElapsedColumn(),
                console=console,
                expand=True,
            )

    def __enter__(self) -> ProgressBoard:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()

    def add(self, name: str, total_tokens: int) -> None:
        self._rates[name] = TokenRate(total_tokens)
        if self._live:
            self._bars[name] = self._live.add_task(name, total=total_tokens, eta=format_eta(None))

    def advance_to(self, name: str, done_tokens: int, *, held: str = "") -> None:
        """`held`: why this does not come to its end by itself, in place of an ETA."""
        rate = self._rates[name]
        was_done = rate.done >= rate.total
        rate.update(done_tokens, time.monotonic())
        self._held[name] = held
        if self._live:
            self._live.update(self._bars[name], completed=done_tokens, eta=self._end_of(name))
        elif rate.done >= rate.total and not was_done:
            self._tell(name)
        self.heartbeat()

    def say(self, line: str) -> None:
        if self._quiet:
            return
        if self._live:
            # as it is: rich would colour numbers and break paths at the margin
            self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            self._stream.write(line + "\n")
            self._stream.flush()

    def heartbeat(self) -> None:
        """Without a terminal: one line each HEARTBEAT_S, moved or not."""
        now = time.monotonic()
        if self._live or self._quiet or now - self._beat_s < HEARTBEAT_S:
            return
        self._beat_s = now
        for name in self._rates:
            self._tell(name)

    def _tell(self, name: str) -> None:
        rate = self._rates[name]
        self.say(f"{name}: {rate.done:,} / {rate.total:,} tokens, {self._end_of(name)}")

    def _end_of(self, name: str) -> str:
        rate = self._rates[name]
        return rate.eta if rate.done >= rate.total else self._held.get(name) or rate.eta


@contextmanager
def timed() -> Iterator[dict[str, float]]:
    """`with timed() as t: ...` leaves wall seconds in t["seconds"] and CPU seconds in t["cpu_seconds"]."""
    out: dict[str, float] = {}
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        yield out
    finally:
        out["seconds"] = time.perf_counter() - wall
        out["cpu_seconds"] = time.process_time() - cpu


def exposition(prefix: str, numbers: Mapping[str, Any]) -> str:
    """Nested numbers as Prometheus text: `prefix_outer_inner value`, booleans as 0 and 1. What is no number, or not
    known, is left out."""
    return "".join(f"{name} {value!r}\n" for name, value in sorted(_flat(prefix, numbers)))


def _flat(prefix: str, numbers: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in numbers.items():
        name = f"{prefix}_{re.sub('[^a-zA-Z0-9_]', '_', key)}"
        if isinstance(value, Mapping):
            yield from _flat(name, value)
        elif isinstance(value, bool | int | float):
            yield name, float(value)


class Account:
    """What a process did, left once a second in two files: `path`, one JSON object, and beside it `.prom`, its numbers in the
    text format that Prometheus' node exporter collects from a folder. Files, because whoever asks must get an answer also
    while others are away. Written by one process alone; one that cannot be written is said once and keeps nobody from work."""

    def __init__(
        self, path: Path, prefix: str, *, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self._path, self._prefix, self._say = path, prefix, say
        self._written_s = float("-inf")
        self._failed = False

    def keep(self, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Write if it is due; `facts` is asked only then."""
        now_s = time.monotonic()
        if now_s - self._written_s < ACCOUNT_EVERY_S:
            return
        self._written_s = now_s
        told = facts()
        try:
            _replace(self._path, json.dumps({"pid": os.getpid(), **told}))
            _replace(self._path.with_suffix(".prom"), exposition(self._prefix, told))
        except OSError as fault:
            if not self._failed:
                self._say(f"{self._path} cannot be written ({fault.strerror}); the work goes on")
            self._failed = True
        else:
            self._failed = False

    def close(self) -> None:
        for path in (self._path, self._path.with_suffix(".prom")):
            path.unlink(missing_ok=True)


def read_account(path: Path) -> dict[str, Any] | None:
    """What a process that lives wrote there, with its age; None when there is none that can be read."""
    try:
        age_s = time.time() - path.stat().st_mtime
        if (
            age_s > ACCOUNT_STALE_S
        ):  # before it is read: of a machine that lost power it may be anything
            return None
        facts = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    pid = facts.get("pid") if isinstance(facts, dict) else None
    if not isinstance(pid, int) or not psutil.pid_exists(pid):
        return None
    return {**facts, "age_s": max(age_s, 0.0)}


def account_in_words(facts: Mapping[str, Any], summary: Callable[[Mapping[str, Any]], str]) -> str:
    """`summary` of an account; a sentence of its own where a process of another version, which runs on, wrote others."""
    try:
        return summary(facts)
    except (KeyError, TypeError, ValueError, AttributeError):
        return "runs another version of this program: `fabric down`, then `fabric up`"


def _replace(path: Path, text: str) -> None:
    """A reader sees the old text or the new one. Not synced: it is worth nothing after a crash."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text)
    beside.replace(path)
