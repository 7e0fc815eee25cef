"""What an increment costs beside a full build: bytes, CPU time and recall, for random and for confined moves.

    python tests/bench/rebuild.py [--rows 1000000] [--dim 384] [--lists 1000] [--moved 0.01]
        [--kind random|confined] [--json]

Rows are drawn around many centres, so that lists mean something. Random moves change rows anywhere; confined ones
change rows of one hundredth of the lists only. Both change the same number of rows, each to a row near where it
was (an edited text) or, with --far, to anywhere. The database is played by arrays: what is measured is the
shard, not the server. CPU time, because the machine is shared.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines import shards
from fabric_pipelines.dataplane.source import RowSet, Source, SourceRows
from fabric_pipelines.dataplane.staleness import NOTHING, Moved
from fabric_pipelines.shards import renewal
from fabric_pipelines.testing.vector_store import MemoryVectorStore

QUERIES, K, NPROBES = 200, 10, (1, 8, 32)
KINDS = ("random", "confined")
NAME = "bench"
LATENT = 24


class ArrayStore(MemoryVectorStore):
    """The stand-in with rows in arrays: ids are 0..n-1 and stay, vectors change. A dict holds no million."""

    def __init__(self, vectors: npt.NDArray[np.float16]) -> None:
        super().__init__()
        self.all = vectors

    def move(self, ids: npt.NDArray[np.int64], vectors: npt.NDArray[Any]) -> None:
        self.all[ids] = vectors
        self.changes.append(("update", ids))

    def _rows(self, source: Source, ids: npt.NDArray[np.int64]) -> RowSet:
        return RowSet(ids, self.all[ids], {name: ids.copy() for name in source.columns})

    def read_source(self, source: Source) -> SourceRows:
        rows = self._rows(source, np.arange(len(self.all)))
        return SourceRows(self._state(source, rows), rows.ids, rows.vectors, rows.columns)

    def read_moved(self, name: str, generation: int, source: Source) -> Moved:
        complete, ops = self._movement(name)
        rows = self._rows(source, ops["update"])
        none = self._rows(source, np.zeros(0, np.int64))
        state = self._state(source, none).with_content(NOTHING)
        return Moved(state, rows.ids, rows, complete)


def corpus(rows: int, dim: int, rng: np.random.Generator) -> npt.NDArray[np.float16]:
    """Unit vectors around rows / 250 centres in LATENT dimensions, as embeddings lie: neighbours cross lists."""
    centres = rng.standard_normal((max(2, rows // 250), LATENT)).astype(np.float32)
    spread = rng.standard_normal((LATENT, dim)).astype(np.float32)
    out = np.empty((rows, dim), np.float16)
    for start in range(0, rows, 50_000):
        stop = min(rows, start + 50_000)
        part = centres[rng.integers(0, len(centres), stop - start)]
        part = part + 0.5 * rng.standard_normal(part.shape).astype(np.float32)
        part = part @ spread + rng.standard_normal((stop - start, dim)).astype(np.float32)
        out[start:stop] = part / np.linalg.norm(part, axis=1, keepdims=True)
    return out


def moved_rows(
    store: ArrayStore, root: Path, share: float, kind: str, far: bool, rng: np.random.Generator
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    count = max(1, int(len(store.all) * share))
    if kind == "random":
        ids = rng.choice(len(store.all), count, replace=False)
    else:
        with shards.open_shard(store, root, NAME) as shard:
            lists = shard.manifest.lists
            chosen = rng.choice(lists, max(1, int(lists * 0.01)), replace=False)
            ids = np.concatenate([shard.list_rows(int(number))[1] for number in chosen])[:count]
    ids = np.sort(ids).astype(np.int64)
    to = store.all[rng.integers(0, len(store.all), len(ids)) if far else ids].astype(np.float32)
    to += 0.02 * rng.standard_normal(to.shape).astype(np.float32)
    return ids, to / np.linalg.norm(to, axis=1, keepdims=True)


def recalls(store: ArrayStore, root: Path) -> dict[str, float]:
    with shards.open_shard(store, root, NAME) as shard:
        asked = np.linspace(0, len(store.all) - 1, QUERIES).astype(np.int64)
        xq = store.all[asked].astype(np.float32)
        truth = shard.search(xq, K)
        return {
            str(nprobe): renewal.recall_at_k(
                shard.search(xq, K, exact=False, nprobe=nprobe).I, truth.I
            )
            for nprobe in NPROBES
        }


def one(options: argparse.Namespace, kind: str) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    folder = Path(tempfile.mkdtemp(prefix="fabric-bench-", dir=options.folder))
    try:
        store = ArrayStore(corpus(options.rows, options.dim, rng))
        spec = {"lists": options.lists, "seed": 1, "metric": "cosine", "recipe": {}}
        spec |= {"iterations": options.iterations}
        first = shards.build(store, folder, NAME, **spec)
        ids, to = moved_rows(store, folder, options.moved, kind, options.far, rng)
        store.move(ids, to)
        began = time.process_time()
        done = shards.refresh(store, folder, NAME)
        increment_s = time.process_time() - began
        after = recalls(store, folder)
        began = time.process_time()
        full = shards.build(store, folder, NAME, **spec)
        full_s = time.process_time() - began
        size = sum({e.path: e.bytes for e in full.manifest.files}.values())
        return {
            "moves": kind,
            "how": done.how,
            "why": done.why,
            "rows": options.rows,
            "moved": done.moved,
            "bytes_written": done.written,
            "bytes_full": size,
            "bytes_share": done.written / size,
            "files_linked": done.generation.linked,
            "files": len(first.manifest.files),
            "cpu_s": increment_s,
            "cpu_full_s": full_s,
            "cpu_share": increment_s / full_s,
            "recall_at_10": after,
            "recall_at_10_full": recalls(store, folder),
        }
    finally:
        shutil.rmtree(folder)


HEAD = (
    "| moves | how | rows moved | bytes written | of a full build | CPU-s | of a full build | "
    "recall@10 after / full, nprobe 1 | 8 | 32 |\n|---|---|---|---|---|---|---|---|---|---|\n"
)


def line(row: dict[str, Any]) -> str:
    recall = " | ".join(
        f"{row['recall_at_10'][str(n)]:.4f} / {row['recall_at_10_full'][str(n)]:.4f}"
        for n in NPROBES
    )
    return (
        f"| {row['moves']} | {row['how']} | {row['moved']:,} of {row['rows']:,} | "
        f"{row['bytes_written'] / 1e6:,.1f} MB | {row['bytes_share']:.2%} | {row['cpu_s']:,.1f} | "
        f"{row['cpu_share']:.1%} | {recall} |\n"
    )


def main(arguments: list[str]) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--lists", type=int, default=1000)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--moved", type=float, default=0.01)
    parser.add_argument("--kind", choices=KINDS, action="append", help="default: both")
    parser.add_argument("--far", action="store_true")
    parser.add_argument("--folder", help="where shards are written; default: the temp folder")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    found = []
    if not options.json:
        sys.stdout.write(HEAD)
    for kind in options.kind or KINDS:
        found.append(one(options, kind))
        if not options.json:  # as each is done: a million rows take a while
            sys.stdout.write(line(found[-1]))
            sys.stdout.flush()
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
