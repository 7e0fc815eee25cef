"""Unlike profiles on one backlog: nobody gets an under-filled batch while a lane could fill it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
from hypothesis import given, settings

from fabric_pipelines.broker.accounts import READY
from fabric_pipelines.broker.core import Limits
from fabric_pipelines.broker.lanes import Lane
from fabric_pipelines.broker.packing import guided
from fabric_pipelines.broker.supply import Grant
from fabric_pipelines.records.batch import Budget
from fabric_pipelines.records.profile import Profile
from tests.support_broker import EMBED, GENERATE, Bench, ids_of, submission_of, tasks_of

SMALL = Profile(max_batch_size=32, max_num_tokens=4096, kv_cache_tokens=0, window_tokens=0)
LARGE = Profile(max_batch_size=512, max_num_tokens=32_768, kv_cache_tokens=0, window_tokens=0)


def taken(bench: Bench, name: str, budget: Budget) -> Grant | None:
    facts, grant = bench.owner.core.lease(name, budget, bench.time.seconds)
    bench.owner._log(facts)
    return grant


def ready_of(bench: Bench, lane: Lane) -> npt.NDArray[np.int64]:
    """Prompt tokens of each ready task of a lane, by the index alone."""
    index = bench.owner.core.state.index
    mine = (index.lane[: index.count] == lane.index) & (index.state[: index.count] == READY)
    return index.prompt[: index.count][mine].astype(np.int64)


def is_full(bench: Bench, grant: Grant, budget: Budget) -> bool:
    """No other task would have fitted: of a padded shape none at all, of packed work not the largest that is left."""
    prompt, lane = bench.owner.core.state.index.prompt[grant.tasks].astype(int), grant.lane
    step = lane.key.length * len(prompt) or int(prompt.sum())
    other = lane.key.length or int(ready_of(bench, lane).max(initial=0)) or int(prompt.mean())
    return len(prompt) >= budget.sequences or step + other > budget.tokens


def fillers(bench: Bench, tenant: str, budget: Budget) -> list[str]:
    """Lanes of the tenant with a full batch among their ready tasks, counted plainly."""
    found = []
    for lane in bench.owner.core.state.lanes:
        prompt = ready_of(bench, lane)
        if lane.key.tenant != tenant or not len(prompt):
            continue
        each, step = int(prompt.mean()), int(prompt.sum())
        if lane.key.length:
            each, step = lane.key.length, lane.key.length * len(prompt)
        if len(prompt) >= budget.sequences or step + each > budget.tokens:
            found.append(lane.name)
    return found


def test_a_large_session_gets_full_batches_beside_a_small_one_until_only_rests_are_left() -> None:
    """It was given 33 tasks of a lane that held more, as its half share of what was left, and other lanes held more."""
    bench, draw = Bench(Limits(lease_s=1e6)), np.random.default_rng(7)
    for mark in range(4):
        batch = tasks_of(draw.choice([304, 320, 336, 352], 300).tolist(), seed=mark)
        bench.submit(submission_of([batch], mark, sampling=EMBED), [batch])
    budgets = {"small": SMALL.batch, "large": LARGE.batch}
    bench.attach("small", profile=SMALL)
    bench.attach("large", profile=LARGE)
    full = dict.fromkeys(budgets, 0)
    rests: dict[str, list[int]] = {name: [] for name in budgets}
    while ready := bench.counts().get("ready", 0):
        for name in budgets:
            could = fillers(bench, "default", budgets[name])
            grant = taken(bench, name, budgets[name])
            if grant is None:
                continue
            if is_full(bench, grant, budgets[name]):
                full[name] += 1
            else:
                assert could == [], f"{name} got {len(grant.tasks)} x {grant.lane.key.length}"
                rests[name].append(ready)
    assert full["large"] >= 8
    assert full["small"] >= 9
    assert max(rests["large"]) <= 4 * 106, "a rest of each lane at most"
    assert max(rests["small"], default=0) <= 4 * 13


def test_where_no_lane_fills_a_batch_neighbours_that_can_do_so_together_go_first() -> None:
    """The longest lanes of a log-normal backlog hold a task each. They went first, one in a lease, at 62 % of it."""
    bench, draw = Bench(Limits(lease_s=1e6)), np.random.default_rng(1)
    total = 10_000
    for mark in range(10):
        lengths = np.clip(draw.lognormal(5.8, 0.75, total // 10).astype(int), 1, 4000)
        batch = tasks_of(lengths.tolist(), seed=mark)
        bench.submit(submission_of([batch], mark, sampling=EMBED), [batch])
    budgets = {"small": SMALL.batch, "large": LARGE.batch}
    bench.attach("small", profile=SMALL)
    bench.attach("large", profile=LARGE)
    unfilled: dict[str, list[float]] = {name: [] for name in budgets}
    prompt = padded = 0
    while ready := bench.counts().get("ready", 0):
        for name, budget in budgets.items():
            grant = taken(bench, name, budget)
            if grant is None:
                continue
            prompt += grant.tokens
            padded += grant.lane.key.length * len(grant.tasks)
            if not is_full(bench, grant, budget):
                unfilled[name].append(1 - ready / total)
    assert min(unfilled["large"]) > 0.85, "the large one is full to the last few batches"
    assert min(unfilled["small"]) > 0.95
    assert 1 - prompt / padded <= 0.027


profiles = st.builds(
    Profile,
    max_batch_size=st.integers(1, 24),
    max_num_tokens=st.integers(16, 600),
    kv_cache_tokens=st.just(0),
    window_tokens=st.just(0),
)
backlogs = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),
        st.sampled_from([EMBED, EMBED, GENERATE, GENERATE | {"seed": 1}]),
        st.lists(st.sampled_from([8, 16, 24, 40]), min_size=1, max_size=60),
        st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


def fill_up(bench: Bench, backlog: Sequence[tuple[str, dict[str, object], list[int], bool]]) -> int:
    """Submissions as drawn, some of them still open; how many tasks."""
    count = 0
    for mark, (tenant, sampling, lengths, closed) in enumerate(backlog):
        batch = tasks_of(lengths, seed=mark)
        header = submission_of([batch], mark, sampling=sampling, tenant=tenant)
        if closed:
            bench.submit(header, [batch])
        else:
            header = replace(header, tasks=header.tasks + 1, tokens=header.tokens + 1)
            bench.owner.open_submission(header)
            bench.upload(header, 0, batch)
        count += len(lengths)
    return count


@settings(max_examples=150, deadline=None)
@given(
    backlog=backlogs,
    asking=st.lists(profiles, min_size=2, max_size=3),
    order=st.lists(st.integers(0, 2), min_size=1, max_size=60),
)
def test_an_under_filled_batch_goes_only_when_no_lane_of_the_tenant_fills_one(
    backlog: list[tuple[str, dict[str, object], list[int], bool]],
    asking: list[Profile],
    order: list[int],
) -> None:
    bench = Bench(Limits(lease_s=1e6))
    count = fill_up(bench, backlog)
    for at, profile in enumerate(asking):
        bench.attach(f"w{at}", profile=profile)
    step = sum(profile.max_num_tokens for profile in asking)
    last: dict[tuple[str, str], Lane] = {}
    seen: list[int] = []
    for at in [*order, *[0, 1] * count]:
        profile, name = asking[at % len(asking)], f"w{at % len(asking)}"
        ready = bench.counts().get("ready", 0)
        could = {one: fillers(bench, one, profile.batch) for one in ("a", "b")}
        grant = taken(bench, name, profile.batch)
        if grant is None:
            assert not ready
            break
        seen += grant.tasks.tolist()
        lane, budget = grant.lane, profile.batch
        if not lane.key.length:  # it tops up what runs, and near the end everybody gets a share
            most = guided(budget.sequences, ready, profile.max_num_tokens, step)
            budget = replace(budget, sequences=most)
        tenant = lane.key.tenant
        stayed = last.get((name, tenant)) is lane and not lane.key.length
        if not is_full(bench, grant, budget) and not stayed:
            assert could[tenant] == []
        last[name, tenant] = lane
    assert sorted(seen) == list(range(count))
    assert bench.owner.core.stranded() == []


def test_what_was_given_back_goes_out_in_a_full_batch() -> None:
    bench = Bench(Limits(lease_s=1e6))
    batch = tasks_of([64] * 40)
    bench.submit(submission_of([batch], sampling=EMBED), [batch])
    bench.attach(profile=LARGE)
    lease = bench.lease(budget=Budget(16, 1 << 20, None))
    assert lease is not None
    rest = ids_of(lease)[11:]
    assert bench.owner.nack("w", np.array(rest), "no new lane under pressure", False) == 5
    again = bench.lease(budget=Budget(16, 1 << 20, None))
    assert again is not None
    assert ids_of(again)[:5] == rest
    assert len(ids_of(again)) == 16


def test_packed_lanes_that_promise_a_batch_but_share_their_prefixes_give_way_to_one_that_has_it() -> (
    None
):
    """Counted by prompt, the first lane holds two batches; most of it is one prefix that is computed once."""
    bench = Bench(Limits(lease_s=1e6))
    shared = tasks_of([400] * 10)
    shared = shared.take([0] * 10)
    header = submission_of([shared], 0, sampling=GENERATE)
    bench.submit(header, [shared])
    alone = tasks_of([400] * 10, seed=5)
    bench.submit(submission_of([alone], 1, sampling=GENERATE | {"seed": 1}), [alone])
    bench.attach(profile=LARGE)
    sizes = []
    while grant := taken(bench, "w", Budget(512, 2000, None)):
        sizes.append((grant.lane.index, len(grant.tasks)))
    assert sizes == [(1, 5), (1, 5), (0, 10)]
