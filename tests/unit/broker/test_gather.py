"""Rows gathered by plain copies are the rows that Arrow itself would take."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from fabric_pipelines.broker.gather import TaskMemory, gathered
from fabric_pipelines.records.arrow import read_ipc, to_ipc
from fabric_pipelines.records.task import task_batch, token_counts


def batch_of(seed: int, *, metadata: bool) -> pa.RecordBatch:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 40, 12)
    return task_batch(
        [draw.integers(0, 1000, length).tolist() for length in lengths],
        max_new_tokens=draw.integers(0, 1 << 32, 12).tolist(),
        source_rows=draw.integers(-(1 << 40), 1 << 40, 12).tolist(),
        metadata=[bytes(length) + b"m" if metadata else b"" for length in lengths],
    )


BATCHES = [read_ipc(to_ipc(batch_of(seed, metadata=seed != 1))) for seed in range(3)]
RUNS = st.tuples(st.integers(0, 2), st.integers(0, 11), st.integers(1, 12)).map(
    lambda run: (run[0], run[1], min(run[1] + run[2], 12))
)


@given(st.lists(RUNS, min_size=1, max_size=20))
def test_gathered_rows_are_those_that_arrow_concatenates(runs: list[tuple[int, int, int]]) -> None:
    memories = [TaskMemory(batch) for batch in BATCHES]
    expected = pa.concat_batches([BATCHES[at].slice(a, b - a) for at, a, b in runs])
    found = gathered([(memories[at], a, b) for at, a, b in runs], token_counts(expected))
    found.validate(full=True)
    assert found.equals(expected)


def test_rows_without_any_metadata_stay_without() -> None:
    memory = TaskMemory(BATCHES[1])
    found = gathered([(memory, 3, 4), (memory, 0, 2)], token_counts(BATCHES[1])[[3, 0, 1]])
    assert found.column("metadata").to_pylist() == [b"", b"", b""]
