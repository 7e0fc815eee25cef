"""A task too large for one class of consumers goes to the others, and is dead only when none is left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fabric_pipelines.broker.accounts import READY, Accounts
from fabric_pipelines.broker.classes import Roster, bit_of, class_of, is_open, members
from fabric_pipelines.broker.core import Limits
from fabric_pipelines.broker.lanes import Lane, LaneQueue, key_of
from fabric_pipelines.ids import sequence_of
from fabric_pipelines.records.batch import Budget
from fabric_pipelines.records.lease import Lease
from fabric_pipelines.records.task import token_counts
from tests.support_broker import (
    EMBED,
    ENGINE,
    LARGE,
    PROFILE,
    Bench,
    ids_of,
    submission_of,
    tasks_of,
)
from tests.support_broker_disk import DiskBench

LEASE_S = 10.0


@pytest.fixture
def bench() -> Bench:
    """Two classes of consumers on one backlog of six tasks."""
    made = Bench(Limits(lease_s=LEASE_S, attempts_max=3))
    batch = tasks_of([20, 30, 40, 50, 60, 70])
    made.submit(submission_of([batch]), [batch])
    made.attach("small")
    made.attach("large", profile=LARGE)
    return made


def take(bench: Bench, name: str, count: int = 1 << 20) -> list[int]:
    """Lease up to so many tasks, in as many leases as it needs."""
    ids: list[int] = []
    while len(ids) < count and (
        lease := bench.lease(name, Budget(count - len(ids), 1 << 20, None))
    ):
        ids += ids_of(lease)
    return ids


def refuse(bench: Bench, name: str, count: int = 1 << 20, status: str = "oversized") -> list[int]:
    ids = take(bench, name, count)
    bench.report(ids, status, name)
    return ids


def test_what_one_class_refused_is_leased_to_the_other_and_never_to_it_again(
    bench: Bench,
) -> None:
    refused = refuse(bench, "small", 2)
    assert bench.counts() == {"ready": 6}
    rest = take(bench, "small")
    assert len(rest) == 4
    assert not set(rest) & set(refused)
    assert sorted(take(bench, "large")) == sorted(refused)
    assert bench.report(refused, "ok", "large").accepted == 2
    assert bench.owner.core.counters["too_large"] == 2
    assert bench.owner.verify().differences == []


def test_a_task_that_every_class_refused_is_dead_of_the_last_refusal(bench: Bench) -> None:
    refused = refuse(bench, "small", 1)
    assert refuse(bench, "large", 1) == refused
    assert bench.counts() == {"ready": 5, "computed": 1}
    pulled = bench.owner.pull("c", 10)
    assert pulled is not None
    assert pulled.column("task_id").to_pylist() == refused
    assert pulled.column("finish_reason").to_pylist() == ["oversized"]
    assert bench.bury(refused) == 1


def test_a_refusal_that_is_no_matter_of_size_is_final_at_once(bench: Bench) -> None:
    refuse(bench, "small", 2, "refused")
    assert bench.counts() == {"ready": 4, "computed": 2}


def test_a_class_that_said_goodbye_is_not_waited_for(bench: Bench) -> None:
    bench.owner.detach("large")
    refuse(bench, "small", 1)
    assert bench.counts() == {"ready": 5, "computed": 1}


def test_a_class_that_was_lost_is_waited_for_and_takes_its_tasks_when_it_is_back(
    bench: Bench,
) -> None:
    lose(bench, "large")
    refused = refuse(bench, "small")
    assert len(refused) == 6
    assert bench.counts() == {"ready": 6}
    large = class_of(ENGINE, "fingerprint", LARGE)
    [reason] = [lane["parked"] for lane in bench.owner.status().lanes if lane["parked"]]
    assert reason == f"too large for all that are here, waits for {large}"
    bench.attach("large again", profile=LARGE)
    assert not any(lane["parked"] for lane in bench.owner.status().lanes)
    assert sorted(take(bench, "large again")) == sorted(refused)


def test_a_class_that_stays_away_is_given_up_and_the_tasks_die_of_the_refusal(
    bench: Bench,
) -> None:
    lose(bench, "large")
    refused = refuse(bench, "small")
    pass_time(bench, 3.5 * LEASE_S, "small")
    assert bench.counts() == {"ready": 6}
    pass_time(bench, 1.0 * LEASE_S, "small")
    assert bench.counts() == {"computed": 6}
    assert bench.owner.core.counters["given_up"] == 6
    pulled = bench.owner.pull("c", 10)
    assert pulled is not None
    assert sorted(pulled.column("task_id").to_pylist()) == sorted(refused)
    assert set(pulled.column("finish_reason").to_pylist()) == {"oversized"}
    assert bench.owner.verify().differences == []


def test_while_nobody_is_there_at_all_refused_tasks_wait(bench: Bench) -> None:
    refuse(bench, "small")
    pass_time(bench, 100 * LEASE_S)
    assert bench.counts() == {"ready": 6}


def test_after_a_restart_nothing_dies_before_everybody_had_time_to_come_back(bench: Bench) -> None:
    refuse(bench, "small", 1)
    bench.crash()
    bench.attach("small")
    refuse(bench, "small")
    assert bench.counts() == {"ready": 6}
    pass_time(bench, 0.9 * LEASE_S, "small")
    assert bench.counts() == {"ready": 6}
    pass_time(bench, 0.2 * LEASE_S, "small")
    assert bench.counts() == {"computed": 6}


def lose(bench: Bench, name: str) -> None:
    bench.owner.core.sessions[name].deadline_s = 0.0
    bench.owner.tick()


def pass_time(bench: Bench, seconds: float, *renewing: str) -> None:
    until = bench.time.seconds + seconds
    while bench.time.seconds < until:
        bench.time.seconds = min(until, bench.time.seconds + LEASE_S / 2)
        for name in renewing:
            bench.owner.renew(name)
        bench.owner.tick()


def test_a_refusal_survives_the_end_of_the_segment_that_it_was_written_in(tmp_path: Path) -> None:
    bench = DiskBench(Limits(lease_s=LEASE_S), folder=tmp_path, segment_bytes=1 << 14)
    batch = tasks_of([30] * 4)
    bench.submit(submission_of([batch]), [batch])
    bench.attach("small")
    bench.attach("large", profile=LARGE)
    refused = refuse(bench, "small", 4)
    first = bench.owner.core.state.index.done_frames.view[0]
    for mark in range(1, 8):
        batch = tasks_of([30] * 40, seed=mark)
        bench.submit(submission_of([batch], mark), [batch])
        bench.report(take(bench, "small"), "ok", "small")
        bench.retire(bench.pull())
        bench.checkpoint()
    assert bench.disk.first_lsn > first
    assert sorted(refuse(bench, "large", 4)) == sorted(refused)
    pulled = bench.owner.pull("c", 10)
    assert pulled is not None
    assert sorted(pulled.column("task_id").to_pylist()) == sorted(refused)
    assert pulled.column("finish_reason").to_pylist() == ["oversized"] * 4
    assert bench.owner.verify().differences == []
    bench.close()


SMALL_CARD, BIG_CARD = Budget(16, 1024, None), Budget(128, 16_384, None)
SMALL_LIMIT = 300  # tokens of a prompt that the small card's engine takes


@pytest.mark.parametrize("sampling", [None, EMBED], ids=["packed", "padded"])
def test_long_tasks_end_on_the_big_card_and_both_cards_are_served_full(
    sampling: dict[str, object] | None,
) -> None:
    bench, draw = Bench(), np.random.default_rng(11)
    lengths = np.where(
        draw.random(6000) < 0.1, draw.integers(400, 900, 6000), draw.integers(20, 200, 6000)
    )
    batch = tasks_of(lengths.tolist())
    kinds = {} if sampling is None else {"sampling": sampling}
    bench.submit(submission_of([batch], **kinds), [batch])  # type: ignore[arg-type]
    bench.attach("small")
    bench.attach("big", profile=LARGE)
    done: dict[str, list[int]] = {"small": [], "big": []}
    leases = thin = 0
    for name, budget, lease, may_be_full in turns(bench):
        lengths_of = dict(zip(ids_of(lease), token_counts(lease.tasks).tolist(), strict=True))
        large = [at for at, size in lengths_of.items() if name == "small" and size > SMALL_LIMIT]
        good = [at for at in lengths_of if at not in set(large)]
        leases += 1
        thin += may_be_full and not is_full(lease, budget)
        if large:
            bench.report(large, "oversized", name)
        if good:
            bench.report(good, "ok", name)
        done[name] += good
    assert thin == 0, f"{thin} of {leases} leases were below their budget while work was there"
    assert leases > 100
    sizes = {name: lengths[[sequence_of(at) for at in ids]] for name, ids in done.items()}
    assert sizes["small"].max() <= SMALL_LIMIT
    assert int((sizes["big"] > SMALL_LIMIT).sum()) == int((lengths > SMALL_LIMIT).sum())
    assert min(map(len, done.values())) > 150
    assert bench.counts() == {"computed": 6000}
    assert bench.owner.verify().differences == []


def turns(bench: Bench) -> Iterator[tuple[str, Budget, Lease, bool]]:
    """The big card is much the faster one, so both ask in turn for what they can hold."""
    idle = 0
    while idle < 2:
        idle = 0
        for name, budget in (("small", SMALL_CARD), ("big", BIG_CARD)):
            may_be_full = fills(bench, name, budget)
            lease = bench.lease(name, budget)
            if lease is None:
                idle += 1
            else:
                yield name, budget, lease, may_be_full


def fills(bench: Bench, name: str, budget: Budget) -> bool:
    """Whether one lane holds a whole batch of what this session was not known to refuse, before the end at
    which both share what is left."""
    core = bench.owner.core
    refuser = bit_of(core.sessions[name].kind, core.state.classes)
    shared_out = bench.owner.renew(name).ready <= 4 * budget.sequences
    lanes = [lane for lane in core.state.lanes if not lane.key.refused_by & refuser]
    return not shared_out and any(lane.fills(budget) for lane in lanes)


def is_full(lease: Lease, budget: Budget) -> bool:
    """In sequences, or so far in tokens that one more of the longest might not have fitted."""
    lengths = token_counts(lease.tasks)
    cost = lease.aligned_length * len(lengths) or int(lengths.sum())
    longest = lease.aligned_length or 900
    return len(lengths) == budget.sequences or cost + longest > budget.tokens


def test_a_tenant_whose_work_a_class_refused_does_not_keep_it_from_the_others() -> None:
    bench = Bench()
    for mark, tenant in ((1, "a"), (2, "b")):
        batch = tasks_of([50] * 4, seed=mark)
        bench.submit(submission_of([batch], mark, tenant=tenant), [batch])
    bench.attach("small")
    bench.attach("large", profile=LARGE)
    refused = refuse(bench, "small", 4)
    tenants = {bench.owner.core.state.lanes[0].key.tenant for _ in refused}
    assert tenants == {"a"}
    others = take(bench, "small")
    assert len(others) == 4
    assert not set(others) & set(refused)
    assert sorted(take(bench, "large")) == sorted(refused)


def test_a_class_is_what_decides_whether_a_task_fits() -> None:
    one = class_of("m@e", "f" * 64, PROFILE)
    assert one == class_of("m@e", "f" * 64, PROFILE)
    assert len({one, class_of("m@e", "g" * 64, PROFILE), class_of("m@e", "f" * 64, LARGE)}) == 3
    numbers = {"x": 0, "y": 3}
    assert [bit_of(kind, numbers) for kind in ("x", "y", "z")] == [1, 8, 0]
    assert members(0b1001) == [0, 3]
    assert not is_open(0b1001, {"x", "y"}, numbers)
    assert is_open(0b0001, {"x", "y"}, numbers)
    assert is_open(0b1001, {"x", "y", "z"}, numbers)


def test_the_roster_waits_for_the_lost_and_not_for_those_who_left() -> None:
    roster = Roster(patience_s=40.0)
    for session, kind in (("a", "x"), ("b", "x"), ("c", "y")):
        roster.came(session, kind, "m")
    roster.left("a")
    assert roster.known("m", "t") == {"x", "y"}
    roster.left("b")
    roster.lost("c", 100.0)
    assert (roster.known("m", "t"), roster.known("other", "t")) == ({"y"}, set())
    roster.forget(139.0)
    assert roster.known("m", "t") == {"y"}
    roster.forget(140.0)
    assert roster.known("m", "t") == set()


def test_lanes_that_others_refused_are_served_first_by_those_who_can() -> None:
    accounts, queue, budget = Accounts(), LaneQueue(), Budget(4, 1 << 20, None)
    accounts.grow(2)
    accounts.tasks[READY + 1, :2] = 8
    header = submission_of([tasks_of([1])])
    common, refused = (
        Lane(at, replace(key_of(header, 0), refused_by=at), {}, accounts) for at in (0, 1)
    )
    for lane in (common, refused):
        queue.offer(lane)
    assert queue.choose({common.key.tenant: common}, budget, refuser=2) is refused
    assert queue.choose({common.key.tenant: common}, budget, refuser=1) is common
    assert queue.choose({}, budget, refuser=1) is common
