"""CPU of the broker's owner by operation, without sockets: what one core can do at most.

    PYTHONPATH=. python tests/bench/owner_costs.py --folder /some/disk --tasks 40000 --tokens 256

Thread time of one call: median, and the least of all, which is what a quiet machine would take. Prompts are random,
so that a lease in prefix order takes its rows from everywhere: the worst case of the gather. Half of the tasks are
leased in a row, the others each followed by its payload and report, which empty the caches.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa

from fabric_pipelines.broker.core import Limits
from fabric_pipelines.broker.owner import Owner, TaskUpload
from fabric_pipelines.broker.state import BatchColumns
from fabric_pipelines.journal import Journal
from fabric_pipelines.records.arrow import to_ipc
from fabric_pipelines.records.batch import Budget
from fabric_pipelines.records.task import task_batch
from tests.support_broker import ENGINE, LANDED, PROFILE, completions, ids_of, submission_of

BATCH, LEASE = 1000, 256


class Costs:
    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.tasks: dict[str, int] = {}

    @contextmanager
    def of(self, name: str, tasks: int) -> Iterator[None]:
        begin = time.thread_time()
        yield
        self.seconds[name].append(time.thread_time() - begin)
        self.tasks[name] = tasks

    def lines(self) -> Iterator[str]:
        for name, seconds in self.seconds.items():
            ordered = sorted(seconds)
            middle, least = ordered[len(ordered) // 2], ordered[0]
            each = middle / self.tasks[name]
            yield (
                f"{name:<34} {middle * 1e6:8.0f} us  least {least * 1e6:7.0f} us  "
                f"{each * 1e6:6.2f} us/task  {1 / each:12,.0f} tasks/s"
            )


def batches_of(tasks: int, tokens: int) -> list[pa.RecordBatch]:
    draw = np.random.default_rng(1)
    offsets = pa.array(np.arange(BATCH + 1, dtype=np.int32) * tokens)
    return [
        task_batch(
            pa.ListArray.from_arrays(
                offsets, pa.array(draw.integers(0, 1000, BATCH * tokens, np.uint32))
            ),
            max_new_tokens=16,
        )
        for _ in range(tasks // BATCH)
    ]


def enqueue(owner: Owner, batches: list[pa.RecordBatch], costs: Costs) -> None:
    header = submission_of(batches, 1)
    owner.open_submission(header)
    for at, batch in enumerate(batches):
        with costs.of("enqueue: columns, prefix keys", BATCH):
            columns = BatchColumns.of(header, batch)
        with costs.of("enqueue: owner", BATCH):
            owner.enqueue(TaskUpload(header.submission_id, at * BATCH, batch, columns))
        with costs.of("enqueue: write and sync", BATCH):
            owner.commit()
    owner.close_submission(header.submission_id)


def lease_and_report(owner: Owner, costs: Costs) -> None:
    owner.attach("w", ENGINE, "fingerprint", "cpu:0", PROFILE, [])
    budget, call = Budget(LEASE, 1 << 40, None), 0
    taken = []
    while owner.core.state.engine_ready.sum() >= owner.core.state.index.count // 2:
        with costs.of("lease: decision and log, in a row", LEASE):
            facts, grant = owner.core.lease("w", budget, owner.clock.monotonic_s(), call)
            owner._log(facts)
        assert grant is not None
        taken.append(grant)
        call += 1
    owner.commit()
    for grant in taken:
        outcome = completions(ids_of(owner.payloads.lease(grant, 0)))
        owner.computed("w", outcome, to_ipc(outcome))
    while owner.core.state.engine_ready.sum() >= LEASE:
        with costs.of("lease: decision and log", LEASE):
            facts, grant = owner.core.lease("w", budget, owner.clock.monotonic_s(), call)
            owner._log(facts)
        assert grant is not None
        with costs.of("lease: payload", LEASE):
            lease = owner.payloads.lease(grant, 0)
        outcome = completions(ids_of(lease))
        ipc = to_ipc(outcome)
        with costs.of("computed: owner", LEASE):
            owner.computed("w", outcome, ipc)
        owner.commit()
        call += 1


def retire(owner: Owner, costs: Costs) -> None:
    """In the order of pulling; half in the batches of the cycle, the rest in large ones."""
    for rows in (LEASE, 4096):
        done, limit = 0, owner.core.state.index.count // 2
        while done < limit:
            with costs.of(f"pull {rows}", rows):
                pulled = owner.pull("c", rows)
            if pulled is None:
                return
            ids = pulled.column("task_id").to_numpy()
            with costs.of(f"retire {rows}: owner", rows):
                owner.settle(ids, LANDED, dead=False)
            with costs.of(f"retire {rows}: write and sync", rows):
                owner.commit()
            done += len(ids)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--tasks", type=int, default=40_000)
    options.add_argument("--tokens", type=int, default=256)
    asked = options.parse_args()
    folder, costs = asked.folder / "owner-costs-journal", Costs()
    shutil.rmtree(folder, ignore_errors=True)
    with Journal.open(folder, segment_bytes=256 << 20) as journal:
        owner = Owner(journal, Limits())
        enqueue(owner, batches_of(asked.tasks, asked.tokens), costs)
        lease_and_report(owner, costs)
        retire(owner, costs)
    shutil.rmtree(folder)
    sys.stdout.write("\n".join(costs.lines()) + "\n")


if __name__ == "__main__":
    main()
