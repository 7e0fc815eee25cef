"""`fabric bench crash`: the four numbers that scripts rely on, and a broken promise that ends it with exit code 3."""

from __future__ import annotations

import json
from itertools import islice

import pytest
from typer.testing import CliRunner

from fabric_pipelines.bench import crash
from fabric_pipelines.broker.facts import Kind
from fabric_pipelines.cli import app
from fabric_pipelines.journal import Journal

QUICK = ["bench", "crash", "--subsets", "0", "--torn", "0", "--json"]


@pytest.fixture(autouse=True)
def few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole enumeration has its own test (tests/stateful/test_broker_crash.py)."""
    every = crash.states_of
    monkeypatch.setattr(crash, "states_of", lambda disk, **how: islice(every(disk, **how), 500))


def test_the_command_prints_its_numbers_and_nothing_is_lost() -> None:
    done = CliRunner().invoke(app, QUICK)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["states"] > 50
    assert (found["lost"], found["doubled"], found["unbalanced"]) == (0, 0, 0)
    assert found["kinds"] == sorted(kind.name.lower() for kind in Kind)
    assert found["counters"]["cold_uploads"] > 0
    assert f"| {found['states']} | 0 | 0 | 0 |" in crash.table(found)


def test_a_journal_that_does_not_sync_is_caught_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def lies(journal: Journal) -> int:
        journal._durable_lsn = journal._written_lsn
        return journal._durable_lsn

    monkeypatch.setattr(Journal, "sync", lies)
    done = CliRunner().invoke(app, QUICK)
    assert done.exit_code == 3
    found = json.loads(done.stdout)
    assert found["lost"] > 0
    assert found["error"]["message"].startswith("a promise is broken: after ")
