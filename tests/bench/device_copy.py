"""A shard on a card: how fast it is loaded beside what the bus gives, and how fast it is searched beside the CPU.

    python -m tests.bench.device_copy [--rows 1000000] [--dim 384] [--lists 256] [--json PATH] [--stand-in]

The copy's limit is measured in the same run from the same kind of pinned buffers: host to device alone, and both
ways at once, which is what a load does (it reads back what it sent and hashes that). The hash alone, over the same maps
with the same threads, is the other limit. Files are in the page cache. Rounds alternate between limits and loads. Search is exact,
k = 10; answers of card and CPU are compared bit for bit, and a difference ends the run with exit code 1. A peer
(torch: one product, one topk, not exact) is measured when it is installed. --stand-in runs all of it without a card, for the
script's own sake: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines import receipts, shards
from fabric_pipelines.analytics.resident import QUERY_TILE, ROW_TILE
from fabric_pipelines.analytics.search import Ranked, recall_at_k
from fabric_pipelines.device.card import Card
from fabric_pipelines.device.gpu import Gpu
from fabric_pipelines.shards.device_copy import DTYPES, DeviceCopy
from fabric_pipelines.shards.residence import Residence
from fabric_pipelines.testing.standin_card import StandInCard
from tests.bench.moving_corpus import ArrayStore, corpus

NAME, K, ROUNDS = "bench", 10, 3
BUFFER_BYTES, COPIES = 32 << 20, 64
BATCHES = (1, 32, 512, 4096)
CPU_QUERIES = 64


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    done = work()
    return time.perf_counter() - began, done


def seconds(work: Callable[[], object]) -> float:
    return timed(work)[0]


def spread(rounds: list[float]) -> str:
    middle = statistics.median(rounds)
    return f"{middle:>9.2f}{(max(rounds) - min(rounds)) / middle:>9.1%}"


def bus(card: Card, both_ways: bool, copies: int) -> float:
    """GB/s host to device; with both ways, each direction moves that much."""
    target = card.empty((2, BUFFER_BYTES), np.uint8)
    down, up = card.channel(2, BUFFER_BYTES), card.channel(2, BUFFER_BYTES)

    def work() -> None:
        for number in range(copies):
            down.send(number % 2, BUFFER_BYTES, target, 0)
            if both_ways:
                up.read_back(number % 2, BUFFER_BYTES, target, BUFFER_BYTES)
        for channel in (down, up):
            channel.wait(0)
            channel.wait(1)

    work()
    return copies * BUFFER_BYTES / seconds(work) / 1e9


def hashed(shard: shards.Shard, threads: int) -> float:
    """Seconds of sha256 alone over every block, files spread over threads."""
    parts = [array for block in shard.blocks for array in (block.vectors, block.ids)]
    with ThreadPoolExecutor(threads) as pool:
        return seconds(lambda: list(pool.map(lambda a: hashlib.sha256(a).digest(), parts)))


def loads(
    card: Card, residence: Residence, shard: shards.Shard, copies: int
) -> list[dict[str, Any]]:
    size = sum(block.vectors.nbytes + block.ids.nbytes for block in shard.blocks)
    threads = sorted({1, 2, 4, 8, min(16, os.cpu_count() or 1)})
    measured: dict[str, list[float]] = {}

    def note(what: str, value: float) -> None:
        measured.setdefault(what, []).append(value)

    DeviceCopy(card, shard).release()  # loads cubins, faults pages in
    for _ in range(ROUNDS):
        note("bus, host to device, GB/s", bus(card, False, copies))
        note("bus, both ways at once, GB/s each", bus(card, True, copies))
        for count in threads:
            note(f"sha256 alone, {count} threads, GB/s", size / hashed(shard, count) / 1e9)
            for dtype in DTYPES:
                took, copy = timed(partial(DeviceCopy, card, shard, dtype=dtype, readers=count))
                copy.release()
                note(f"copy as {dtype}, {count} readers, s", took)
                note(f"copy as {dtype}, {count} readers, GB/s of file", size / took / 1e9)
        for dtype in DTYPES:
            took, there = timed(partial(residence.open, dtype=dtype))
            there.close()
            note(f"open as {dtype} (files, copy, canaries, row), s", took)
    return [line(what, rounds) for what, rounds in measured.items()]


def queries(vectors: npt.NDArray[np.float16], count: int) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(11)
    near = vectors[rng.integers(0, len(vectors), count)].astype(np.float32)
    return near + np.float32(0.02) * rng.standard_normal(near.shape).astype(np.float32)


def products_alone(card: Card, copy: DeviceCopy) -> float:
    """Queries a second if nothing but the matrix products of a full batch were done."""
    rows = copy.rows
    xq = card.empty((QUERY_TILE, rows.shape[1]), rows.dtype)
    card.fill(xq, 0x3C)  # float16 1.05; float32 0.01: any number will do
    out = card.empty((QUERY_TILE, min(ROW_TILE, len(rows))), np.float32)

    def work() -> None:
        for first in range(0, len(rows), ROW_TILE):
            part = rows[first : first + ROW_TILE]
            card.products(xq, part, out)
            if rows.dtype.itemsize == 2:
                card.products(xq, part, out, add=True)
        card.download(out[:1, :1])  # waits

    work()
    return QUERY_TILE / min(seconds(work) for _ in range(ROUNDS))


def searches(
    card: Card, residence: Residence, xq: npt.NDArray[np.float32], truth: Ranked
) -> Iterator[dict[str, Any]]:
    for dtype in DTYPES:
        with residence.open(dtype=dtype) as shard:
            found = shard.search(xq[:CPU_QUERIES], K)
            if found.I.tobytes() != truth.I.tobytes() or found.D.tobytes() != truth.D.tobytes():
                sys.exit(f"the card's answers as {dtype} are not those of the CPU")
            before = shard.answered_by_cpu
            for batch in BATCHES:
                part = xq[:batch]
                took = [seconds(partial(shard.search, part, K)) for _ in range(ROUNDS)]
                yield line(f"card, {dtype}, batches of {batch}", [batch / one for one in took])
            assert shard.copy is not None
            yield line(f"card, {dtype}, matrix products alone", [products_alone(card, shard.copy)])
            yield line(f"card, {dtype}, answered from the maps", [shard.answered_by_cpu - before])


def line(what: str, rounds: list[float]) -> dict[str, Any]:
    return {"what": what, "median": statistics.median(rounds), "rounds": rounds}


def peer(
    shard: shards.Shard, xq: npt.NDArray[np.float32], truth: Ranked
) -> Iterator[dict[str, Any]]:
    try:
        import torch
    except ImportError:
        return
    if not torch.cuda.is_available():
        return
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = torch.from_numpy(shard.vectors().copy()).cuda()
    rows /= rows.norm(dim=1, keepdim=True)
    ids = torch.from_numpy(shard.ids().copy()).cuda()
    asked = torch.from_numpy(xq[:QUERY_TILE]).cuda()

    def work() -> Any:
        found = ids[(asked @ rows.T).topk(K, dim=1).indices]
        return found.cpu().numpy()

    recall = recall_at_k(work()[:CPU_QUERIES], truth.I)
    took = [seconds(work) for _ in range(ROUNDS)]
    yield line("torch product + topk, float32, batches of 512", [QUERY_TILE / one for one in took])
    yield line("torch: recall@10 against the exact answers", [recall])


def measure(options: argparse.Namespace, card: Card, root: Path) -> dict[str, Any]:
    vectors = corpus(options.rows, options.dim, np.random.default_rng(7))
    store = ArrayStore(vectors)
    took = seconds(
        lambda: shards.build(
            store, root, NAME, lists=options.lists, seed=1, metric="cosine", recipe={},
            iterations=2, lists_per_block=4,
        )
    )  # fmt: skip
    receipts.issue(store, root, NAME, quality={})
    sys.stdout.write(f"built {options.rows:,} x {options.dim} in {took:.0f} s\n")
    xq = queries(vectors, BATCHES[-1])
    lines: list[dict[str, Any]] = []

    def show(found: dict[str, Any]) -> None:
        lines.append(found)
        sys.stdout.write(
            f"{found['what']:<58}{spread(found['rounds']) if found['median'] else '0'}\n"
        )
        sys.stdout.flush()

    with (
        Residence(store, root, NAME, card) as residence,
        shards.open_shard(store, root, NAME) as mapped,
    ):
        for found in loads(card, residence, mapped, 2 if options.stand_in else COPIES):
            show(found)
        ask = partial(mapped.search, xq[:CPU_QUERIES], K)
        truth = ask()
        one = [CPU_QUERIES / seconds(ask) for _ in range(ROUNDS)]
        show(line(f"CPU, batches of {CPU_QUERIES}, queries/s", one))
        for found in searches(card, residence, xq, truth):
            show(found)
        for found in peer(mapped, xq, truth):
            show(found)
    return {"rows": options.rows, "dim": options.dim, "cpus": os.cpu_count(), "lines": lines}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.device_copy")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--lists", type=int, default=256)
    parser.add_argument("--folder", type=Path, help="where the shard is built; default: temporary")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--stand-in", action="store_true")
    options = parser.parse_args()
    card: Card = StandInCard(1 << 34) if options.stand_in else Gpu()
    sys.stdout.write(f"{card.name}, {os.cpu_count()} CPUs\n{'':<58}{'median':>9}{'spread':>9}\n")
    with tempfile.TemporaryDirectory(prefix="fabric-bench-", dir=options.folder) as folder:
        report = measure(options, card, Path(folder))
    if isinstance(card, Gpu):
        report["device"] = card.identity.as_json()
    card.close()
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
