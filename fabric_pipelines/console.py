"""What the commands of `fabric` share: settings of one call, its answer on stdout, its verdict."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from fabric_pipelines.errors import CheckFailed
from fabric_pipelines.interrupts import CTRL_C
from fabric_pipelines.screen import plain

if TYPE_CHECKING:
    from fabric_pipelines.settings import Settings


def settings_of(ctx: typer.Context) -> Settings:
    from fabric_pipelines import settings

    CTRL_C.begin()
    return settings.load(ctx.obj)


def emit(
    answer: Mapping[str, Any], as_json: bool, *, shown: Mapping[str, Any] | None = None
) -> None:
    """The whole answer as JSON, or for a person: facts by name, a table for each list of rows. `shown` is
    what a person sees in place of the answer."""
    from fabric_pipelines import answers, screen

    if as_json:
        sys.stdout.write(json.dumps(plain(answer), allow_nan=False) + "\n")
        return
    chosen = answers.chosen(plain(answer if shown is None else shown))
    sys.stdout.write("\n".join(screen.page(chosen, screen.width())) + "\n")


def require(ok: bool, sentence: str) -> None:
    if not ok:
        raise CheckFailed(sentence)
