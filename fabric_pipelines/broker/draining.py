"""Draining: ask a broker to give nothing more out, and watch what runs come to its end.

Nothing is lost and nothing is hurried: leased tasks are finished or run out, computed ones are landed, ready ones stay
where they are. It ends with `undo` or with the broker's next start.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from fabric_pipelines.broker.client import BrokerClient, BrokerStatus
from fabric_pipelines.ledger import Amount
from fabric_pipelines.telemetry import ProgressBoard

LOOK_EVERY_S = 0.5
NAME = "draining"


@dataclass(frozen=True, slots=True)
class DrainReport:
    """draining: nothing is leased or taken any more. drained: and nothing runs or waits to land. in_flight: what
    still does, in tasks and prompt tokens; ready: what stays for later."""

    draining: bool
    drained: bool
    in_flight: int
    in_flight_tokens: int
    ready: int
    ready_tokens: int


def drain(
    client: BrokerClient,
    *,
    undo: bool,
    wait: Callable[[float], object] | None,
    board: ProgressBoard,
) -> DrainReport:
    """`wait` pauses between two looks; None: do not wait for the end."""
    client.drain(undo=undo)
    status = client.status()
    if undo or wait is None:
        return _report(status)
    total = in_flight(status).tokens
    board.add(NAME, total)
    while (left := in_flight(status)).tasks:
        total = max(total, left.tokens)  # a lease that was on its way
        board.advance_to(NAME, total - left.tokens)
        wait(LOOK_EVERY_S)
        status = client.status()
    board.advance_to(NAME, total)
    return _report(status)


def watch(
    client: BrokerClient, board: ProgressBoard, *, wait: Callable[[float], object] = time.sleep
) -> BrokerStatus:
    """Show progress over everything until nothing is open."""
    status = client.status()
    board.add("all tasks", status.total.enqueued.tokens)
    while status.total.open_tasks:
        board.advance_to("all tasks", status.progress["tokens_done"], held=_held(status))
        wait(LOOK_EVERY_S)
        status = client.status()
    board.advance_to("all tasks", status.total.enqueued.tokens)
    return status


def _held(status: BrokerStatus) -> str:
    if status.fault:
        return "leasing has stopped"
    return "draining" if status.draining else ""


def in_flight(status: BrokerStatus) -> Amount:
    """What runs, or ran and is not landed."""
    total = status.total
    return total.leased + total.computed + total.in_doubt


def _report(status: BrokerStatus) -> DrainReport:
    left, ready = in_flight(status), status.total.ready
    return DrainReport(
        draining=status.draining,
        drained=status.draining and not left.tasks,
        in_flight=left.tasks,
        in_flight_tokens=left.tokens,
        ready=ready.tasks,
        ready_tokens=ready.tokens,
    )
