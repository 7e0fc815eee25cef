"""What the commands of `fabric` share: settings of one call, its answer on stdout, its verdict.

With --json there is one object on stdout however the command ends. It is held back until then, so that a failure can
stand in it: alone, or under `error` beside what the command found out.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from fabric_pipelines.errors import CheckFailed, CorruptionFound, FabricError, TransientError
from fabric_pipelines.interrupts import CTRL_C
from fabric_pipelines.screen import plain

if TYPE_CHECKING:
    from fabric_pipelines.settings import Settings

GENERATION_MAX = 2**63 - 1  # a bigint of the database
WAIT_S_MAX = 366 * 24 * 3600


def finite(value: float | None) -> float | None:
    """Of an option with bounds, which let what is no number pass: it is neither below nor above them."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no finite number")
    return value


def settings_of(ctx: typer.Context) -> Settings:
    from fabric_pipelines import settings

    CTRL_C.begin()
    return settings.load(ctx.obj)


@dataclass(slots=True)
class Answer:
    """The JSON object of one call."""

    wanted: bool = False
    held: dict[str, Any] | None = None

    def begin(self, arguments: Sequence[str]) -> None:
        """A new call; whether it is to answer in JSON must be known even if nothing else of it can be read."""
        self.wanted, self.held = "--json" in arguments, None

    def hold(self, answer: Mapping[str, Any]) -> None:
        assert self.held is None, "a command answers once"
        found = plain(answer)
        json.dumps(
            found, allow_nan=False
        )  # here, where what it cannot say is still the command's own fault
        self.held = found

    def failed(self, fault: FabricError) -> None:
        """How the command ended, for a script: `kind` is the class of the error."""
        if self.wanted or self.held is not None:
            self.held = {**(self.held or {}), "error": error_of(fault)}

    def hand_over(self) -> None:
        """Write it, if there is one."""
        held, self.held = self.held, None
        if held is not None:
            sys.stdout.write(json.dumps(held, allow_nan=False) + "\n")


ANSWER = Answer()


def error_of(fault: FabricError) -> dict[str, Any]:
    said = {
        "kind": fault.code,
        "message": str(fault),
        "transient": isinstance(fault, TransientError),
        "exit_code": fault.exit_code,
    }
    if isinstance(fault, CorruptionFound) and fault.places:
        said["places"] = [dict(place) for place in fault.places]
    if fault.submission_id:
        names = ("submission_id", "accepted_tasks", "submission_tasks")
        said |= {name: getattr(fault, name) for name in names}
    return said


def emit(
    answer: Mapping[str, Any], as_json: bool, *, shown: Mapping[str, Any] | None = None
) -> None:
    """The whole answer as JSON, or for a person: facts by name, a table for each list of rows. `shown` is
    what a person sees in place of the answer."""
    from fabric_pipelines import answers, screen

    if as_json:
        ANSWER.hold(answer)
        return
    chosen = answers.chosen(plain(answer if shown is None else shown))
    sys.stdout.write("\n".join(screen.page(chosen, screen.room())) + "\n")


def require(ok: bool, sentence: str) -> None:
    if not ok:
        raise CheckFailed(sentence)
