"""What a person sees of a drain and of the work as a whole: tokens, and an end."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fabric_pipelines import answers
from fabric_pipelines.broker.draining import drain, watch
from fabric_pipelines.records.batch import Budget
from fabric_pipelines.screen import plain
from fabric_pipelines.telemetry import ProgressBoard, TokenRate
from tests.support_broker import Bench, ids_of, submission_of, tasks_of


@dataclass
class Door:
    """The client's two calls on an owner; each pause lets the worker and completion do one thing."""

    bench: Bench
    held: list[list[int]] = field(default_factory=list)
    pauses: int = 0

    def drain(self, *, undo: bool = False) -> None:
        self.bench.owner.drain(undo=undo)

    def status(self) -> Any:
        return self.bench.owner.status()

    def pause(self, seconds: float) -> None:
        self.pauses += 1
        if self.held:
            self.bench.report(self.held.pop())
        else:
            self.bench.retire(self.bench.pull())


def busy() -> Door:
    bench = Bench()
    batch = tasks_of([10] * 20)
    bench.submit(submission_of([batch]), [batch])
    bench.attach()
    leases = [bench.lease(budget=Budget(4, 1 << 20, None)) for _ in range(2)]
    return Door(bench, [ids_of(lease) for lease in leases if lease is not None])


def test_a_drain_waits_for_what_runs_and_for_what_has_to_land() -> None:
    door, told = busy(), io.StringIO()
    report = drain(door, undo=False, wait=door.pause, board=ProgressBoard(told))  # type: ignore[arg-type]
    assert door.pauses == 3
    assert (report.drained, report.in_flight, report.ready, report.ready_tokens) == (
        True,
        0,
        12,
        120,
    )
    assert "80 / 80 tokens, done" in told.getvalue()


def test_a_drain_that_does_not_wait_says_what_is_still_under_way() -> None:
    door = busy()
    report = drain(door, undo=False, wait=None, board=ProgressBoard(io.StringIO()))  # type: ignore[arg-type]
    assert (report.draining, report.drained) == (True, False)
    assert (report.in_flight, report.in_flight_tokens, door.pauses) == (8, 80, 0)
    back = drain(door, undo=True, wait=door.pause, board=ProgressBoard(io.StringIO()))  # type: ignore[arg-type]
    assert (back.draining, back.drained, door.pauses) == (False, False, 0)
    assert door.bench.lease() is not None


def test_a_watch_ends_when_nothing_is_open() -> None:
    door, told = busy(), io.StringIO()

    def pause(seconds: float) -> None:
        if (lease := door.bench.lease()) is not None:
            door.held.append(ids_of(lease))
        door.pause(seconds)

    status = watch(door, ProgressBoard(told), wait=pause)  # type: ignore[arg-type]
    assert status.total.open_tasks == 0
    assert status.progress["tokens_done"] == status.progress["tokens_total"] == 200
    assert status.progress["eta_s"] == 0.0
    assert "200 / 200 tokens, done" in told.getvalue()


def test_no_eta_is_told_while_what_is_ready_stays() -> None:
    door = busy()
    bench, told = door.bench, io.StringIO()
    bench.owner.tick()
    bench.report(door.held.pop())
    bench.retire(bench.pull())
    bench.time.seconds += 20.0
    bench.owner.renew("w")
    bench.owner.tick()
    assert bench.owner.status().progress["eta_s"] is not None
    assert "ETA " in answers.work_of(shown(bench))["progress"]
    bench.owner.drain()
    assert bench.owner.status().progress["eta_s"] is None
    assert answers.work_of(shown(bench))["progress"].endswith(", draining")
    bench.owner.drain(undo=True)
    assert bench.owner.status().progress["eta_s"] is not None
    bench.owner.core.fault = "a segment is damaged"
    assert bench.owner.status().progress["eta_s"] is None
    assert answers.work_of(shown(bench))["progress"].endswith(", stopped")
    board = ProgressBoard(told)
    board.add("all tasks", 200)
    board.advance_to("all tasks", 40, held="draining")
    board._tell("all tasks")
    assert told.getvalue() == "all tasks: 40 / 200 tokens, draining\n"
    board.advance_to("all tasks", 200, held="draining")
    assert told.getvalue().endswith("200 / 200 tokens, done\n")


def shown(bench: Bench) -> dict[str, Any]:
    status = bench.owner.status()
    found: dict[str, Any] = plain(status)
    return found | status.total.as_json()


def test_what_has_not_moved_for_a_minute_has_no_eta() -> None:
    rate = TokenRate(1_000)
    rate.update(0, 0.0)
    rate.update(100, 10.0)
    assert rate.eta_s is not None
    rate.update(100, 69.0)
    assert rate.eta_s is not None
    rate.update(100, 71.0)
    assert (rate.eta_s, rate.eta) == (None, "ETA unknown")
    rate.update(120, 72.0)
    assert rate.eta_s is not None


def test_the_rate_is_that_of_settled_tokens_and_gives_an_eta() -> None:
    door = busy()
    bench = door.bench
    bench.owner.tick()
    bench.report(door.held.pop())
    bench.retire(bench.pull())
    bench.time.seconds += 20.0
    bench.owner.renew("w")
    bench.owner.tick()
    progress = bench.owner.status().progress
    assert np.isclose(progress["tokens_per_s"], 0.5 * 40 / 20)
    assert np.isclose(progress["eta_s"], 160 / progress["tokens_per_s"])
