"""Traps of a broker's design, each with its test (those that have one elsewhere are not repeated)."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.broker.core import Limits
from fabric_pipelines.errors import BrokerUnavailable, UsageError
from fabric_pipelines.records.batch import Budget
from fabric_pipelines.testing.sim_disk import SimDisk
from tests.support_broker import Bench, ids_of, submission_of, tasks_of
from tests.support_broker_disk import DiskBench


def test_leases_that_share_a_group_share_one_write() -> None:
    disk = SimDisk()
    bench = DiskBench(Limits(lease_s=1e6), ops=disk, segment_bytes=1 << 18)
    batch = tasks_of([20] * 400)
    bench.submit(submission_of([batch]), [batch])
    bench.attach()
    before = disk.call_names.count("pwritev"), disk.call_names.count("fdatasync")
    for _ in range(50):
        assert bench.lease(budget=Budget(8, 1 << 20, None)) is not None
    assert disk.call_names.count("pwritev") == before[0]
    bench.owner.commit()
    assert disk.call_names.count("pwritev") == before[0] + 1
    assert disk.call_names.count("fdatasync") == before[1] + 1
    bench.close()


def retired_lane() -> tuple[Bench, list[int]]:
    bench = Bench(Limits(lease_s=1e6))
    batch = tasks_of([20] * 3)
    bench.submit(submission_of([batch]), [batch])
    bench.attach()
    lease = bench.lease()
    assert lease is not None
    bench.finish(lease)
    bench.retire(bench.pull())
    assert bench.owner.core.state.lanes[0].step.name == "RETIRED"
    return bench, ids_of(lease)


def test_a_late_ack_of_a_retired_lane_is_recognised_and_changes_nothing() -> None:
    bench, ids = retired_lane()
    reply = bench.report(ids, "ok")
    assert (reply.accepted, reply.duplicates, reply.late) == (0, 3, 0)
    assert bench.owner.core.counters["old_generation_acks"] == 3
    assert bench.counts() == {"retired": 3}


def test_a_late_ack_of_an_old_generation_is_told_from_a_repeat_of_this_one() -> None:
    bench, old = retired_lane()
    batch = tasks_of([20] * 4, seed=2)
    bench.submit(submission_of([batch], 2), [batch])
    lane = bench.owner.core.state.lanes[0]
    assert (lane.generation, lane.opened_at) == (2, 3)
    lease = bench.lease(budget=Budget(2, 1 << 20, None))
    assert lease is not None
    bench.finish(lease)
    bench.retire(bench.pull())
    assert bench.finish(lease).duplicates == 2
    assert bench.owner.core.counters["old_generation_acks"] == 0
    assert bench.report(old, "ok").duplicates == 3
    assert bench.owner.core.counters["old_generation_acks"] == 3
    assert bench.owner.core.state.lanes[0].generation == 2
    assert bench.counts() == {"ready": 2, "retired": 5}
    assert bench.owner.verify().differences == []


def test_lane_steps_are_facts_with_closing_counts_and_a_lie_about_them_is_refused() -> None:
    bench, _ = retired_lane()
    steps = [
        row
        for frame in bench.journal.replay()
        if frame.kind == 12
        for row in np.frombuffer(bytes(frame.payload)[-40:], np.int64).reshape(-1, 5).tolist()
    ]
    assert steps == [[0, 1, 2, 0, 0], [0, 1, 3, 3, 0]]


def test_a_client_that_came_through_a_fork_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = BrokerClient(f"grpc+unix://{tmp_path}/none", role="admin", timeout_s=1)
    with pytest.raises(BrokerUnavailable):
        client.hello()
    opened_in = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: opened_in + 1)
    with pytest.raises(UsageError, match=f"opened in process {opened_in} and is used in"):
        client.hello()
