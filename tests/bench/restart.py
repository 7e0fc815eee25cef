"""CPU seconds of a broker's restart, by how much log lies behind the newest checkpoint.

    PYTHONPATH=. python tests/bench/restart.py --folder /some/disk --before-mib 512 --behind-mib 256

Writes a journal of tasks (uint32 tokens, half of the submissions taken through lease, computed and retired), with
a checkpoint in the middle, kills it, and opens it again, with the page cache dropped for the journal's files.
Disk time is the difference between wall and CPU.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from fabric_pipelines.records.batch import Budget
from fabric_pipelines.records.task import task_batch
from tests.support_broker import ids_of, submission_of
from tests.support_broker_disk import DiskBench

ROWS = 1000
MIB = 1 << 20


def batch_of(draw: np.random.Generator, tokens_each: int) -> pa.RecordBatch:
    tokens = pa.array(draw.integers(0, 1000, ROWS * tokens_each, dtype=np.uint32))
    offsets = pa.array(np.arange(ROWS + 1, dtype=np.int32) * tokens_each)
    return task_batch(pa.ListArray.from_arrays(offsets, tokens), max_new_tokens=16)


def grow(bench: DiskBench, mark: int, size: int, tokens_each: int) -> int:
    """Submissions of one batch until so many bytes are in the log; the next free mark."""
    draw = np.random.default_rng(mark)
    until = bench.journal.bytes_used + size
    bench.attach()
    while bench.journal.bytes_used < until:
        batch = batch_of(draw, tokens_each)
        bench.submit(submission_of([batch], mark), [batch])
        if mark % 2:
            lease = bench.lease(budget=Budget(ROWS, 1 << 30, None))
            assert lease is not None
            bench.report(ids_of(lease))
            bench.retire(bench.pull())
        mark += 1
    return mark


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--before-mib", type=int, default=512)
    options.add_argument("--behind-mib", type=int, default=256)
    options.add_argument("--tokens", type=int, default=512, help="of each task")
    asked = options.parse_args()
    folder = asked.folder / "restart-journal"
    shutil.rmtree(folder, ignore_errors=True)
    bench = DiskBench(folder=folder, segment_bytes=256 * MIB, high_water=1 << 50)
    mark = grow(bench, 0, asked.before_mib * MIB, asked.tokens)
    begin_s = time.process_time()
    bench.checkpoint()
    taken_s = time.process_time() - begin_s
    grow(bench, mark, asked.behind_mib * MIB, asked.tokens)
    size = bench.owner.upkeep.newest.size  # type: ignore[union-attr]
    bench.disk._stopped = "killed"
    bench.close()
    wall_s, cpu_s = time.monotonic(), time.process_time()
    bench.owner = bench._open()
    wall_s, cpu_s = time.monotonic() - wall_s, time.process_time() - cpu_s
    print(  # noqa: T201
        f"log {bench.journal.bytes_used / MIB:.0f} MiB, {bench.owner.core.state.index.count} tasks, "
        f"checkpoint {size / MIB:.1f} MiB ({taken_s:.2f} s CPU to take and follow up), tail "
        f"{bench.owner.restored.tail_bytes / MIB:.0f} MiB: restart {cpu_s:.2f} s CPU, {wall_s:.2f} s wall"
    )
    bench.close()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
