"""Sessions that serve one tenant: what they are given, told and counted for."""

from __future__ import annotations

import numpy as np
import pytest

from fabric_pipelines.broker.classes import Roster
from fabric_pipelines.records.batch import Budget
from fabric_pipelines.records.profile import Profile
from tests.support_broker import ENGINE, PLENTY, PROFILE, Bench, ids_of, submission_of, tasks_of

LARGE = Profile(max_batch_size=64, max_num_tokens=4096, kv_cache_tokens=0, window_tokens=64)


@pytest.fixture
def bench() -> Bench:
    """Ten tasks of each of two tenants."""
    made = Bench()
    for mark, tenant in enumerate(("acme", "beta")):
        batches = [tasks_of([10] * 10, seed=mark)]
        made.submit(submission_of(batches, mark, tenant=tenant), batches)
    return made


def attach(
    bench: Bench,
    name: str,
    tenant: str | None,
    profile: Profile = PROFILE,
    held: list[int] | None = None,
) -> tuple[int, ...]:
    reply = bench.owner.attach(name, ENGINE, "f", "cpu:0", profile, held or [], tenant=tenant)
    return reply.accepted


def lanes_of(bench: Bench, ids: list[int]) -> set[str]:
    state = bench.owner.core.state
    sequences = np.array(ids) - (state.incarnation << 40)
    return {state.lanes[at].key.tenant for at in state.index.lane[sequences].tolist()}


def everything(bench: Bench, name: str, sequences: int = 4) -> list[int]:
    found: list[int] = []
    while lease := bench.lease(name, Budget(sequences, 1 << 20, None)):
        found += ids_of(lease)
    return found


def test_a_tenants_session_is_given_all_of_its_own_and_nothing_else(bench: Bench) -> None:
    attach(bench, "own", "acme")
    taken = everything(bench, "own")
    assert len(taken) == 10
    assert lanes_of(bench, taken) == {"acme"}
    assert bench.owner.verify().differences == []


def test_a_session_of_every_tenant_serves_both_beside_it(bench: Bench) -> None:
    attach(bench, "own", "acme")
    attach(bench, "common", None)
    first = bench.lease("own", Budget(4, 1 << 20, None))
    assert first is not None
    rest = everything(bench, "common")
    assert len(rest) + len(ids_of(first)) == 20
    assert lanes_of(bench, rest) == {"acme", "beta"}
    assert not set(rest) & set(ids_of(first))


def test_it_is_told_how_much_is_ready_for_it_alone(bench: Bench) -> None:
    attach(bench, "own", "acme")
    attach(bench, "nobody", "gamma")
    assert bench.owner.renew("own").ready == 10
    assert bench.owner.renew("nobody").ready == 0
    assert bench.lease("nobody", PLENTY) is None


def test_near_its_end_a_tenants_own_backlog_decides_how_much_a_lease_is(bench: Bench) -> None:
    """Ready / twice the consumers, of what the session can get: not of everybody's."""
    batches = [tasks_of([10] * 1000, seed=9)]
    bench.submit(submission_of(batches, 9, tenant="beta"), batches)
    attach(bench, "own", "acme")
    attach(bench, "second", "acme")
    lease = bench.lease("own", PLENTY)
    assert lease is not None
    assert len(ids_of(lease)) == 10 // (2 * 2)


def test_it_can_claim_no_task_of_another_however_it_learned_of_it(bench: Bench) -> None:
    attach(bench, "common", None)
    ids = everything(bench, "common")
    bench.owner.nack("common", np.array(ids, np.int64), "given back", False)
    accepted = attach(bench, "own", "acme", held=ids)
    assert len(accepted) == 10
    assert lanes_of(bench, list(accepted)) == {"acme"}


def test_a_larger_card_of_another_tenant_keeps_no_refused_task_alive(bench: Bench) -> None:
    attach(bench, "common", None)
    attach(bench, "large", "acme", LARGE)
    ids = everything(bench, "common")
    bench.report(ids, "oversized", "common")
    states = bench.counts()
    assert states == {"ready": 10, "computed": 10}, (
        "acme's may go to the large card, beta's are dead"
    )
    again = everything(bench, "large")
    assert lanes_of(bench, again) == {"acme"}
    assert lanes_of(bench, bench.pull()) == {"beta"}


def test_the_roster_tells_classes_by_whom_they_serve() -> None:
    roster = Roster(patience_s=40.0)
    roster.came("a", "small", "m")
    roster.came("b", "large", "m", "acme")
    assert roster.known("m", "acme") == {"small", "large"}
    assert roster.known("m", "beta") == {"small"}
    roster.lost("b", 100.0)
    assert roster.known("m", "acme") == {"small", "large"}
    roster.came("c", "large", "m", "beta")  # another tenant's: nobody's return
    roster.forget(141.0)
    assert roster.known("m", "acme") == {"small"}
    assert roster.known("m", "beta") == {"small", "large"}
