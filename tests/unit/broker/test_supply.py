"""What sessions get: full batches for unlike profiles, whole prefix groups, shared batches only at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from fabric_pipelines.broker.core import Limits
from fabric_pipelines.broker.envelope import pack, unpack
from fabric_pipelines.broker.facts import Enqueued, Kind, decode
from fabric_pipelines.broker.state import State
from fabric_pipelines.broker.supply import Grant
from fabric_pipelines.records.batch import Budget
from fabric_pipelines.records.lease import Lease
from fabric_pipelines.records.task import task_batch, token_counts
from tests.support_broker import EMBED, Bench, ids_of, submission_of, tasks_of

LARGE = Budget(sequences=64, tokens=8192, kv_tokens=20_000)
SMALL = Budget(sequences=8, tokens=500, kv_tokens=900)


def backlog(bench: Bench, batch: pa.RecordBatch, **kinds: object) -> None:
    bench.submit(submission_of([batch], **kinds), [batch])  # type: ignore[arg-type]


def is_full(lease: Lease, budget: Budget, usual: int, cap: int) -> bool:
    """No task of usual size would still have fitted."""
    lengths = token_counts(lease.tasks)
    held = int(lengths.sum()) + cap * len(lengths)
    return (
        len(lengths) == budget.sequences
        or int(lengths.sum()) + usual > budget.tokens
        or held + usual + cap > (budget.kv_tokens or held + usual + cap)
    )


def test_two_unlike_profiles_on_one_backlog_are_both_served_full() -> None:
    bench, draw = Bench(), np.random.default_rng(4)
    backlog(bench, tasks_of(draw.integers(20, 100, 4000).tolist()))
    budgets: Mapping[str, Budget] = {"large": LARGE, "small": SMALL}
    for name in budgets:
        bench.attach(name)
    seen: list[int] = []
    full = total = 0
    while True:
        turn = [(name, bench.lease(name, budget)) for name, budget in budgets.items()]
        if not any(lease for _, lease in turn):
            break
        for name, lease in turn:
            if lease is None:
                continue
            seen += ids_of(lease)
            if bench.counts().get("ready", 0) > 4 * LARGE.sequences:
                full += is_full(lease, budgets[name], 100, 16)
                total += 1
    assert full == total > 60
    assert len(seen) == len(set(seen)) == 4000


def prefixed(groups: int, each: int) -> pa.RecordBatch:
    """`groups` prompts of 96 shared tokens with `each` endings of 16, in random order."""
    draw = np.random.default_rng(3)
    heads = [draw.integers(0, 1000, 96).tolist() for _ in range(groups)]
    prompts = [head + draw.integers(0, 1000, 16).tolist() for head in heads for _ in range(each)]
    return task_batch([prompts[i] for i in draw.permutation(len(prompts))], max_new_tokens=8)


def test_a_prefix_group_goes_to_one_session_though_all_of_them_ask_in_turn() -> None:
    bench = Bench()
    backlog(bench, prefixed(groups=100, each=8))
    names = [f"w{i}" for i in range(4)]
    for name in names:
        bench.attach(name)
    holders: dict[bytes, set[str]] = {}
    while bench.counts().get("ready"):
        for name in names:
            lease = bench.lease(name, Budget(1, 1 << 20, 1 << 20))
            for row in lease.tasks.to_pylist() if lease else ():
                holders.setdefault(json.dumps(row["tokens"][:96]).encode(), set()).add(name)
    assert sum(map(len, holders.values())) <= 100 + 4 * 10


def test_a_shared_prefix_is_counted_once_a_group_against_the_budget() -> None:
    bench = Bench()
    backlog(bench, prefixed(groups=4, each=50))
    bench.attach()
    lease = bench.lease(budget=Budget(1 << 10, 1000, None))
    assert lease is not None
    assert int(token_counts(lease.tasks).sum()) > 3000


def test_an_arc_is_free_again_when_its_session_is_gone() -> None:
    bench = Bench(Limits(lease_s=10.0))
    backlog(bench, prefixed(groups=20, each=10))
    for name in ("w0", "w1", "w2"):
        bench.attach(name)
        assert bench.lease(name, Budget(1, 1 << 20, None))
    order = bench.owner.core.state.lanes[0].order
    assert [owner for owner, _ in order.arcs].count(None) == 0
    bench.owner.detach("w1")
    bench.time.seconds += 20
    bench.owner.tick()
    assert {owner for owner, _ in order.arcs} == {None}


def lane_lengths(bench: Bench, lease: Lease) -> list[int]:
    index, state = bench.owner.core.state.index, bench.owner.core.state
    first = state.task_ids(np.zeros(1, np.int64))[0]
    return [
        state.lanes[int(index.lane[at - first])].key.length
        for at in lease.tasks.column("task_id").to_pylist()
    ]


def test_draining_lanes_share_a_batch_only_when_none_is_full_and_within_the_declared_waste() -> (
    None
):
    bench = Bench(Limits(merge_waste=0.1))
    lengths = [64] * 20 + [56] * 3 + [48] * 2 + [16] * 3
    backlog(bench, tasks_of(lengths), sampling=EMBED)
    bench.attach()
    cuts = []
    while lease := bench.lease(budget=Budget(8, 1 << 20, None)):
        cuts.append(lane_lengths(bench, lease))
        padded = lease.aligned_length * len(cuts[-1])
        waste = 1 - int(token_counts(lease.tasks).sum()) / padded
        assert waste <= 0.1
        assert lease.aligned_length == max(cuts[-1])
    assert cuts == [[64] * 8, [64] * 8, [64] * 4 + [56] * 3 + [48], [16] * 3, [48]]


def test_lanes_whose_producers_are_at_work_are_not_merged() -> None:
    bench = Bench()
    batch = tasks_of([64] * 3 + [56] * 3)
    header = submission_of([batch, batch], sampling=EMBED)
    bench.owner.open_submission(header)
    bench.upload(header, 0, batch)
    bench.attach()
    lease = bench.lease(budget=Budget(8, 1 << 20, None))
    assert lease is not None
    assert lane_lengths(bench, lease) == [64] * 3


def test_a_merged_lease_is_repeated_whole_and_what_comes_back_goes_home() -> None:
    bench = Bench()
    backlog(bench, tasks_of([64] * 4 + [56] * 3), sampling=EMBED)
    bench.attach()
    budget = Budget(8, 1 << 20, None)
    lease = bench.lease(budget=budget, call=1)
    again = bench.lease(budget=budget, call=1)
    assert lease is not None
    assert again is not None
    assert again.aligned_length == lease.aligned_length == 64
    assert ids_of(again) == ids_of(lease)
    assert bench.owner.nack("w", np.array(ids_of(lease)), "test", False) == 7
    first = bench.lease(budget=budget)
    assert first is not None
    assert lane_lengths(bench, first) == [64] * 4 + [56] * 3
    assert ids_of(first) == ids_of(lease)
    bench.crash()
    assert bench.owner.verify().differences == []


def test_a_log_written_by_the_old_rule_gives_the_lanes_it_gave() -> None:
    bench = Bench()
    backlog(bench, task_batch([[1] * 40, [2] * 40], max_new_tokens=[10, 100]))
    state = State(7)
    for frame in bench.journal.replay():
        payload = frame.payload
        if frame.kind == Kind.ENQUEUE:
            head, parts = unpack(payload)
            assert head.pop("rule") == 2
            payload = memoryview(b"".join(map(bytes, pack(head, parts))))
        fact = decode(frame.kind, payload, "here")
        assert not isinstance(fact, Enqueued) or fact.rule == 1
        if frame.kind != Kind.LANES:
            state.apply(fact, frame.lsn)
    assert [lane.key.output_class for lane in state.lanes] == [16, 128]


def test_leaders_are_those_that_share_nothing_with_the_one_before() -> None:
    grant = Grant(1, None, np.arange(3), np.array([0, 96, 0]), 3)  # type: ignore[arg-type]
    assert grant.leader.tolist() == [True, False, True]
