"""What an increment costs beside a full build: bytes, time and recall, for random and for confined moves.

    python -m tests.bench.rebuild [--rows 1000000] [--dim 384] [--lists 1000] [--moved 0.01]
        [--kind random|confined|inserts|deletes] [--seeds 1] [--times 1] [--json]

One generation is built; for each kind of move 1 % of its rows change and it is refreshed. Beside it stand full builds
of the same rows: along the centroids of the increment, and with new centroids of each of `--seeds` seeds (the spread
between those is what training alone does to recall). Truth is a brute force over the rows; questions are held out, and
asked apart for rows that moved. `--times` lays that many increments one over the other and prints one line each, what
they leave for a search to read, and every tenth time a full build of the same rows. CPU time beside wall time, because
the machine is shared. Every generation gets its receipt, as `fabric receipt refresh` does it: what that takes, which is the
same after an increment and after a full build, is in a column of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines import receipts, shards
from fabric_pipelines.analytics.search import exact_topk, recall_at_k
from fabric_pipelines.shards.generation import Generation
from fabric_pipelines.shards.manifest import ShardManifest
from tests.bench import moving_corpus
from tests.bench.moving_corpus import DEFAULT_KINDS, EDIT, KINDS, ArrayStore, Floats, Moves

QUESTIONS, K, NPROBES = 2000, 10, (1, 2, 4, 8, 16, 32)
EVERY = 10
NAME = "bench"
OPEN_FILES = Path("/proc/self/fd")
BLOCKS = ("vectors", "ids", "columns")


class Asked:
    """Questions with their true neighbours among the rows of `store` as they are now."""

    def __init__(self, store: ArrayStore, held_out: Floats, moves: Moves | None) -> None:
        rng = np.random.default_rng(3)
        self.xq = {"rows": held_out}
        if moves is not None:
            self.xq["moved"] = moving_corpus.edited(
                moves.vectors[:: max(1, len(moves.ids) // len(held_out))], EDIT, rng
            )
        ids = store.names
        self.truth = {
            name: exact_topk(xq, store.all, ids, K, metric="cosine").I
            for name, xq in self.xq.items()
        }

    def recall(self, store: ArrayStore, root: Path) -> dict[str, dict[str, float]]:
        with shards.open_shard(store, root, NAME) as shard:
            return {
                name: {
                    str(nprobe): recall_at_k(
                        shard.search(xq, K, exact=False, nprobe=nprobe).I, self.truth[name]
                    )
                    for nprobe in NPROBES
                }
                for name, xq in self.xq.items()
            }


def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    wall, cpu = time.perf_counter(), time.process_time()
    done = work()
    return done, {"s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


def read_cost(store: ArrayStore, root: Path) -> dict[str, float]:
    """What lies under the rows that count: layers, pieces of a list, dead among stored rows; what opening takes."""
    held = len(list(OPEN_FILES.iterdir()))
    shard, opening = timed(lambda: shards.open_shard(store, root, NAME))
    with shard:
        increment = shard.manifest.increment
        pieces = [
            sum(len(ids) > 0 for _, ids in shard._pieces(number))
            for number in range(shard.manifest.lists)
        ]
        return {
            "layers": len(increment.layers) if increment else 0,
            "pieces_mean": float(np.mean(pieces)),
            "pieces_max": int(max(pieces)),
            "dead_share": 1 - shard.manifest.rows / shard.stored,
            "files": len({entry.path for entry in shard.manifest.files}),
            "open_cpu_s": opening["cpu_s"],
            "open_files": len(list(OPEN_FILES.iterdir())) - held,
        }


def lists_written(before: ShardManifest, after: ShardManifest) -> set[int]:
    """Lists of whose rows anything was written: those of new blocks, and those with rows in a new layer."""
    known = {entry.path for entry in before.files}
    new = [entry for entry in after.files if entry.path not in known]
    lists = {
        number
        for entry in new
        if entry.role in BLOCKS
        for number in range(entry.first_list, entry.first_list + entry.lists)
    }
    for entry in new:
        if entry.role == "layer_vectors":
            assert after.increment is not None
            lists |= set(np.flatnonzero(np.diff(after.increment.layers[entry.first_list])).tolist())
    return lists


def new_bytes(before: ShardManifest, after: ShardManifest) -> int:
    known = {entry.path for entry in before.files}
    return sum({e.path: e.bytes for e in after.files if e.path not in known}.values())


class Bench:
    """One first generation, and what is done with copies of it."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        rng = np.random.default_rng(7)
        count = max(1, int(options.rows * options.moved))
        fresh = count * options.times if "inserts" in (options.kind or ()) else 0
        drawn = moving_corpus.corpus(options.rows + QUESTIONS + fresh, options.dim, rng)
        self.held_out = drawn[options.rows :][:QUESTIONS].astype(np.float32)
        self.fresh = np.split(drawn[options.rows + QUESTIONS :].astype(np.float32), options.times)
        self.store = ArrayStore(drawn[: options.rows])
        self.first: Generation = self.build(self.store, folder / "first", 1)
        receipts.issue(self.store, folder / "first", NAME)

    def build(self, store: ArrayStore, root: Path, seed: int, keep: bool = False) -> Generation:
        return shards.build(
            store,
            root,
            NAME,
            lists=self.options.lists,
            seed=seed,
            metric="cosine",
            recipe={},
            iterations=self.options.iterations,
            lists_per_block=self.options.lists_per_block,
            keep_centroids=keep,
        )

    def copy(self, kind: str) -> tuple[ArrayStore, Path]:
        """Files of the first generation by link: they are never changed."""
        root = self.folder / kind
        shutil.copytree(self.folder / "first", root, copy_function=os.link)
        return self.store.fork(), root

    def _move(
        self,
        kind: str,
        store: ArrayStore,
        root: Path,
        count: int,
        rng: np.random.Generator,
        *,
        chosen: npt.NDArray[np.int64] | None = None,
        turn: int = 1,
    ) -> Moves:
        with shards.open_shard(store, root, NAME) as shard:
            if kind == "inserts":
                return moving_corpus.inserted(store, shard, self.fresh[turn - 1])
            if kind == "deletes":
                return moving_corpus.deleted(store, shard, count, rng)
            moves = (
                moving_corpus.random_moves(store, shard, count, rng)
                if kind == "random"
                else moving_corpus.confined_moves(store, shard, count, rng, chosen)
            )
        store.move(moves.ids, moves.vectors)
        return moves

    def one(self, kind: str) -> dict[str, Any]:
        store, root = self.copy(kind)
        count = max(1, int(self.options.rows * self.options.moved))
        moves = self._move(kind, store, root, count, np.random.default_rng(11))
        done, cost = timed(lambda: shards.refresh(store, root, NAME))
        _, receipt = timed(lambda: receipts.issue(store, root, NAME))
        manifest = done.generation.manifest
        written = lists_written(self.first.manifest, manifest)
        asked = Asked(store, self.held_out, moves)
        row = {
            "moves": kind,
            "how": done.how,
            "why": done.why,
            "rows": self.options.rows,
            "moved": done.moved,
            "lists": manifest.lists,
            "lists_per_block": manifest.lists_per_block,
            "lists_moved": len(moves.lists),
            "lists_written": len(written),
            "lists_written_and_unmoved": len(written - set(moves.lists.tolist())),
            "changed_list": moves.changed_list,
            "bytes_written": done.written,
            "files_linked": done.generation.linked,
            **cost,
            "receipt_cpu_s": receipt["cpu_s"],
            **read_cost(store, root),
            "recall_at_10": asked.recall(store, root),
        }
        shutil.rmtree(root / NAME / self.first.folder.name)
        full: dict[str, Any] = {}
        for name, seed, keep in self._full_builds():
            made, full_cost = timed(lambda s=seed, k=keep: self.build(store, root, s, k))
            _, receipt = timed(lambda: receipts.issue(store, root, NAME))
            size = sum({e.path: e.bytes for e in made.manifest.files}.values())
            full[name] = {
                **full_cost,
                "receipt_cpu_s": receipt["cpu_s"],
                "bytes": size,
                "bytes_written": new_bytes(self.first.manifest, made.manifest),
                "recall_at_10": asked.recall(store, root),
            }
            for older in (root / NAME).glob("g*"):
                if older != made.folder:
                    shutil.rmtree(older)
        shutil.rmtree(root)
        trained = full["seed 1"]
        row["full"] = full
        row["bytes_share"] = row["bytes_written"] / trained["bytes"]
        row["time_share"], row["cpu_share"] = (row[n] / trained[n] for n in ("s", "cpu_s"))
        return row

    def _full_builds(self) -> Iterator[tuple[str, int, bool]]:
        yield "same centroids", 1, True
        for seed in range(1, self.options.seeds + 1):
            yield f"seed {seed}", seed, False

    def many(self, kind: str) -> Iterator[dict[str, Any]]:
        """Increments one over the other; every tenth time with a full build of the same rows beside it. Confined
        moves are in the same lists each time."""
        store, root = self.copy(kind)
        count = max(1, int(self.options.rows * self.options.moved))
        rng = np.random.default_rng(11)
        chosen = self._hot(count, rng) if kind == "confined" else None
        for turn in range(1, self.options.times + 1):
            self._move(kind, store, root, count, rng, chosen=chosen, turn=turn)
            done, cost = timed(lambda: shards.refresh(store, root, NAME))
            row = {"moves": kind, "turn": turn, "how": done.how, "why": done.why, **cost}
            measured = turn == 1 or turn % EVERY == 0
            yield {**row, **self._state(store, root, done.written, measured)}
            for older in (root / NAME).glob("g*"):
                if older != done.generation.folder:
                    shutil.rmtree(older)
            if measured:
                beside, apart = store.fork(), self.folder / "beside"
                made, cost = timed(lambda: self.build(beside, apart, 1))  # noqa: B023
                row |= {"how": "full build beside it", "why": "", **cost}
                size = sum({e.path: e.bytes for e in made.manifest.files}.values())
                yield {**row, **self._state(beside, apart, size, True)}
                shutil.rmtree(apart)
        shutil.rmtree(root)

    def _hot(self, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        with shards.open_shard(self.store, self.folder / "first", NAME) as shard:
            return moving_corpus.hundredth(shard, count, rng)

    def _state(self, store: ArrayStore, root: Path, written: int, measured: bool) -> dict[str, Any]:
        size = sum({e.path: e.bytes for e in self.first.manifest.files}.values())
        found: dict[str, Any] = {"bytes_share": written / size, **read_cost(store, root)}
        if measured:
            with shards.open_shard(store, root, NAME) as shard:
                _, search = timed(lambda: shard.search(self.held_out, K, exact=False))
            found["search_cpu_s"] = search["cpu_s"]
            found["recall_at_10"] = Asked(store, self.held_out, None).recall(store, root)["rows"]
        return found


def table(row: dict[str, Any]) -> str:
    """Two tables: what it cost, and what is found."""
    trained = row["full"]["seed 1"]
    lines = [
        f"{row['moves']} moves: {row['moved']:,} of {row['rows']:,} rows in {row['lists_moved']} of "
        f"{row['lists']} lists, {row['changed_list']:.0%} to another list",
        "| how | lists written | bytes written | of a full build | s | of a full build | CPU-s | of a full build "
        "| receipt, CPU-s |",
        "|---|---|---|---|---|---|---|---|---|",
        f"| {row['how']} {row['why']} | {row['lists_written']} | {row['bytes_written'] / 1e6:,.1f} MB | "
        f"{row['bytes_share']:.2%} | {row['s']:.1f} | {row['time_share']:.1%} | {row['cpu_s']:.1f} | "
        f"{row['cpu_share']:.1%} | {row['receipt_cpu_s']:.1f} |",
        *(
            f"| full, {name} | {row['lists']} | {full['bytes_written'] / 1e6:,.1f} MB | "
            f"{full['bytes_written'] / trained['bytes']:.2%} | {full['s']:.1f} | | {full['cpu_s']:.1f} | "
            f"| {full['receipt_cpu_s']:.1f} |"
            for name, full in row["full"].items()
        ),
        "",
        f"{row['files']} files of {row['lists_per_block']} lists a block, {row['open_files']} held open by a reader, "
        f"{row['open_cpu_s'] * 1e3:.0f} ms of CPU to open",
        "",
        "| recall@10, nprobe | " + " | ".join(map(str, NPROBES)) + " |",
        "|---" * (len(NPROBES) + 1) + "|",
    ]
    for asked in row["recall_at_10"]:
        for name, found in {row["how"]: row, **row["full"]}.items():
            lines.append(f"| {asked}: {name} | {_numbers(found['recall_at_10'][asked])} |")
        gaps = {
            str(n): row["recall_at_10"][asked][str(n)] - trained["recall_at_10"][asked][str(n)]
            for n in NPROBES
        }
        lines.append(f"| {asked}: {row['how']} minus seed 1 | {_numbers(gaps, '+')} |")
    return "\n".join(lines) + "\n\n"


def _numbers(recall: dict[str, float], sign: str = "") -> str:
    return " | ".join(f"{recall[str(n)]:{sign}.4f}" for n in NPROBES)


MANY = (
    "| moves | turn | how | bytes of a full build | layers | pieces of a list, mean | max | dead of stored | files | "
    "CPU-s | CPU-s of 2,000 questions | recall@10, nprobe 1 | 8 | 32 |\n" + "|---" * 14 + "|\n"
)


def line(row: dict[str, Any]) -> str:
    how = f"{row['how']}: {row['why']}" if row["why"] else row["how"]
    measured = " | | | |"
    if "recall_at_10" in row:
        recall = " | ".join(f"{row['recall_at_10'][str(n)]:.4f}" for n in (1, 8, 32))
        measured = f" {row['search_cpu_s']:.2f} | {recall} |"
    return (
        f"| {row['moves']} | {row['turn']} | {how} | {row['bytes_share']:.2%} | {row['layers']} | "
        f"{row['pieces_mean']:.1f} | {row['pieces_max']} | {row['dead_share']:.1%} | {row['files']} | "
        f"{row['cpu_s']:.1f} |{measured}\n"
    )


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    found = []
    bench = Bench(options, folder)
    for kind in options.kind or DEFAULT_KINDS:
        rows = bench.many(kind) if options.times > 1 else iter([bench.one(kind)])
        for row in rows:
            found.append(row)
            if not options.json:  # as each is done: a million rows take a while
                sys.stdout.write(line(row) if options.times > 1 else table(row))
                sys.stdout.flush()
    return found


def main(arguments: list[str]) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--lists", type=int, default=1000)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--lists-per-block", type=int, default=16)
    parser.add_argument("--moved", type=float, default=0.01)
    parser.add_argument(
        "--kind", choices=KINDS, action="append", help="default: random and confined"
    )
    parser.add_argument("--seeds", type=int, default=1, help="full builds with so many trainings")
    parser.add_argument("--times", type=int, default=1, help="increments one over the other")
    parser.add_argument("--folder", help="where shards are written; default: the temp folder")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="fabric-bench-", dir=options.folder))
    if not options.json and options.times > 1:
        sys.stdout.write(MANY)
    try:
        found = measure(options, folder)
    finally:
        shutil.rmtree(folder)
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
