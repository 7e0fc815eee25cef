"""Ctrl-C on real commands while they start or stop something: one sentence at the end, 130, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from fabric_pipelines import interrupts
from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.supervise.orphans import marked
from fabric_pipelines.supervise.place import Place
from tests.support import eventually, send
from tests.support_command import EMBED, MINI, User, first_user, require_models

UP = ("up", "--no-ui", "--engine", EMBED)


@pytest.fixture(scope="module")
def user() -> Iterator[User]:
    with first_user() as made:
        require_models(made, MINI)
        yield made


def started(user: User, *command: str, says: str) -> tuple[subprocess.Popen[str], str]:
    """The command, once stderr had a line with `says`, and what it said until then."""
    process = user.start(*command)
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if says in line:
            return process, said
    pytest.fail(f"{command} ended without saying {says!r}: {said}")


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and the last line on stderr; no trace on the way."""
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    return process.returncode, err.strip().splitlines()[-1]


def test_up_interrupted_once_stops_what_it_had_started(user: User) -> None:
    running, _ = started(user, *UP, says="broker starting")
    os.killpg(running.pid, signal.SIGINT)
    assert ended(running) == (
        130,
        "stopped before everything ran; nothing is lost, so run the same command again",
    )
    assert marked(Place.of(user.settings).mark) == []


def test_up_interrupted_twice_does_not_wait_and_everything_ends_by_itself(user: User) -> None:
    running, _ = started(user, *UP, says="broker starting")
    supervisor = Place.of(user.settings).read_state().pid
    assert supervisor is not None
    with stopped(supervisor):  # so that the first Ctrl-C has something to wait for
        os.killpg(running.pid, signal.SIGINT)
        eventually(lambda: asked(supervisor), within_s=60, what="the supervisor was asked to stop")
        os.killpg(running.pid, signal.SIGINT)
        assert ended(running) == (130, interrupts.AT_ONCE)
    place = Place.of(user.settings)
    eventually(lambda: not place.locked(), within_s=60, what="the supervisor ended")
    assert marked(place.mark) == []


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    send(pid, signal.SIGSTOP)
    try:
        eventually(lambda: psutil.Process(pid).status() == "stopped", within_s=60, what="it stands")
        yield
    finally:
        send(pid, signal.SIGCONT)


def asked(pid: int) -> bool:
    """Whether a SIGTERM waits for the process."""
    status = Path(f"/proc/{pid}/status").read_text()
    pending = status.partition("ShdPnd:")[2].split()[0]
    return bool(int(pending, 16) >> (signal.SIGTERM - 1) & 1)


def test_a_wait_for_results_interrupted_once_or_twice_says_what_is_kept(user: User) -> None:
    user.done(*UP)
    worker = next(
        item.pid
        for item in Place.of(user.settings).read_state().processes
        if item.name == "worker-0"
    )
    assert worker is not None
    submit = ("submit", "texts.txt", "--function", "embed", "--engine", EMBED, "--wait")
    with stopped(worker):  # nothing is ever settled
        for times, in_all in ((1, 1), (2, 3)):
            (user.folder / "texts.txt").write_text("".join(f"{n}\n" for n in range(times)))
            waiting = user.start(*submit)
            eventually(
                lambda wanted=in_all: enqueued(user) == wanted,  # type: ignore[misc]
                within_s=60,
                what="its tasks are in the broker",
            )
            for _ in range(times):
                waiting.send_signal(signal.SIGINT)
            code, sentence = ended(waiting)
            assert code == 130
            assert "all that was acknowledged is kept" in sentence
    user.done(*submit)


def enqueued(user: User) -> int:
    with BrokerClient(user.settings.broker_endpoint, role="admin") as client:
        return client.status().total.enqueued.tasks
