"""Ctrl-C in the middle of quickstart: it says what is kept, leaves no process, and the next one goes on from there."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from fabric_pipelines import models
from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.errors import BrokerUnavailable
from fabric_pipelines.supervise.orphans import marked
from fabric_pipelines.supervise.place import Place
from tests.support import eventually
from tests.support_command import User, first_user, require_models


@pytest.fixture(scope="module")
def user() -> Iterator[User]:
    with first_user() as made:
        require_models(made, *models.MODELS)
        yield made


def test_quickstart_stopped_in_the_middle_goes_on_where_it_was(user: User) -> None:
    running = user.start("quickstart", "--json")
    some = eventually(
        lambda: retired(user) or None, within_s=90, what="some of the work is retired"
    )
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to the whole group
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    assert json.loads(out)["error"]["message"] == err.splitlines()[-1]
    assert "Traceback" not in err
    assert err.splitlines()[-1] == (
        f"stopped; what was submitted and landed is kept in {user.home}: "
        "run `fabric quickstart` again and it goes on where it was"
    )
    assert marked(Place.of(user.settings).mark) == []
    assert user.fabric("status").code == 1
    before = tasks_run(user)
    assert some <= before < 1056, "it was not stopped in the middle"
    report = json.loads(user.done("quickstart", "--json").out)
    assert report["retired"] == report["tasks"] == report["rows_landed"] == 1056
    assert (report["dead"], report["balance"]) == (0, 0)
    assert tasks_run(user) == 1056, "something was run twice"


def retired(user: User) -> int:
    try:
        with BrokerClient(user.settings.broker_endpoint, role="admin") as client:
            return client.status().total.retired.tasks
    except BrokerUnavailable:
        return 0


def tasks_run(user: User) -> int:
    """By what the workers reported when they ended."""
    lines = (
        line
        for log in user.settings.log_dir.glob("worker-*.log")
        for line in log.read_text().splitlines()
        if line.startswith('{"')
    )
    return sum(json.loads(line)["ok"] for line in lines)
