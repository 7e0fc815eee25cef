"""A quickstart that is killed: the next one ends its run with a reason, uses its services, and stops them at its end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import dagster as dg
import pytest

from fabric_pipelines import quickstart, supervise
from fabric_pipelines.dagster_home import ensure_dagster_home
from fabric_pipelines.quickstart import BY_TAG, KILLED, NAME
from fabric_pipelines.settings import Settings, load
from fabric_pipelines.supervise import ProcessSpec
from fabric_pipelines.telemetry import ProgressBoard

IDLE = ProcessSpec(
    "idle", (sys.executable, "-S", "-E", "-c", "import time; time.sleep(600)"), stop_timeout_s=5.0
)
KILLED_IN_ITS_STEP = """
import os, signal
import dagster as dg
from fabric_pipelines import quickstart, settings, supervise

@dg.asset
def fatal():
    os.kill(os.getpid(), signal.SIGKILL)

mine = settings.load()
with quickstart._environment(mine), quickstart._alone(mine):
    spec = supervise.ProcessSpec("idle", {argv!r}, stop_timeout_s=5.0)
    supervise.up(mine, table=[spec], say=lambda line: None, started_by="quickstart")
    quickstart.build_defs = lambda overrides: dg.Definitions([fatal], executor=dg.in_process_executor)
    with quickstart._instance(mine) as instance:
        quickstart._materialise(instance)
"""


class Board(ProgressBoard):
    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    made = load({"home": tmp_path / "home"}, environ={}, folder=tmp_path)
    monkeypatch.chdir(tmp_path)
    yield made
    supervise.down(made)
    shutil.rmtree(made.runtime_dir, ignore_errors=True)


def instance_of(settings: Settings) -> dg.DagsterInstance:
    ensure_dagster_home(settings)
    return quickstart._instance(settings)


def quickstart_again(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Its frame is the real one; the work inside has tests of its own."""
    board = Board()
    monkeypatch.setattr(quickstart, "_pull_models", lambda *_: 0.0)
    monkeypatch.setattr(quickstart, "_prepare", lambda *_: {})
    monkeypatch.setattr(quickstart, "_settled", lambda *_: 0)
    monkeypatch.setattr(quickstart, "_watched", lambda *_: nullcontext())
    monkeypatch.setattr(quickstart, "_materialise", lambda instance: "")
    monkeypatch.setattr(quickstart, "_require_workers", lambda *_: None)
    monkeypatch.setattr(quickstart, "_report", lambda *_: None)
    quickstart.run(settings, progress=board)
    return board.lines


def test_the_next_quickstart_ends_the_run_and_the_services_of_a_killed_one(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance_of(settings).dispose()
    killed = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLED_IN_ITS_STEP.format(argv=IDLE.argv)],
        env={**os.environ, **settings.as_environment()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with instance_of(settings) as instance:
        [run] = instance.get_runs()
        assert run.status == dg.DagsterRunStatus.STARTED
    assert supervise.state(settings).started_by == NAME
    lines = quickstart_again(settings, monkeypatch)
    assert lines == [
        "using the services that a killed quickstart left; they are stopped at the end",
        "ended a run that a killed quickstart left open",
    ]
    with instance_of(settings) as instance:
        assert [run.status for run in instance.get_runs()] == [dg.DagsterRunStatus.FAILURE]
        events = [entry.dagster_event for entry in instance.all_logs(run.run_id)]
        [said] = [e.message for e in events if e and e.event_type_value == "PIPELINE_FAILURE"]
        assert said == KILLED
    assert not supervise.state(settings).running


def test_services_of_a_fabric_up_are_used_and_left_to_run(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = supervise.up(settings, table=[IDLE], say=lambda line: None)
    assert quickstart_again(settings, monkeypatch) == ["using the services that run already"]
    after = supervise.state(settings)
    assert (after.running, after.pid, after.processes) == (True, before.pid, before.processes)


def test_only_open_runs_of_a_quickstart_are_ended_each_by_how_far_it_came(
    settings: Settings,
) -> None:
    @dg.op
    def nothing() -> None: ...

    @dg.job
    def job() -> None:
        nothing()

    states = dg.DagsterRunStatus
    with instance_of(settings) as instance:

        def run_of(status: states, **tags: str) -> str:
            return instance.create_run_for_job(job, status=status, tags=tags).run_id

        mine = {BY_TAG: NAME}
        runs = {
            run_of(states.NOT_STARTED, **mine): states.CANCELED,
            run_of(states.STARTING, **mine): states.CANCELED,
            run_of(states.STARTED, **mine): states.FAILURE,
            run_of(states.SUCCESS, **mine): states.SUCCESS,
            run_of(states.STARTED): states.STARTED,
            run_of(states.STARTED, **{BY_TAG: "somebody's own"}): states.STARTED,
        }
        board = Board()
        quickstart._end_dead_runs(instance, board)
        found = {run.run_id: run.status for run in instance.get_runs()}
        assert found == runs
        assert board.lines == ["ended 3 runs that killed quickstarts left open"]
        quickstart._end_dead_runs(instance, board)
        assert len(board.lines) == 1
