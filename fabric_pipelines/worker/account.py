"""The counters of running workers, one account a device beside the home's sockets, for `fabric status` and Prometheus.

The same numbers end a worker as its exit line. Only workers of this machine are here; another machine has its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fabric_pipelines import telemetry
from fabric_pipelines.settings import Settings

PREFIX = "fabric_worker"


class WorkerAccount:
    """Written by the worker on `device`, which no other worker of this home can be on."""

    def __init__(
        self,
        settings: Settings,
        engine: str,
        device: str,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        name = device.replace(":", "-")
        folder = folder_of(settings)
        with contextlib.suppress(OSError):  # said once, when it cannot be written
            folder.mkdir(exist_ok=True)  # not its parents: a home that is gone stays gone
        labels = f"{PREFIX}_{name.replace('-', '_')}"
        self._kept = telemetry.Account(folder / f"{name}.json", labels, say=say)
        self._who = {"engine": engine, "device": device}

    def keep(self, report: Callable[[], Mapping[str, Any]]) -> None:
        self._kept.keep(lambda: {**self._who, **report()})

    def __enter__(self) -> WorkerAccount:
        return self

    def __exit__(self, *fault: object) -> None:
        self._kept.close()


def folder_of(settings: Settings) -> Path:
    return settings.runtime_dir / "workers"


def read(settings: Settings) -> list[dict[str, Any]]:
    """Accounts of workers that live, by device."""
    paths = sorted(folder_of(settings).glob("*.json"))
    return [facts for path in paths if (facts := telemetry.read_account(path)) is not None]


def name(facts: Mapping[str, Any]) -> str:
    return f"{facts.get('engine', 'an engine')} on {facts.get('device', 'its device')}"


def summary(facts: Mapping[str, Any]) -> str:
    """One line for a person."""
    card = facts["device_busy_share"]
    # without events of the card it is the time in which the engine had a step, and the card may idle within it
    busy, whose = (facts["busy_share"], "engine") if card is None else (card, "card")
    line = (
        f"{facts['prompt_tokens_per_s']:,.0f} tokens a second in, {facts['output_tokens_per_s']:,.0f} out; "
        f"{whose} busy {100 * busy:.0f} %, "
        f"batches {100 * facts['batch_fill']:.0f} % full, prefix hits {100 * facts['prefix_hit_share']:.0f} %, "
        f"padding {100 * facts['padding_share']:.1f} %"
    )
    if facts.get("first_fill") is not None:
        line += f", the first {100 * facts['first_fill']:.0f} % after {facts['first_wait_s']:.2f} s"
    per_joule = facts["tokens_per_joule"]
    return line if per_joule is None else f"{line}, {per_joule:,.1f} tokens a joule"
