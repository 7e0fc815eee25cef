"""Speed is that of work which landed: tokens in and out are counted when the broker retired their tasks, and once."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from fabric_pipelines.completion.receive import Receiver
from fabric_pipelines.dataplane.writer import Landed
from fabric_pipelines.records.confirmation import Confirmation
from fabric_pipelines.testing.scripted_computed import ScriptedComputed
from tests.support_completions import pulled_batch

PROOF = {"cluster": "1", "xid": "2", "table": "t"}


class Shelf:
    """Lands everything: what is ok as a result, the rest as a dead letter."""

    def land(self, batch: pa.RecordBatch) -> Landed:
        ids = batch.column("task_id").to_numpy()
        good = np.array(batch.column("status").to_pylist()) == "ok"
        return Landed(
            ids[good],
            Confirmation("postgres", PROOF) if good.any() else None,
            ids[~good],
            np.zeros(int((~good).sum()), np.uint8),
            Confirmation("dead_letter", PROOF) if not good.all() else None,
            rows=len(ids),
            size=0,
        )

    def close(self) -> None:
        return None


def received(broker: ScriptedComputed) -> Receiver:
    loop = Receiver(broker.open, Shelf(), lambda *introduction: None)
    for _ in range(20):
        loop.step(wait_s=0)
        if not broker.open_ids and not loop.holds:
            break
    loop.close()
    return loop


def test_retired_tokens_are_those_of_results_and_not_of_dead_letters() -> None:
    died = {2: ("failed", "EngineFailed", "device lost"), 5: ("failed", "EngineFailed", "again")}
    texts = pulled_batch(30, function="generate", bad=died)
    vectors = pulled_batch(20, function="embed", first=100)
    counters = received(ScriptedComputed([texts, vectors])).counters
    rows = [row for row in texts.to_pylist() if row["status"] == "ok"]
    assert (counters.retired, counters.dead) == (48, 2)
    prompts = [row["prompt_tokens"] for row in [*rows, *vectors.to_pylist()]]
    assert counters.retired_prompt_tokens == sum(prompts)
    assert counters.retired_output_tokens == sum(len(row["output"]) for row in rows) > 0


def test_a_retirement_whose_answer_was_lost_is_not_counted_twice() -> None:
    broker = ScriptedComputed([pulled_batch(10, function="embed")], lose_retires=1)
    counters = received(broker).counters
    assert len(broker.retired) == 10
    assert counters.retired_prompt_tokens == counters.retired == 0
