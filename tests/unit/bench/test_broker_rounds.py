"""A round of the broker's benchmark counts only if every task came once, with its own payload, and ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fabric_pipelines.bench.broker import Options, Round, Series, _ratio, _report, servers, table
from fabric_pipelines.bench.peers.peer import Held, Seconds, Work, run
from fabric_pipelines.bench.peers.sqlite_peer import SqliteServer, connect
from fabric_pipelines.errors import CheckFailed, UsageError

WORK = Work(1, 600, batch=250, lease=64)


@dataclass
class ListClient:
    """A queue in a list; `doubles` leases its first batch again, `loses` forgets its last task."""

    doubles: bool = False
    loses: bool = False
    ready: list[bytes] = field(default_factory=list)
    done: list[bytes] = field(default_factory=list)

    def prepare(self, work: Work) -> None:
        self.work = work

    def enqueue(self) -> None:
        self.ready = [row.tobytes() for batch in self.work.batches() for row in batch]
        if self.doubles:
            self.ready[300:300] = self.ready[:1]
        if self.loses:
            self.ready.pop()

    def lease(self) -> Held | None:
        taken, self.ready = self.ready[: self.work.lease], self.ready[self.work.lease :]
        return Held(taken, [Work.row_of(payload) for payload in taken]) if taken else None

    def computed(self, held: Held) -> None:
        self.done += held.handles

    def retire(self) -> int:
        ended, self.done = self.done[: self.work.lease], self.done[self.work.lease :]
        return len(ended)

    def close(self) -> None:
        self.ready.clear()


def test_a_round_of_an_honest_queue_has_a_time_for_every_step() -> None:
    seconds = run(ListClient(), WORK)
    assert seconds.cycle >= seconds.lease > 0


@pytest.mark.parametrize(
    ("client", "complaint"),
    [(ListClient(doubles=True), "leased twice"), (ListClient(loses=True), "leased 599")],
)
def test_a_task_that_came_twice_or_was_lost_spoils_the_round(
    client: ListClient, complaint: str
) -> None:
    with pytest.raises(CheckFailed, match=complaint):
        run(client, WORK)


def test_a_payload_names_its_row() -> None:
    payloads = [row.tobytes() for batch in WORK.batches() for row in batch]
    assert [Work.row_of(payload) for payload in payloads] == list(range(600))
    assert {len(payload) for payload in payloads} == {1024}


def test_sqlite_does_the_same_round_twice_in_one_file(tmp_path: Path) -> None:
    server = SqliteServer()
    server.start(tmp_path)
    client = connect(server.endpoint)
    try:
        both = [run(client, Work(number, 600, 250, 64)) for number in (1, 2)]
    finally:
        client.close()
    assert all(seconds.retire > 0 for seconds in both)


def test_a_system_that_nobody_knows_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="no system abacus"):
        servers(["abacus"])


def rounds(*cycles: float, synced: bool = False) -> Series:
    return Series(synced, [Round(Seconds(c / 4, c / 4, c / 4, c / 4, 0.1), 0.2) for c in cycles])


def test_a_ratio_is_the_median_over_rounds_of_the_same_run() -> None:
    series = {("fabric", False): rounds(1, 2, 1), ("redis", False): rounds(4, 4, 3)}
    assert _ratio(series, "redis", synced=False) == 3.0
    assert _ratio(series, "postgres", synced=False) is None


def test_a_missing_peer_is_named_in_the_report_and_its_ratio_is_null() -> None:
    server: Any = SqliteServer()
    report = _report(
        [server],
        {"redis": "redis-server is not installed"},
        {("sqlite", False): rounds(1, 1)},
        {"sqlite": 7},
        {"fdatasync_4k_per_s": 100.0, "fdatasync_1m_per_s": 50.0},
        Options(tasks=1000, rounds=2),
    )
    assert report["ratio_redis"] is None
    assert report["systems"][0]["fsyncs"] == 7
    assert report["systems"][0]["cycle_tasks_per_s"] == 1000
    assert "Missing: redis: redis-server is not installed" in table(report)
