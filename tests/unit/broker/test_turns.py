"""Tenants take turns: one lease of difference over any window, nothing gained by waiting, nobody starved."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric_pipelines.broker.lanes import Lane, LaneQueue, Turns
from fabric_pipelines.ids import sequence_of
from fabric_pipelines.records.batch import Budget
from tests.support_broker import ENGINE, GENERATE, PROFILE, Bench, ids_of, submission_of, tasks_of
from tests.unit.broker.test_packing_and_lanes import lanes_with

BUDGET = Budget(sequences=8, tokens=1 << 20, kv_tokens=None)


def serve(tenants: dict[str, int], turns: int, sessions: int = 1) -> list[tuple[str, int]]:
    """(tenant, tokens) of each lease, for tenants whose leases are of so many tokens; sessions ask in turn."""
    queue = LaneQueue()
    lanes = {name: lanes_with([1 << 30], tenant=name)[0] for name in tenants}
    for lane in lanes.values():
        queue.offer(lane)
    served = []
    current: list[dict[str, Lane]] = [{} for _ in range(sessions)]
    for turn in range(turns):
        lane = queue.choose(current[turn % sessions], BUDGET)
        assert lane is not None
        current[turn % sessions][lane.key.tenant] = lane
        cost = tenants[lane.key.tenant]
        served.append((lane.key.tenant, cost))
        queue.charge(lane.key.tenant, cost)
    return served


def widest_gap(served: list[tuple[str, int]], one: str, other: str) -> int:
    """The largest difference in tokens between the two over any window of leases."""
    ahead = widest = 0
    low = high = 0
    for tenant, tokens in served:
        ahead += tokens if tenant == one else -tokens if tenant == other else 0
        low, high = min(low, ahead), max(high, ahead)
        widest = max(widest, high - low)
    return widest


@pytest.mark.parametrize("sessions", [1, 2, 3, 4, 8])
def test_two_tenants_differ_by_one_lease_over_any_window(sessions: int) -> None:
    lease = 8192
    served = serve({"a": lease, "b": lease}, 1000, sessions)
    assert {name for name, _ in served} == {"a", "b"}
    assert widest_gap(served, "a", "b") == lease


@pytest.mark.parametrize("sessions", [1, 3])
def test_tenants_take_turns_by_tokens_whatever_a_lease_costs(sessions: int) -> None:
    costs = {"a": 1000, "b": 300, "c": 70_000}
    served = serve(costs, 6000, sessions)
    totals = [sum(tokens for name, tokens in served if name == one) for one in costs]
    assert max(totals) - min(totals) <= 70_000
    assert widest_gap(served, "a", "b") <= 2000
    assert min(totals) > 1_000_000


def test_as_many_sessions_as_tenants_stay_where_they_are() -> None:
    served = serve({"a": 8192, "b": 8192}, 400, sessions=2)
    by_session = [{name for name, _ in served[at::2]} for at in range(2)]
    assert by_session == [{"b"}, {"a"}] or by_session == [{"a"}, {"b"}]


def run(turns: Turns, count: int, tokens: int) -> list[str]:
    """Who is served, in so many leases of so many tokens."""
    seen = []
    for _ in range(count):
        now = turns.next()
        assert now is not None
        seen.append(now)
        turns.charge(now, tokens)
    return seen


def test_a_tenant_alone_runs_up_no_debt_that_a_newcomer_would_profit_from() -> None:
    turns = Turns()
    turns.enter("old")
    assert run(turns, 50, 1 << 18) == ["old"] * 50
    turns.enter("new")
    seen = run(turns, 100, 1 << 18)
    assert (seen.count("old"), seen.count("new")) == (50, 50)


def test_who_comes_late_is_served_after_one_lease_of_each_of_the_others() -> None:
    turns = Turns()
    for name in "abcd":
        turns.enter(name)
    run(turns, 1001, 500)
    turns.enter("late")
    assert "late" in run(turns, 5, 500)


def test_a_tenant_whose_queue_is_empty_after_each_lease_takes_no_turn_of_the_others() -> None:
    """It comes back at once each time: were that worth a credit, nobody else would be served."""
    turns = Turns()
    turns.enter("steady")
    served = {"steady": 0, "hops": 0}
    for _ in range(400):
        turns.enter("hops")
        (now,) = run(turns, 1, 1000)
        served[now] += 1
        if now == "hops":
            turns.leave("hops")
    assert abs(served["steady"] - served["hops"]) <= 1


def test_what_a_tenants_own_sessions_take_is_not_held_against_it() -> None:
    """Or whoever brings a card would get nothing of the common ones."""
    bench = Bench()
    for mark, tenant in enumerate(("acme", "beta")):
        batch = tasks_of([10] * 100, seed=mark)
        bench.submit(submission_of([batch], mark, tenant=tenant), [batch])
    bench.owner.attach("own", ENGINE, "f", "cpu:0", PROFILE, [], tenant="acme")
    bench.owner.attach("common", ENGINE, "f", "cpu:0", PROFILE, [])
    four, seen = Budget(4, 1 << 20, None), []
    for _ in range(8):
        assert bench.lease("own", four) is not None
        lease = bench.lease("common", four)
        assert lease is not None
        seen.append(lease.lane.split("/")[0])
    assert (seen.count("acme"), seen.count("beta")) == (4, 4)


def test_a_session_keeps_its_lane_and_its_arc_with_each_tenant_while_the_others_have_their_turn() -> (
    None
):
    bench = Bench()
    works = (("acme", 0, 23), ("acme", 1, 40), ("beta", 0, 60))
    for mark, (tenant, seed, count) in enumerate(works):
        batch = tasks_of([10] * count, seed=mark)
        header = submission_of([batch], mark, tenant=tenant, sampling=GENERATE | {"seed": seed})
        bench.submit(header, [batch])
    bench.attach("w")
    state = bench.owner.core.state
    visited: dict[str, list[int]] = {"acme": [], "beta": []}
    while (lease := bench.lease("w", Budget(5, 1 << 20, None))) is not None:
        (at,) = {int(state.index.lane[sequence_of(task)]) for task in ids_of(lease)}
        visited[state.lanes[at].key.tenant].append(at)
        if at == 0 and state.lanes[0].ready:
            assert [owner for owner, _ in state.lanes[0].order.arcs] == ["w"]
    assert visited["acme"] == [0] * 5 + [1] * 8, "a rest is not left behind"
    assert visited["beta"] == [2] * 12


def test_idle_tenants_gather_nothing() -> None:
    turns = Turns()
    for name in ("busy", "idle", "other"):
        turns.enter(name)
    run(turns, 3, 10)
    turns.leave("idle")
    run(turns, 1000, 10)
    turns.enter("idle")
    seen = run(turns, 30, 10)
    assert [seen.count(name) for name in ("busy", "idle", "other")] == [10, 10, 10]


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["enter", "leave", "serve", "serve", "serve"]),
            st.sampled_from("abc"),
            st.integers(1, 10_000),
            st.sets(st.sampled_from("abc"), max_size=2),
        ),
        max_size=80,
    )
)
def test_a_debt_is_one_lease_at_most_whatever_comes(
    steps: list[tuple[str, str, int, set[str]]],
) -> None:
    turns, largest = Turns(), 1
    for what, name, tokens, passed in steps:
        if what == "enter":
            turns.enter(name)
        elif what == "leave" and name in turns.waiting:
            turns.leave(name)
        elif what == "serve" and (now := turns.next(passed)) is not None:
            assert now not in passed
            assert now in turns.waiting
            turns.charge(now, tokens)
            largest = max(largest, tokens)
        assert all(0 <= debt <= largest for debt in turns._debt.values())
