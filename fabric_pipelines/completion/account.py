"""What completion did and what its governor decided, left once a second in two files beside its socket.

`completion.json` is what `fabric status --json` shows, `completion.prom` the same numbers in the text format that
Prometheus' node exporter collects from a folder. Files, because whoever asks must get an answer also while the
database is away, which is when it matters. Refuses to pass off a dead process' account as a live one's.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from fabric_pipelines.completion.receive import Receiver
from fabric_pipelines.dataplane.valve import Valve
from fabric_pipelines.settings import Settings
from fabric_pipelines.telemetry import exposition

EVERY_S = 1.0
STALE_S = 120.0
"""A landing that waits for somebody's lock keeps the loop from writing for half a minute."""


class Account:
    """Written by the completion process alone."""

    def __init__(
        self,
        settings: Settings,
        receiver: Receiver,
        valve: Valve,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._path = path_of(settings)
        self._receiver = receiver
        self._valve = valve
        self._say = say
        self._written_s = float("-inf")
        self._failed = False

    def keep(self) -> None:
        """Write if it is due. A disk that takes no account, said once, is no reason to land nothing."""
        now_s = time.monotonic()
        if now_s - self._written_s < EVERY_S:
            return
        self._written_s = now_s
        try:
            self._write()
        except OSError as fault:
            if not self._failed:
                self._say(f"{self._path} cannot be written ({fault.strerror}); landing goes on")
            self._failed = True
        else:
            self._failed = False

    def _write(self) -> None:
        facts = {
            "pid": os.getpid(),
            "held": self._receiver.holds,
            "counters": asdict(self._receiver.counters),
            "governor": self._valve.as_json(),
        }
        _replace(self._path, json.dumps(facts))
        numbers = {name: facts[name] for name in ("held", "counters", "governor")}
        _replace(self._path.with_suffix(".prom"), exposition("fabric_completion", numbers))

    def close(self) -> None:
        for path in (self._path, self._path.with_suffix(".prom")):
            path.unlink(missing_ok=True)


def path_of(settings: Settings) -> Path:
    return settings.runtime_dir / "completion.json"


def read(settings: Settings) -> dict[str, Any] | None:
    """The account of a completion process that lives; None when there is none."""
    path = path_of(settings)
    try:
        age_s = time.time() - path.stat().st_mtime
        facts: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    if age_s > STALE_S or not psutil.pid_exists(facts["pid"]):
        return None
    return {**facts, "age_s": max(age_s, 0.0)}


def summary(facts: Mapping[str, Any]) -> str:
    """The governor's decisions as one line for a person."""
    now = facts["governor"]
    line = (
        f"up to {now['rate_bytes_per_s'] / 1e6:,.1f} MB/s of write cost, "
        f"{now['rows_per_transaction']:,} rows a transaction, writers: {now['writers']}"
    )
    if now["blind"]:
        return f"{line}; no signal from the database for {now['signal_age_s']:.0f} s"
    if now["pressed_by"]:
        return f"{line}; pressed by {', '.join(now['pressed_by'])}"
    return line


def _replace(path: Path, text: str) -> None:
    """A reader sees the old text or the new one. Not synced: it is worth nothing after a crash."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text)
    beside.replace(path)
