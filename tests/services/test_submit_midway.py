"""A submission whose broker goes away or fills up in the middle: it is waited for, or told what was left behind."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fabric_pipelines import api, cli, settings, supervise
from fabric_pipelines.api import Fabric
from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.broker.patience import Patience
from fabric_pipelines.errors import (
    Backpressure,
    BrokerUnavailable,
    SchemaError,
    StorageFailed,
    UsageError,
)
from fabric_pipelines.settings import Settings
from fabric_pipelines.supervise import ProcessSpec, Ready
from fabric_pipelines.supervise.place import Place
from tests.support import send
from tests.support_broker import submission_of, tasks_of
from tests.support_broker_process import Broker, finish_everything, require_whole

ENGINE = "smollm2-135m-instruct@ctranslate2-int8"
WORK: dict[str, Any] = {"function": "generate", "engine": ENGINE, "tokens": [[1, 2], [3]]}


@pytest.fixture
def home(tmp_path: Path) -> Settings:
    flags = {"home": tmp_path / "home", "segment_bytes": 1 << 20}
    return settings.load(flags, {}, tmp_path)


@pytest.fixture
def supervised(home: Settings) -> Iterator[Settings]:
    """A supervisor whose only process is the broker."""
    spec = ProcessSpec(
        "broker",
        (sys.executable, "-m", "fabric_pipelines.broker"),
        ready=Ready(log_pattern=r"^broker ready\b"),
    )
    supervise.up(home, table=[spec], say=lambda line: None)
    yield home
    supervise.down(home)


def kill_broker(of: Settings) -> None:
    [state] = supervise.state(of).processes
    assert state.pid is not None
    send(state.pid)


def test_a_broker_that_is_killed_under_a_supervisor_is_waited_for_by_every_call(
    supervised: Settings, tmp_path: Path
) -> None:
    lines: list[str] = []
    kill_broker(supervised)
    work = Fabric(supervised, on_wait=lines.append).submit(**WORK)
    assert lines
    assert all(line.startswith("waiting for the broker, asking again in") for line in lines)
    assert all("`fabric up` of this home starts it again" in line for line in lines)
    calls = (
        lambda fabric: fabric.progress(work.id),
        lambda fabric: fabric.submission(work.id).progress(),
        lambda fabric: api.Work(fabric, work.id, "generate", ENGINE, 2, 3).wait(timeout_s=0),
    )
    for call in calls[:2]:
        kill_broker(supervised)
        assert call(Fabric(supervised)).ready == 2
    assert calls[2](Fabric(supervised)).ready == 2
    (tmp_path / "p.jsonl").write_text('{"tokens": [7]}\n')
    kill_broker(supervised)
    done = CliRunner().invoke(cli.app, command(supervised, tmp_path / "p.jsonl"))
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["enqueued"] == 1


def command(of: Settings, file: Path, *more: str) -> list[str]:
    what = ["submit", str(file), "--function", "generate", "--engine", ENGINE, "--json"]
    return ["--home", str(of.home), *more, *what]


def test_where_nothing_runs_nobody_waits_whatever_files_lie_there(home: Settings) -> None:
    broker = Broker(home)
    broker.start()
    broker.kill()  # its socket stays
    place = Place.of(home)
    place.make()
    lock = place.take_lock()
    assert lock is not None
    os.close(lock)  # the lock's file stays too
    lines: list[str] = []
    fabric = Fabric(home, on_wait=lines.append)
    for call in (
        lambda: fabric.submit(**WORK),
        lambda: fabric.progress("a" * 64),
        lambda: api.Work(fabric, "a" * 64, "f", ENGINE, 1, 1).wait(),
    ):
        with pytest.raises(BrokerUnavailable, match="start one with `fabric up`"):
            call()
    assert lines == []


def test_a_broker_that_answered_this_fabric_before_is_waited_for_without_a_supervisor(
    home: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = Broker(home)
    broker.start()
    lines: list[str] = []
    fabric = Fabric(home, on_wait=lines.append)
    work = fabric.submit(**WORK)
    broker.kill()
    monkeypatch.setattr(api, "Patience", partial(Patience, sleep=lambda _: broker.start()))
    assert work.progress().ready == 2
    broker.kill()
    assert fabric.submit(**WORK, salt="again").tasks == 2
    broker.kill()
    assert work.wait(timeout_s=0.5, on_progress=lambda state: None).ready == 2
    assert [line.rpartition(": ")[2] for line in lines] == ["it answered before"] * 3
    broker.kill()


def test_a_wait_with_a_timeout_ends_with_it_while_the_broker_is_away(home: Settings) -> None:
    broker = Broker(home)
    broker.start()
    work = Fabric(home).submit(**WORK)
    broker.kill()
    slept: list[float] = []
    patience = Patience(600, sleep=slept.append)
    with (
        BrokerClient.of(home, role="producer") as client,
        pytest.raises(BrokerUnavailable),
    ):
        client.wait(work.id, timeout_s=0.0, patience=patience)
    assert slept == []


def test_a_full_tenant_leaves_what_was_accepted_and_the_same_call_sends_the_rest(
    home: Settings,
) -> None:
    broker = Broker(replace(home, tenant_high_water_bytes=400_000))
    broker.start()
    batches = [tasks_of([1000] * 20, seed=at) for at in range(15)]
    header = submission_of(batches)
    with broker.client("producer") as client:
        with pytest.raises(Backpressure) as refused:
            client.submit(header, batches)
        state = client.submission(header.submission_id)
        assert state is not None
        fault = refused.value
        assert 0 < fault.accepted_tasks == state.enqueued == state.ready < 300
        assert (fault.submission_tasks, fault.submission_id) == (300, header.submission_id)
        assert str(fault).endswith(
            f"; {state.enqueued} of 300 tasks of submission {header.submission_id[:12]} were accepted before and "
            "run: submit the same once more to send the rest"
        )
        with pytest.raises(Backpressure) as again:
            client.submit(header, batches)
        assert again.value.accepted_tasks == state.enqueued
        patience = Patience(60, sleep=lambda _: finish_everything(broker) and None)
        assert client.submit(header, batches, patience=patience).enqueued == 300
    finish_everything(broker)
    with broker.client("admin") as admin:
        assert admin.status().total.retired.tasks == 300
    broker.kill()


def test_a_broker_that_goes_away_in_the_middle_leaves_at_least_what_it_answered_for(
    home: Settings,
) -> None:
    broker = Broker(home)
    broker.start()
    batches = [tasks_of([1000] * 20, seed=at) for at in range(12)]

    def with_a_kill() -> Iterator[Any]:
        for at, batch in enumerate(batches):
            if at == 9:
                broker.kill()
            yield batch

    header = submission_of(batches)
    with broker.client("producer") as client:
        with pytest.raises(BrokerUnavailable) as away:
            client.submit(header, with_a_kill())
        assert 0 < away.value.accepted_tasks <= 180
        assert f"; at least {away.value.accepted_tasks} of 240 tasks of" in str(away.value)
        broker.start()
        assert client.submit(header, batches).enqueued == 240
    require_whole(broker, 240, finish_everything(broker))
    broker.kill()


def test_an_error_before_anything_was_accepted_says_nothing_of_it(home: Settings) -> None:
    broker = Broker(home)
    broker.start()
    good = [tasks_of([10] * 5)]
    low = replace(submission_of(good), vocab_size=1)
    with broker.client("producer") as client, pytest.raises(SchemaError) as refused:
        client.submit(low, good)
    assert (refused.value.accepted_tasks, refused.value.submission_id) == (0, "")
    assert "accepted" not in str(refused.value)
    broker.kill()


def test_a_disk_that_fills_up_in_the_middle_is_told_by_the_command_with_what_runs(
    small_disk: Path, tmp_path: Path
) -> None:
    flags = {"home": small_disk / "home", "segment_bytes": 1 << 20}
    broker = Broker(settings.load(flags, {}, small_disk))
    broker.start()
    file = tmp_path / "many.jsonl"
    file.write_text('{"tokens": [1, 2, 3, 4, 5, 6, 7, 8]}\n' * 120_000)
    done = CliRunner().invoke(cli.app, command(broker.settings, file))
    assert done.exit_code == 1, done.output
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == StorageFailed.__name__
    assert error["submission_tasks"] == 120_000
    with broker.client("producer") as client:
        state = client.submission(error["submission_id"])
    assert state is not None
    assert 0 < error["accepted_tasks"] == state.enqueued == state.ready
    assert f"{state.enqueued:,} of 120,000 tasks" in done.stderr
    assert "submit the same once more to send the rest" in done.stderr
    broker.kill()


@pytest.mark.parametrize("segment_bytes", [1 << 16, 1 << 20])
def test_the_smallest_segments_take_what_the_largest_do_but_for_a_task_that_none_holds(
    home: Settings, segment_bytes: int
) -> None:
    broker = Broker(replace(home, segment_bytes=segment_bytes))
    broker.start()
    fabric = Fabric(broker.settings)
    work = fabric.submit(function="generate", engine=ENGINE, tokens=[[5] * 200] * 1500)
    assert work.progress().enqueued == 1500
    most = segment_bytes * 7 // 8
    longest = [[5] * (most // 4)]
    assert fabric.submit(function="generate", engine=ENGINE, tokens=longest).tasks == 1
    with pytest.raises(UsageError, match=f"task 1 takes .* and at most {most} may be"):
        fabric.submit(function="generate", engine=ENGINE, tokens=[[5], [5] * (most // 4 + 1)])
    broker.kill()
