"""The accounts from the state of every task, against a loop over all of them."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from fabric_pipelines.broker.accounts import READY, RETIRED, STATES
from fabric_pipelines.broker.index import TaskIndex
from fabric_pipelines.broker.recount import BLOCK, Recounter
from fabric_pipelines.ledger import Amount

FIRST_ID, LANES = 7 << 40, 5


def index_of(count: int, lanes: int, states: int, seed: int = 0) -> TaskIndex:
    draw, index, all_ = np.random.default_rng(seed), TaskIndex(), slice(0, count)
    index.extend(count, lsn=1)
    index.put("lane", all_, draw.integers(0, lanes, count))
    index.put("prompt", all_, draw.integers(1, 3000, count))
    index.state[all_] = draw.integers(0, states, count)
    return index


def plain(index: TaskIndex) -> dict[tuple[int, int], Amount]:
    """(lane, state) -> what lies there."""
    members = defaultdict(list)
    for task in range(index.count):
        members[int(index.lane[task]), int(index.state[task])].append(task)
    return {
        at: Amount.of(np.array(tasks) + FIRST_ID, index.prompt[tasks].astype(np.int64))
        for at, tasks in members.items()
    }


def counted(index: TaskIndex, recounter: Recounter) -> dict[tuple[int, int], Amount]:
    accounts = recounter.recount(index, LANES)
    assert accounts.unbalanced() == []
    cells = {
        (lane, state): Amount(
            *(int(f[state + 1, lane]) for f in (accounts.tasks, accounts.tokens, accounts.marks))
        )
        for lane in range(LANES)
        for state in range(STATES)
    }
    return {at: amount for at, amount in cells.items() if amount.tasks}


@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 77])
@pytest.mark.parametrize(("lanes", "states"), [(1, 1), (1, 2), (2, 1), (1, 6), (5, 6)])
def test_a_recount_is_what_a_loop_over_all_tasks_gives(count: int, lanes: int, states: int) -> None:
    index, recounter = index_of(count, lanes, states), Recounter(FIRST_ID)
    assert counted(index, recounter) == plain(index)
    index.state[: index.count : 3] = RETIRED
    assert counted(index, recounter) == plain(index)  # now with fingerprints that were kept


def test_fingerprints_that_were_kept_serve_an_index_that_grows() -> None:
    recounter, index = Recounter(FIRST_ID), index_of(BLOCK + 5, 1, 1)
    assert counted(index, recounter) == plain(index)
    index.extend(2 * BLOCK, lsn=2)
    assert counted(index, recounter) == plain(index)


def test_one_task_that_changed_places_with_another_shows_in_the_fingerprint() -> None:
    index = index_of(2 * BLOCK, 1, 1)
    index.put("prompt", slice(0, index.count), 8)
    index.state[10] = RETIRED
    before = counted(index, Recounter(FIRST_ID))
    index.state[10], index.state[11] = READY, RETIRED
    after = counted(index, Recounter(FIRST_ID))
    ready, moved = before[0, READY], after[0, READY]
    assert (ready.tasks, ready.tokens) == (moved.tasks, moved.tokens)
    assert ready.fingerprint != moved.fingerprint
