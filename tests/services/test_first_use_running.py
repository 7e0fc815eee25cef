"""Beside a fabric that runs, in a home whose name has spaces: what is refused, and what a reader gets."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from fabric_pipelines import supervise
from fabric_pipelines.broker.callsocket import path_beside
from tests.support_command import EMBED, MINI, User, first_user, require_models

UP = ("up", "--no-ui", "--engine", EMBED)


@pytest.fixture(scope="module")
def user() -> Iterator[User]:
    """Two tasks went in and came out."""
    with first_user("a home, with späces") as made:
        require_models(made, MINI)
        made.done(*UP)
        (made.folder / "two.txt").write_text("one\ntwo\n")
        made.done("submit", "two.txt", "--function", "embed", "--engine", EMBED, "--wait")
        yield made


def test_a_second_supervisor_is_refused_with_the_pid_of_the_first(user: User) -> None:
    pid = supervise.state(user.settings).pid
    assert user.refused(*UP, code=4) == f"already running, pid {pid}: stop it with `fabric down`"


def test_a_second_broker_is_refused_with_the_pid_of_the_first(user: User) -> None:
    said = user.refused(code=4, module="fabric_pipelines.broker")
    assert (
        f"a broker already runs on journal {user.home}/journal (pid {pid_of(user, 'broker')})"
        in said
    )


def test_a_second_worker_on_a_device_is_refused_with_engine_and_pid(user: User) -> None:
    said = user.refused("worker", "run", "--engine", EMBED, "--device", "cpu:0", code=4)
    holder = f"({EMBED}, pid {pid_of(user, 'worker-0')})"
    assert said.startswith(f"device cpu:0 already runs an engine {holder}")


def test_a_second_postgres_on_the_data_is_refused_with_the_pid_of_the_first(user: User) -> None:
    said = user.refused(code=4, module="fabric_pipelines.dataplane.postgres")
    assert f"process {pid_of(user, 'postgres')} already runs the Postgres of" in said


@pytest.mark.parametrize("arguments", [("reset",), ("reset", "--yes")])
def test_reset_is_refused_while_it_runs(user: User, arguments: tuple[str, ...]) -> None:
    said = user.refused(*arguments, code=4)
    assert said.endswith("stop it with `fabric down` before you reset it")
    assert json.loads(user.done("status", "--json").out)["retired"] == 2


def test_quickstart_beside_a_fabric_without_its_engines_names_them(user: User) -> None:
    said = user.refused("quickstart", "--json", code=2, progress=True)
    assert "no worker for smollm2-135m-instruct@ctranslate2-int8" in said
    assert "`fabric down`" in said


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            ("results", "embde"),
            "function 'embde' has no landed rows; embed, generate, hidden_states",
        ),
        (("results", "0" * 64), "submission 000000000000 has no landed rows"),
        (("health", "verses"), "there is no generation of shard 'verses'"),
        (("receipt", "verify", "abc"), "there is no receipt 'abc'"),
    ],
)
def test_what_is_not_there_is_named(user: User, command: tuple[str, ...], said: str) -> None:
    assert user.refused(*command, code=2).startswith(said)


def test_results_come_out_of_a_home_with_spaces(user: User) -> None:
    answer = json.loads(user.done("results", "embed", "--out", "x.parquet", "--json").out)
    assert answer["rows"] == 2
    assert [path.name for path in user.folder.glob("*x.parquet*")] == ["x.parquet"]


def test_status_shows_the_processes_when_no_broker_answers(user: User) -> None:
    both = [user.settings.runtime_dir / "broker.sock"]
    both.append(path_beside(both[0]))
    away = [socket.rename(socket.with_name(f"{socket.name}-away")) for socket in both]
    try:
        said = user.fabric("status", "--json")
    finally:
        for socket, moved in zip(both, away, strict=True):
            moved.rename(socket)
    answer = json.loads(said.out)
    assert (said.code, answer["ready"]) == (1, None)
    names = [item["name"] for item in answer["processes"]]
    assert names == ["postgres", "broker", "completion", "worker-0"]
    assert said.sentence.startswith("no broker answers at ")


def pid_of(user: User, name: str) -> int | None:
    return next(item.pid for item in supervise.state(user.settings).processes if item.name == name)
