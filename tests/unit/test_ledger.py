"""The ledger sees what counts cannot: one task lost and another counted twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric_pipelines.errors import BalanceBroken
from fabric_pipelines.ledger import MASK64, ZERO, Amount, Ledger, hash64


def _amount(task_ids: list[int], tokens: int = 5) -> Amount:
    array = np.array(task_ids, np.int64)
    return Amount.of(array, np.full(len(array), tokens))


def _splitmix64(value: int) -> int:
    """The twin: the published finaliser, one integer at a time."""
    x = (value + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


@given(st.lists(st.integers(0, 2**62), max_size=20))
def test_hash64_equals_its_twin(values: list[int]) -> None:
    assert hash64(np.array(values, np.int64)).tolist() == [_splitmix64(v) for v in values]


@given(st.sets(st.integers(0, 2**62), min_size=1, max_size=30), st.integers(0, 30))
def test_any_split_of_a_set_adds_up_to_the_whole(tasks: set[int], cut: int) -> None:
    ordered = sorted(tasks)
    assert _amount(ordered[:cut]) + _amount(ordered[cut:]) == _amount(ordered)
    assert _amount(ordered) - _amount(ordered) == ZERO


def test_one_lost_and_one_doubled_is_seen_although_the_counts_agree() -> None:
    ledger = Ledger(enqueued=_amount([1, 2, 3]), retired=_amount([1, 1, 3]))
    assert ledger.balance.tasks == 0
    assert ledger.balance.tokens == 0
    assert ledger.balance.fingerprint != 0
    with pytest.raises(BalanceBroken, match="lane x"):
        ledger.require_balanced("lane x")


def test_a_balanced_ledger_passes_and_reports_zero() -> None:
    ledger = Ledger(
        enqueued=_amount([1, 2, 3]), ready=_amount([2]), retired=_amount([1]), dead=_amount([3])
    )
    ledger.require_balanced("everything")
    report = ledger.as_json()
    assert (report["balance_tasks"], report["balance_tokens"], report["balance_fingerprint"]) == (
        0,
        0,
        0,
    )
    assert report["ready"] == 1
    assert ledger.open_tasks == 1


def test_ledgers_of_lanes_add_up_to_the_total() -> None:
    one = Ledger(enqueued=_amount([1]), ready=_amount([1]))
    two = Ledger(enqueued=_amount([2]), dead=_amount([2]))
    assert (one + two).enqueued == _amount([1, 2])
    assert (one + two).balance == ZERO
