"""Shared words of the tests: a missing service skips on a laptop and fails in CI; waiting has a deadline."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import NoReturn, TypeVar

import pytest

T = TypeVar("T")

MAJORS = (15, 16, 18)
"""The oldest Postgres that we take, from Debian, and the two that the embedded package holds."""
ON_EVERY_SERVER = pytest.mark.parametrize(
    "postgres", MAJORS, indirect=True, ids=[f"pg{major}" for major in MAJORS]
)


def skip_or_fail(reason: str) -> NoReturn:
    """CI installs everything, so there a missing thing is a fault; elsewhere it is said and skipped."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"in CI this must be there: {reason}")
    pytest.skip(reason)


def eventually(probe: Callable[[], T | None], *, within_s: float, what: str) -> T:
    """The first true answer of `probe`: no empty list, no 0. Fails naming `what` after `within_s` seconds."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        answer = probe()
        if answer:
            return answer
        time.sleep(0.02)
    pytest.fail(f"not within {within_s} s: {what}")


def send(pid: int | None, number: int = signal.SIGKILL) -> None:
    """A signal to exactly one process. `os.kill` reads 0 as "my own process group" and -1 as "everybody": a
    test that met a process between two lives killed the whole test run so, and the script that ran it."""
    assert pid is not None, "no process to send a signal to"
    assert pid > 1, f"{pid} names no single process"
    os.kill(pid, number)
