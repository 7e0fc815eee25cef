"""Shapes: little padding, no lane limit, and generation is not torn apart by length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric_pipelines.errors import UsageError
from fabric_pipelines.records.shape import (
    aligned_lengths,
    output_classes,
    require_function,
    sampling_digest,
    sampling_kind,
)


def _aligned(length: int) -> int:
    """The twin: one length at a time, integers only."""
    step = 8
    while step * 2 <= length // 16:
        step *= 2
    return -(-length // step) * step


@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=50))
def test_alignment_equals_its_twin(lengths: list[int]) -> None:
    assert aligned_lengths(np.array(lengths, np.int64)).tolist() == [_aligned(x) for x in lengths]


def test_padding_on_log_normal_lengths_stays_under_two_and_a_half_percent() -> None:
    draw = np.random.default_rng(7).lognormal(5.85, 0.72, 50_000)
    lengths = np.maximum(draw, 1).astype(np.int64)
    padded = aligned_lengths(lengths)
    assert 1 - lengths.sum() / padded.sum() <= 0.025


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=50))
def test_output_class_is_the_power_of_two_at_or_above(caps: list[int]) -> None:
    expected = [0 if cap == 0 else 1 << (cap - 1).bit_length() for cap in caps]
    assert output_classes(np.array(caps, np.int64)).tolist() == expected


def test_sampling_of_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="'draw'"):
        sampling_kind({"kind": "draw"})
    assert sampling_kind({"kind": "embed"}) == "embed"


def test_sampling_digest_ignores_key_order_only() -> None:
    assert sampling_digest({"a": 1, "b": 2}) == sampling_digest({"b": 2, "a": 1})
    assert sampling_digest({"a": 1}) != sampling_digest({"a": 2})


def test_a_function_whose_table_has_no_column_for_a_kind_refuses_it() -> None:
    for function, kind in (
        ("embed", "generate"),
        ("generate", "embed"),
        ("hidden_states", "embed"),
    ):
        with pytest.raises(UsageError, match=f"'{function}' keeps"):
            require_function(function, kind)
    assert require_function("embed", "embed") is None
    assert require_function("my_own", "generate") is None
