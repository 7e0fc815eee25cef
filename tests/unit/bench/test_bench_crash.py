"""`fabric bench crash`: the numbers that scripts rely on, and a broken promise that ends it with exit code 3."""

from __future__ import annotations

import json
from itertools import islice

import pytest
from typer.testing import CliRunner

from fabric_pipelines.bench import crash
from fabric_pipelines.broker import client
from fabric_pipelines.broker.facts import Kind
from fabric_pipelines.cli import app
from fabric_pipelines.journal import Journal
from fabric_pipelines.records.arrow import from_ipc

QUICK = ["bench", "crash", "--subsets", "0", "--torn", "0", "--json"]


@pytest.fixture(autouse=True)
def few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole enumeration has its own tests (tests/stateful/test_broker_crash.py, test_crc_mutations.py)."""
    every, damaged = crash.states_of, crash.damaged_states
    monkeypatch.setattr(crash, "states_of", lambda disk, **how: islice(every(disk, **how), 500))
    monkeypatch.setattr(
        crash, "damaged_states", lambda life, **how: islice(damaged(life, **how), 0, None, 20)
    )


def test_the_command_prints_its_numbers_and_nothing_is_lost() -> None:
    done = CliRunner().invoke(app, QUICK)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["states"] > 50
    assert (found["lost"], found["doubled"], found["unbalanced"]) == (0, 0, 0)
    assert found["kinds"] == sorted(kind.name.lower() for kind in Kind)
    assert found["counters"]["cold_uploads"] > 0
    assert f"| {found['states']} | 0 | 0 | 0 |" in crash.table(found)
    every = found["damaged"]["all"]
    assert every["states"] == every["refused"] + every["harmless"] > 50
    assert every["served"] == 0
    line = f"| all | {every['states']} | {every['refused']} | {every['harmless']} | 0 |"
    assert line in crash.table(found)


def test_damage_that_is_served_is_counted_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_checked", lambda reply, part: from_ipc(part))
    done = CliRunner().invoke(app, QUICK)
    assert done.exit_code == 3
    found = json.loads(done.stdout)
    assert found["damaged"]["all"]["served"] > 0
    assert all("on the wire" in said for said in found["broken"])
    assert "on the wire" in found["error"]["message"]


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
