"""Builders, pruners and readers of one shard at once, on a real Postgres: who is in the way is refused, nothing is torn."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from fabric_pipelines import receipts, shards
from fabric_pipelines.dataplane import vectors
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.errors import AlreadyRunning, CorruptionFound, UsageError
from tests.services.test_shards import ROWS, build, land

BUILDS = 4
ROUNDS_MAX = 400
PAUSE_S = 0.05


def refused(act: Callable[[], object], *kinds: type[Exception]) -> str:
    """Why `act` was refused, nothing if it was not."""
    try:
        act()
    except kinds as fault:
        return str(fault)
    return ""


def test_publication_pruning_and_readers_at_once_tear_nothing(
    database: Database, tmp_path: Path
) -> None:
    land(database)
    build(database, tmp_path)
    over = threading.Event()

    def prune_once() -> None:
        shards.prune(database, tmp_path, "corpus", keep=1)

    def prune() -> None:
        for _ in range(ROUNDS_MAX):
            refused(prune_once, AlreadyRunning)
            if over.wait(PAUSE_S):
                return

    def look(number: int) -> None:
        """It is whole from the first look to the last, whatever is published and pruned meanwhile."""
        with shards.open_shard(database, tmp_path, "corpus", number) as shard:
            found = shard.search(np.ones((1, shard.manifest.dim)), 3)
            assert found.I.min() >= 0
            assert len(shard.columns()) == shard.manifest.rows

    def read() -> tuple[int, set[str]]:
        whys = []
        for turn in range(ROUNDS_MAX):
            number = max(1, vectors.last_generation(database, "corpus") - turn % 3)
            whys.append(refused(partial(look, number), UsageError, CorruptionFound))
            if over.is_set():
                break
        return whys.count(""), {why for why in whys if why and "pruned" not in why}

    with ThreadPoolExecutor(2) as pool:
        pruner, reader = pool.submit(prune), pool.submit(read)
        try:
            for number in range(BUILDS):
                land(database, first=ROWS + number, rows=1)
                step = partial(shards.refresh, database, tmp_path, "corpus", anew=number % 2 == 0)
                while refused(step, AlreadyRunning):
                    over.wait(PAUSE_S / 5)
        finally:
            over.set()
        pruner.result()
        read_whole, other_refusals = reader.result()
    assert read_whole > 0
    assert other_refusals == set()
    shards.prune(database, tmp_path, "corpus", keep=1)
    kept = [row.generation for row in vectors.published(database, "corpus") if not row.pruned]
    assert kept == [BUILDS, BUILDS + 1], "an increment, and what it was laid over"
    assert all(shards.scrub(database, tmp_path, "corpus", number).ok for number in kept)
    receipt = receipts.issue(database, tmp_path, "corpus")
    assert receipts.verify(database, tmp_path, receipt.receipt_id).ok
    folders = [path.name for path in (tmp_path / "corpus").iterdir() if path.is_dir()]
    assert len(folders) == len(kept)
