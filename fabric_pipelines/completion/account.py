"""What completion did and what its governor decided, left once a second in two files beside its socket.

`completion.json` is what `fabric status --json` shows, `completion.prom` the same numbers for Prometheus' node exporter.
Refuses to pass off a dead process' account as a live one's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fabric_pipelines import telemetry
from fabric_pipelines.completion.receive import Receiver
from fabric_pipelines.dataplane.valve import Valve
from fabric_pipelines.settings import Settings


class Account:
    """Written by the completion process alone."""

    def __init__(
        self,
        settings: Settings,
        receiver: Receiver,
        valve: Valve,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._kept = telemetry.Account(path_of(settings), "fabric_completion", say=say)
        self._receiver = receiver
        self._valve = valve
        # nothing has an end here: only their rates are asked
        self._prompt, self._output = telemetry.TokenRate(0), telemetry.TokenRate(0)

    def keep(self) -> None:
        """Write if it is due. A disk that takes no account, said once, is no reason to land nothing."""
        self._kept.keep(self._facts)

    def _facts(self) -> dict[str, Any]:
        counters, now_s = self._receiver.counters, time.monotonic()
        self._prompt.update(counters.retired_prompt_tokens, now_s)
        self._output.update(counters.retired_output_tokens, now_s)
        return {
            "held": self._receiver.holds,
            "waiting": self._receiver.waiting,
            "counters": asdict(counters),
            "retired_tokens_per_s": {"prompt": self._prompt.rate, "output": self._output.rate},
            "governor": self._valve.as_json(),
        }

    def close(self) -> None:
        self._kept.close()


def path_of(settings: Settings) -> Path:
    return settings.runtime_dir / "completion.json"


def read(settings: Settings) -> dict[str, Any] | None:
    """The account of a completion process that lives; None when there is none."""
    return telemetry.read_account(path_of(settings))


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
