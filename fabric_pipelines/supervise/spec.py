"""What the supervisor is told about one process, as a value that also travels as JSON.

The supervisor knows nothing about brokers or databases: a table of these is all it runs.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fabric_pipelines.errors import UsageError


@dataclass(frozen=True, slots=True)
class Ready:
    """When a started process counts as running. log_pattern: its log has a line that this regular expression
    finds; http_url: it answers with status 200. Neither: as soon as it exists."""

    log_pattern: str = ""
    http_url: str = ""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Wait before a restart: first_s after a crash, doubled with each further one up to most_s, back to first_s
    after stable_s of running."""

    first_s: float = 0.1
    most_s: float = 30.0
    stable_s: float = 30.0

    def wait_s(self, crashes: int) -> float:
        """`crashes` in a row, at least 1."""
        return float(min(self.most_s, self.first_s * 2 ** min(crashes - 1, 30)))


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """depends_on: names that must run before the first start; later each restarts alone. starts_max: exits
    before it was ever ready after which `up` gives up on it (the supervisor itself never does); left_grace_s: what
    it had started is asked to end when it died, and killed after so long."""

    name: str
    argv: tuple[str, ...]
    ready: Ready = Ready()
    depends_on: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    backoff: Backoff = Backoff()
    stop_signal: int = int(signal.SIGTERM)
    stop_timeout_s: float = 20.0
    ready_timeout_s: float = 120.0
    starts_max: int = 3
    left_grace_s: float = 5.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ProcessSpec:
        return cls(
            **{
                **value,
                "argv": tuple(value["argv"]),
                "depends_on": tuple(value["depends_on"]),
                "ready": Ready(**value["ready"]),
                "backoff": Backoff(**value["backoff"]),
            }
        )


def levels(table: Sequence[ProcessSpec]) -> list[list[str]]:
    """Names in layers: each layer depends only on those before it. Raises UsageError for a name given twice, an
    unknown one or a cycle."""
    names = [spec.name for spec in table]
    if len(set(names)) != len(names):
        raise UsageError(f"process names are not unique: {names}")
    for spec in table:
        if not re.fullmatch(r"[a-z0-9][a-z0-9@._-]*", spec.name):
            raise UsageError(f"process name {spec.name!r} cannot name a log file")
        if unknown := set(spec.depends_on) - set(names):
            raise UsageError(f"process {spec.name} depends on unknown {sorted(unknown)}")
    layers: list[list[str]] = []
    placed: set[str] = set()
    while len(placed) < len(names):
        layer = [s.name for s in table if s.name not in placed and placed >= set(s.depends_on)]
        if not layer:
            raise UsageError(f"processes wait for each other: {sorted(set(names) - placed)}")
        layers.append(layer)
        placed.update(layer)
    return layers
