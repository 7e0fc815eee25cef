"""Ids: dense, positive int64, apart between incarnations; submission ids move with every input."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric_pipelines import ids

PARTS = {
    "asset": "embeddings/submission",
    "partition": "psalms",
    "code_version": "1",
    "input_version": "abc",
    "engine_fingerprint": "f" * 64,
    "sampling": {"kind": "embed"},
}


@given(
    st.integers(1, (1 << ids.INCARNATION_BITS) - 1),
    st.integers(0, ids.SEQUENCE_MAX),
)
def test_a_task_id_splits_into_what_made_it_and_fits_int64(incarnation: int, sequence: int) -> None:
    task = ids.task_id(incarnation, sequence)
    assert (ids.incarnation_of(task), ids.sequence_of(task)) == (incarnation, sequence)
    assert 0 < task <= np.iinfo(np.int64).max


def test_two_journals_draw_unlike_incarnations() -> None:
    drawn = {ids.draw_incarnation() for _ in range(64)}
    assert len(drawn) > 60
    assert 0 not in drawn


@pytest.mark.parametrize("part", [*PARTS, "salt"])
def test_a_submission_id_moves_with_every_part(part: str) -> None:
    other = {**PARTS, part: {"kind": "hidden"} if part == "sampling" else "other"}
    assert ids.submission_id(**other) != ids.submission_id(**PARTS)  # type: ignore[arg-type]


def test_a_submission_id_is_the_same_for_the_same_parts_in_any_order() -> None:
    sampling = {"b": 1, "a": [1, 2]}
    again = {"a": [1, 2], "b": 1}
    one = ids.submission_id(**{**PARTS, "sampling": sampling})  # type: ignore[arg-type]
    two = ids.submission_id(**{**PARTS, "sampling": again})  # type: ignore[arg-type]
    assert one == two
    assert len(one) == 64


def test_canonical_json_refuses_nan() -> None:
    with pytest.raises(ValueError, match=r"NaN|Out of range"):
        ids.canonical_json({"x": float("nan")})
