"""Postgres goes away under load: producers and workers go on to the high-water mark, hold, and all lands afterwards.

tests/bench/postgres_away.py is the same run with minutes for seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fabric_pipelines.errors import FabricError
from fabric_pipelines.ledger import ZERO
from fabric_pipelines.settings import Settings
from tests.support import eventually, skip_or_fail
from tests.support_away import Outcome, outage, own_server, running

AWAY_S, EVERY_S, HIGH_WATER = 5.0, 0.1, 200

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcome(open_folder: Path) -> Iterator[Outcome]:
    folder = open_folder / "away"
    folder.mkdir(mode=0o755)
    with own_server(folder) as server:
        try:
            with running(server, folder, HIGH_WATER) as loaded:
                yield _run(loaded, server)
        except FabricError as fault:
            skip_or_fail(str(fault))


def _run(loaded: Settings, server: object) -> Outcome:
    return outage(
        loaded,
        server,  # type: ignore[arg-type]
        away_s=AWAY_S,
        every_s=EVERY_S,
        until=lambda probe, within_s, what: eventually(probe, within_s=within_s, what=what),
    )


def test_nothing_is_lost_nothing_lands_twice_and_the_balance_is_zero(outcome: Outcome) -> None:
    assert (outcome.missing, outcome.twice) == ([], [])
    total = outcome.total
    assert total.retired.tasks == total.enqueued.tasks == outcome.submitted > 0
    assert (total.balance, total.dead.tasks, total.open_tasks) == (ZERO, 0, 0)


def test_meanwhile_work_is_taken_and_computed_to_the_mark_and_nothing_retires(
    outcome: Outcome,
) -> None:
    first, last = outcome.looks[0], outcome.looks[-1]
    assert last.away_s >= AWAY_S
    assert last.enqueued > first.enqueued, "the producer was not let in"
    assert last.computed >= HIGH_WATER, "the worker did not go on"
    assert last.ready > 0, "the worker went through the mark"
    assert last.retired == first.retired


def test_every_process_waits_instead_of_falling(outcome: Outcome) -> None:
    assert outcome.restarts == []
