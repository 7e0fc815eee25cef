"""The end of a lane goes by output: longest first, a small share of the lane only, and nothing is lost by it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fabric_pipelines.broker.packing import end_keys, is_end
from fabric_pipelines.records.batch import Budget
from fabric_pipelines.records.task import task_batch
from tests.support_broker import Bench, submission_of


@given(new=st.lists(st.integers(0, 5000), min_size=1, max_size=50), seed=st.integers(0, 9))
def test_end_keys_put_larger_powers_first_and_keep_prefix_order_within_one(
    new: list[int], seed: int
) -> None:
    keys = np.random.default_rng(seed).integers(0, 1 << 63, len(new), dtype=np.uint64)
    found = np.argsort(end_keys(np.array(new), keys), kind="stable").tolist()
    plainly = sorted(
        range(len(new)), key=lambda at: (-(max(new[at], 1) - 1).bit_length(), int(keys[at]) >> 6)
    )
    assert found == plainly


def test_the_end_is_twice_what_all_consumers_take_and_at_most_a_fiftieth() -> None:
    assert is_end(256, enqueued=1 << 20, sequences=32, consumers=4)
    assert not is_end(257, enqueued=1 << 20, sequences=32, consumers=4)
    assert not is_end(256, enqueued=1000, sequences=32, consumers=4)


def test_the_last_tasks_of_a_lane_go_longest_first_and_each_goes_once() -> None:
    bench, draw = Bench(), np.random.default_rng(9)
    caps = draw.integers(1, 500, 2000).tolist()
    prompts = [draw.integers(0, 1000, 40).tolist() for _ in caps]
    batch = task_batch(prompts, max_new_tokens=caps)
    bench.submit(submission_of([batch]), [batch])
    for name in ("a", "b"):
        bench.attach(name)
    rows: list[tuple[int, int]] = []
    while bench.counts().get("ready"):
        for name in ("a", "b"):
            lease = bench.lease(name, Budget(16, 1 << 20, None))
            rows += [
                (row["task_id"], (row["max_new_tokens"] - 1).bit_length())
                for row in (lease.tasks.to_pylist() if lease else ())
            ]
    assert len({task for task, _ in rows}) == len(rows) == 2000
    tail = [power for _, power in rows[-32:]]
    assert tail == sorted(tail, reverse=True)
    bench.crash()
    assert bench.owner.verify().differences == []
