"""Task batches are checked before anything trusts them; submission fingerprints see content, not layout."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric_pipelines.errors import SchemaError, UsageError
from fabric_pipelines.records.arrow import from_ipc, to_ipc
from fabric_pipelines.records.submission import Submission, fingerprint_of
from fabric_pipelines.records.task import TASK_SCHEMA, require_task_batch, task_batch, token_counts

PROMPTS = st.lists(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=6), min_size=1, max_size=8
)


def _raw(tokens: pa.Array) -> pa.RecordBatch:
    count = len(tokens)
    columns = [
        tokens,
        pa.array([1] * count, pa.uint32()),
        pa.array(range(count), pa.int64()),
        pa.array([b""] * count, pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=TASK_SCHEMA)


@given(PROMPTS)
def test_a_batch_survives_ipc_unchanged(prompts: list[list[int]]) -> None:
    batch = task_batch(prompts)
    assert from_ipc(to_ipc(batch)).equals(batch)
    assert token_counts(batch).tolist() == [len(p) for p in prompts]


@given(PROMPTS, st.integers(0, 8))
def test_the_fingerprint_is_of_the_content_however_it_is_cut(
    prompts: list[list[int]], cut: int
) -> None:
    whole = task_batch(prompts, metadata=[str(i).encode() for i in range(len(prompts))])
    parts = [part for part in (whole.slice(0, cut), whole.slice(cut)) if part.num_rows]
    assert fingerprint_of(parts) == fingerprint_of([whole])


def test_the_fingerprint_sees_a_token_moved_to_the_next_row() -> None:
    assert fingerprint_of([task_batch([[1, 2], [3]])]) != fingerprint_of(
        [task_batch([[1], [2, 3]])]
    )


def test_the_fingerprint_sees_a_metadata_byte_moved_to_the_next_row() -> None:
    one = task_batch([[1], [2]], metadata=[b"ab", b"c"])
    two = task_batch([[1], [2]], metadata=[b"a", b"bc"])
    assert fingerprint_of([one]) != fingerprint_of([two])


def test_an_empty_prompt_is_refused_by_row() -> None:
    with pytest.raises(SchemaError, match="row 1"):
        require_task_batch(_raw(pa.array([[1], [], [2]], pa.list_(pa.uint32()))))


def test_a_token_beyond_the_vocabulary_is_refused_by_row_and_value() -> None:
    batch = task_batch([[1, 2], [3, 99], [4]])
    with pytest.raises(SchemaError, match="token id 99 in row 1"):
        require_task_batch(batch, vocab_size=50)
    require_task_batch(batch, vocab_size=100)


@pytest.mark.parametrize("offsets", [(0, 5, 3), (0, 1, 400), (-4, 1, 3)])
def test_broken_offsets_never_pass(offsets: tuple[int, int, int]) -> None:
    data = to_ipc(task_batch([[1, 2], [3]]))
    good = struct.pack("<3i", 0, 2, 3)
    assert data.count(good) == 1
    with pytest.raises(SchemaError, match="not a valid Arrow"):
        from_ipc(data.replace(good, struct.pack("<3i", *offsets)))


@pytest.mark.parametrize("name", TASK_SCHEMA.names)
def test_a_missing_column_is_refused_by_name(name: str) -> None:
    batch = task_batch([[1]]).drop_columns([name])
    with pytest.raises(SchemaError, match=name):
        require_task_batch(batch)


def test_a_wrong_type_and_a_null_are_refused_by_name() -> None:
    batch = task_batch([[1]])
    wrong = batch.set_column(1, "max_new_tokens", pa.array([1], pa.int8()))
    with pytest.raises(SchemaError, match="max_new_tokens"):
        require_task_batch(wrong)
    nulls = _raw(pa.array([[1], None], pa.list_(pa.uint32())))
    with pytest.raises(SchemaError, match="nulls in 'tokens'"):
        require_task_batch(nulls)


@pytest.mark.parametrize("cut", [0, 1, 8, 40, -9])
def test_truncated_ipc_bytes_are_refused(cut: int) -> None:
    data = to_ipc(task_batch([[1, 2, 3]]))
    with pytest.raises(SchemaError):
        from_ipc(data[:cut])


def test_a_slice_leaves_no_bytes_of_its_parent_in_the_ipc_stream() -> None:
    batch = task_batch([[0xDEADBEEF] * 100, [7]])
    assert b"\xef\xbe\xad\xde" not in to_ipc(batch.slice(1))


def test_a_submission_header_survives_json_and_refuses_nonsense() -> None:
    header = Submission("a" * 64, "generate", "e", {"kind": "generate"}, 10, 1, 3, "f")
    assert Submission.from_json(header.to_json()) == header
    with pytest.raises(UsageError, match="64 hex"):
        Submission("xyz", "generate", "e", {}, 10, 1, 3, "f")
    with pytest.raises(UsageError, match="not a submission"):
        Submission.from_json(b"{}")
    with pytest.raises(UsageError, match="no tasks"):
        Submission("a" * 64, "generate", "e", {}, 10, 0, 0, "f")
