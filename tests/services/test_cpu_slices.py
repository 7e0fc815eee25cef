"""Bulk gives way for the CPU: what its thread and its backend ask of the kernel, and whom it leaves alone."""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from fabric_pipelines.completion.__main__ import receiver_of, valve_of
from fabric_pipelines.dataplane import cpu_slices
from fabric_pipelines.dataplane import writer as writer_module
from fabric_pipelines.dataplane.cpu_slices import (
    ATTRIBUTES,
    LONG_NS,
    SHORT_NS,
    BackendSlice,
    ask,
    keep_to_half,
)
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.writer import Writer
from fabric_pipelines.settings import Settings
from tests.support_completions import pulled_batch

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}


def slice_ns(pid: int = 0) -> int:
    """What the kernel says of it; 0 where it does not say."""
    found = ctypes.create_string_buffer(struct.calcsize(ATTRIBUTES))
    number = SCHED_GETATTR.get(platform.machine(), -1)
    ctypes.CDLL(None).syscall(number, pid, found, len(found), 0)
    return int(struct.unpack(ATTRIBUTES, found.raw)[5])


def in_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as own:
        return own.submit(work).result()


USUAL_NS = slice_ns()


@pytest.fixture(autouse=True)
def kernel() -> None:
    if in_thread(lambda: ask(LONG_NS) and slice_ns()) != LONG_NS:
        pytest.skip("this kernel takes no slices: it is not Linux, or older than 6.12")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(when, slice of the backend) of each landing."""
    found: list[tuple[str, int]] = []
    commit, copy = writer_module._commit, psycopg.Cursor.copy

    def on_commit(connection: Any, *rest: Any) -> None:
        found.append(("commit", slice_ns(connection.info.backend_pid)))
        commit(connection, *rest)

    def on_copy(self: Any, *rest: Any, **named: Any) -> Any:
        found.append(("copy", slice_ns(self.connection.info.backend_pid)))
        return copy(self, *rest, **named)

    monkeypatch.setattr(writer_module, "_commit", on_commit)
    monkeypatch.setattr(psycopg.Cursor, "copy", on_copy)
    return found


@pytest.fixture
def elastic(database: Database) -> Iterator[Writer]:
    writer = Writer(database, elastic=True)
    yield writer
    writer.close()


def test_bulks_backend_is_easily_interrupted_while_it_copies_and_goes_first_while_it_commits(
    elastic: Writer, seen: list[tuple[str, int]]
) -> None:
    for first in (0, 20):
        in_thread(lambda first=first: elastic.land(pulled_batch(20, function="embed", first=first)))
    assert seen == [("copy", LONG_NS), ("commit", SHORT_NS)] * 2
    assert elastic._connection is not None
    assert slice_ns(elastic._connection.info.backend_pid) == LONG_NS


def test_after_a_lost_connection_the_new_backend_gives_way_too(
    elastic: Writer, seen: list[tuple[str, int]]
) -> None:
    in_thread(lambda: elastic.land(pulled_batch(20, function="embed")))
    elastic.close()
    in_thread(lambda: elastic.land(pulled_batch(20, function="embed", first=20)))
    assert seen[2:] == [("copy", LONG_NS), ("commit", SHORT_NS)]


CORES = sorted(os.sched_getaffinity(0))
HALF = CORES[len(CORES) // 2 :]


@pytest.mark.skipif(len(CORES) < 2, reason="one core has no half")
def test_bulk_keeps_to_half_of_the_cores_and_nothing_else_does(
    database: Database, elastic: Writer
) -> None:
    def work() -> list[int]:
        for first in (0, 5):  # the second time it is still half, not a quarter
            elastic.land(pulled_batch(5, function="embed", first=first))
        return sorted(os.sched_getaffinity(0))

    assert in_thread(work) == HALF
    assert elastic._connection is not None
    assert sorted(os.sched_getaffinity(elastic._connection.info.backend_pid)) == HALF
    other = Writer(database)
    own = in_thread(
        lambda: (
            other.land(pulled_batch(5, function="embed", first=10)),
            sorted(os.sched_getaffinity(0)),
        )[1]
    )
    assert other._connection is not None
    assert sorted(os.sched_getaffinity(other._connection.info.backend_pid)) == own == CORES
    other.close()
    assert sorted(os.sched_getaffinity(os.getpid())) == CORES


def test_one_core_is_not_halved_and_a_process_that_is_gone_is_no_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_slices, "_cores", lambda pid: CORES[:1])
    assert in_thread(lambda: (keep_to_half(), sorted(os.sched_getaffinity(0)))) == (
        False,
        CORES[:1],
    )
    assert not keep_to_half(2**22 + 1)


def test_what_is_not_bulk_keeps_its_usual_slice(
    database: Database, seen: list[tuple[str, int]]
) -> None:
    writer = Writer(database)
    own = in_thread(lambda: (writer.land(pulled_batch(5, function="embed")), slice_ns())[1])
    writer.close()
    assert (own, seen) == (USUAL_NS, [("copy", USUAL_NS), ("commit", USUAL_NS)])


def test_the_thread_of_bulk_gives_way_and_keeps_its_nice_value(elastic: Writer) -> None:
    def work() -> tuple[int, int]:
        elastic.land(pulled_batch(5, function="embed"))
        return slice_ns(), os.getpriority(os.PRIO_PROCESS, 0)

    assert in_thread(work) == (LONG_NS, os.getpriority(os.PRIO_PROCESS, 0))


def test_a_number_that_means_another_process_here_is_left_alone(database: Database) -> None:
    """Of a server in a container we see the socket, and numbers of its own world."""
    with database.session() as connection:
        other = SimpleNamespace(
            fileno=connection.fileno, info=SimpleNamespace(backend_pid=os.getpid())
        )
        assert BackendSlice.of(other).pid == 0  # type: ignore[arg-type]
        assert BackendSlice.of(connection).pid == connection.info.backend_pid
    assert slice_ns() == USUAL_NS


def test_over_a_network_nobody_is_moved() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as end,
    ):
        far = SimpleNamespace(fileno=end.fileno, info=SimpleNamespace(backend_pid=os.getpid()))
        assert BackendSlice.of(far).pid == 0  # type: ignore[arg-type]


def test_completion_keeps_one_writer_that_gives_no_way(home_settings: Settings) -> None:
    receiver = receiver_of(home_settings, valve_of(home_settings))
    assert [target._elastic for target in receiver._targets] == [True, True, False]  # type: ignore[attr-defined]
    receiver.close()


def test_the_thread_that_steps_gives_way_and_the_writer_of_what_must_not_wait_does_not(
    home_settings: Settings,
) -> None:
    """It slices and counts what bulk lands; a thread takes after the one that made it."""
    receiver = receiver_of(home_settings, valve_of(home_settings))

    def place() -> tuple[int, list[int]]:
        return slice_ns(), sorted(os.sched_getaffinity(0))

    def work() -> tuple[Any, Any, Any]:
        before = place()
        receiver.step(wait_s=0)  # there is no broker: it says so and pauses
        return before, place(), receiver._threads[-1].submit(place).result()

    before, stepping, regular = in_thread(work)
    receiver.close()
    assert (before, regular) == ((USUAL_NS, CORES), (USUAL_NS, CORES))
    assert stepping == (LONG_NS, HALF or CORES)
