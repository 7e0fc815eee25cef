"""Segments, with empty ones in every place."""

from itertools import pairwise

import numpy as np
import pytest

from fabric_pipelines.analytics import csr as csr_module
from fabric_pipelines.analytics.csr import (
    Csr,
    group,
    segment_argmin,
    segment_min,
    segment_quantiles,
    segment_row_sums,
    segment_sum,
    segment_xor,
)
from fabric_pipelines.errors import UsageError

INDPTR = np.array([0, 0, 3, 3, 3, 4, 9, 9], dtype=np.int64)  # empty first, in the middle, last


def test_reductions_give_empty_segments_their_neutral_element() -> None:
    values = np.arange(9, dtype=np.float64)
    assert segment_sum(values, INDPTR).tolist() == [0, 3, 0, 0, 3, 30, 0]
    assert segment_min(values, INDPTR).tolist() == [np.inf, 0, np.inf, np.inf, 3, 4, np.inf]
    marks = np.arange(9, dtype=np.uint64)
    assert segment_xor(marks, INDPTR).tolist() == [0, 3, 0, 0, 3, 8, 0]


def test_unsigned_sums_wrap() -> None:
    top = np.full(2, np.iinfo(np.uint64).max)
    assert segment_sum(top, np.array([0, 2])).tolist() == [2**64 - 2]


def test_ties_go_to_the_lowest_id_and_nothing_finite_gives_minus_one() -> None:
    values = np.array([2.0, 1.0, 1.0, np.inf, 5.0, 4.0, 4.0, 4.0, 9.0])
    ids = np.array([9, 8, 7, 6, 5, 4, 2, 3, 1])
    assert segment_argmin(values, ids, INDPTR).tolist() == [-1, 7, -1, -1, -1, 2, -1]


@pytest.mark.parametrize("loop_rows", [1, 10**9])
def test_row_sums_are_the_same_by_slices_and_by_reduceat(
    loop_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csr_module, "LOOP_SEGMENT_ROWS", loop_rows)
    block = np.random.default_rng(0).integers(-99, 99, (9, 4)).astype(np.float64)
    expected = [block[a:b].sum(axis=0) for a, b in pairwise(INDPTR)]
    assert np.array_equal(segment_row_sums(block, INDPTR), np.array(expected))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.95, 1.0])
def test_quantiles_are_those_of_numpy_over_the_kept_rows(share: float) -> None:
    values = np.random.default_rng(1).standard_normal(9)
    kept = np.array([1, 1, 1, 0, 1, 0, 1, 1, 1], dtype=np.bool_)
    owner = np.repeat(np.arange(7), np.diff(INDPTR))
    found = segment_quantiles(values, kept, owner, 7, (0.3, share))[1]
    for cluster in range(7):
        own = values[(owner == cluster) & kept]
        expected = np.quantile(own, share) if len(own) else np.nan
        assert found[cluster] == pytest.approx(expected, nan_ok=True, rel=1e-15)


def test_group_sorts_rows_by_label_and_keeps_the_permutation() -> None:
    rows = np.arange(8, dtype=np.float32).reshape(4, 2)
    csr, perm = group(rows, np.array([2, 0, 2, 0]), np.array([10, 11, 12, 13]), 4)
    assert csr.indptr.tolist() == [0, 2, 2, 4, 4]
    assert csr.ids.tolist() == [11, 13, 10, 12]
    assert np.array_equal(csr.rows, rows[perm])


@pytest.mark.parametrize(
    ("rows", "indptr", "ids", "word"),
    [
        (np.zeros((2, 3)), [0, 2], [0, 1], "float32"),
        (np.zeros((2, 0), np.float32), [0, 2], [0, 1], "dimension 0"),
        (np.zeros((2, 3), np.float32), [0, 1], [0, 1], "rise from 0"),
        (np.zeros((2, 3), np.float32), [0, 2, 1, 2], [0, 1], "rise from 0"),
        (np.zeros((2, 3), np.float32), [0, 2], [0], "ids"),
        (np.zeros((3, 2), np.float32).T, [0, 2], [0, 1], "contiguous"),
    ],
)
def test_input_out_of_order_is_refused_by_name(
    rows: np.ndarray, indptr: list[int], ids: list[int], word: str
) -> None:
    with pytest.raises(UsageError, match=word):
        Csr(rows, np.array(indptr, dtype=np.int64), np.array(ids, dtype=np.int64))
