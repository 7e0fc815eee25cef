"""A corpus that moves: clustered rows with lists of log-normal sizes, questions of their own, and two kinds of moves.

The database is played by arrays. A random move may be any row; a confined one takes a row of one hundredth of the
lists, and leaves it in one of them. Inserts are new rows of the same corpus, deletes any rows. Half of the moved rows go to near where they were (an edited text), half to near
another row, so that rows change within lists and between them. Nothing here is measured.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fabric_pipelines.dataplane.source import RowSet, Source, SourceRows
from fabric_pipelines.dataplane.staleness import NOTHING, Moved
from fabric_pipelines.shards.lists import nearest_list
from fabric_pipelines.shards.shard import Shard
from fabric_pipelines.testing.vector_store import MemoryVectorStore

KINDS = ("random", "confined", "inserts", "deletes")
DEFAULT_KINDS = KINDS[:2]
LATENT = 24
ROWS_PER_CENTRE = 250
EDIT = 0.2  # length of what an edit adds to a vector of length one
TRIES = 12

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


class ArrayStore(MemoryVectorStore):
    """The stand-in with rows in arrays, `names` their ids, ascending from 0. A dict holds no million."""

    def __init__(self, vectors: npt.NDArray[np.float16]) -> None:
        super().__init__()
        self.all = vectors
        self.names: Ids = np.arange(len(vectors))

    def fork(self) -> ArrayStore:
        """The same state, to be changed apart from this one."""
        return copy.deepcopy(self)

    def move(self, ids: Ids, vectors: Floats) -> None:
        self.all[self.at(ids)] = vectors
        self.changes.append(("update", ids))

    def insert(self, vectors: Floats) -> Ids:
        ids = self.names[-1] + 1 + np.arange(len(vectors))
        self.all = np.concatenate([self.all, vectors.astype(np.float16)])
        self.names = np.concatenate([self.names, ids])
        self.changes.append(("insert", ids))
        return ids

    def delete(self, ids: Ids) -> None:
        left = ~np.isin(self.names, ids)
        self.all, self.names = self.all[left], self.names[left]
        self.changes.append(("delete", ids))

    def at(self, ids: Ids) -> Ids:
        return np.searchsorted(self.names, ids).astype(np.int64)

    def _rows(self, source: Source, ids: Ids) -> RowSet:
        return RowSet(ids, self.all[self.at(ids)], {name: ids.copy() for name in source.columns})

    def read_source(self, source: Source) -> SourceRows:
        ids = self.names
        rows = RowSet(ids, self.all, {name: ids for name in source.columns})  # not a copy
        return SourceRows(self._state(source, rows), rows.ids, rows.vectors, rows.columns)

    def read_moved(self, name: str, generation: int, source: Source) -> Moved:
        complete, ops = self._movement(name)
        ids = np.unique(np.concatenate(list(ops.values())))
        rows = self._rows(source, ids[np.isin(ids, self.names)])
        none = self._rows(source, np.zeros(0, np.int64))
        state = self._state(source, none).with_content(NOTHING)
        return Moved(state, ids, rows, complete)


def corpus(rows: int, dim: int, rng: np.random.Generator) -> npt.NDArray[np.float16]:
    """Unit vectors around centres in LATENT dimensions, as embeddings lie: neighbours cross lists. How many rows a
    centre has is log-normal (sigma 1): a few hold much, most hold little."""
    centres = rng.standard_normal((max(2, rows // ROWS_PER_CENTRE), LATENT)).astype(np.float32)
    weights = rng.lognormal(0.0, 1.0, len(centres))
    spread = rng.standard_normal((LATENT, dim)).astype(np.float32)
    out = np.empty((rows, dim), np.float16)
    for start in range(0, rows, 50_000):
        stop = min(rows, start + 50_000)
        part = centres[rng.choice(len(centres), stop - start, p=weights / weights.sum())]
        part = part + 0.5 * rng.standard_normal(part.shape).astype(np.float32)
        part = part @ spread + rng.standard_normal((stop - start, dim)).astype(np.float32)
        out[start:stop] = part / np.linalg.norm(part, axis=1, keepdims=True)
    return out


@dataclass(frozen=True, slots=True)
class Moves:
    """ids ascending, vectors float32 of length one; `lists` they belong to before or after; `changed_list`: share of
    them whose nearest centroid is another than before."""

    ids: Ids
    vectors: Floats
    lists: Ids
    changed_list: float


def random_moves(store: ArrayStore, shard: Shard, count: int, rng: np.random.Generator) -> Moves:
    at = np.sort(rng.choice(len(store.all), count, replace=False)).astype(np.int64)
    goals = np.where(rng.random(count) < 0.5, at, rng.integers(0, len(store.all), count))
    vectors = edited(store.all[goals], EDIT, rng)
    return _moves(store, shard, store.names[at], vectors)


def inserted(store: ArrayStore, shard: Shard, vectors: Floats) -> Moves:
    """Insert `vectors`, drawn with the corpus."""
    ids = store.insert(vectors)
    return Moves(ids, vectors, np.unique(_list_of(vectors, shard)), 0.0)


def deleted(store: ArrayStore, shard: Shard, count: int, rng: np.random.Generator) -> Moves:
    """Delete any `count` rows; `vectors`: what they were."""
    at = np.sort(rng.choice(len(store.all), count, replace=False))
    ids, vectors = store.names[at], store.all[at].astype(np.float32)
    store.delete(ids)
    return Moves(ids, vectors, np.unique(_list_of(vectors, shard)), 0.0)


def confined_moves(
    store: ArrayStore,
    shard: Shard,
    count: int,
    rng: np.random.Generator,
    chosen: Ids | None = None,
) -> Moves:
    """`chosen` lists: by default one hundredth of them, drawn until they hold `count` to 1.5 times as many rows."""
    lists = hundredth(shard, count, rng) if chosen is None else chosen
    rows = np.concatenate([shard.list_rows(int(number))[1] for number in lists])
    ids = np.sort(rng.choice(rows, min(count, len(rows)), replace=False))
    goals = store.at(np.where(rng.random(len(ids)) < 0.5, ids, rng.choice(rows, len(ids))))
    vectors = edited(store.all[goals], EDIT, rng)
    length = EDIT
    for _ in range(TRIES):  # an edit that leads out of the lists is made smaller
        inside = np.isin(_list_of(vectors, shard), lists)
        if inside.all():
            return _moves(store, shard, ids, vectors)
        length /= 2
        vectors[~inside] = edited(store.all[goals[~inside]], length, rng)
    raise AssertionError(f"{(~inside).sum()} moved rows cannot be kept in their lists")


def hundredth(shard: Shard, count: int, rng: np.random.Generator) -> Ids:
    sizes = np.diff(shard.indptr)
    wanted = max(1, len(sizes) // 100)
    for _ in range(100_000):
        lists = rng.choice(len(sizes), wanted, replace=False)
        if count <= sizes[lists].sum() <= 1.5 * count:
            return np.sort(lists).astype(np.int64)
    raise AssertionError(f"no {wanted} lists hold {count} to {1.5 * count:.0f} rows")


def edited(rows: npt.NDArray[np.float16], length: float, rng: np.random.Generator) -> Floats:
    noise = rng.standard_normal(rows.shape).astype(np.float32) * (length / np.sqrt(rows.shape[1]))
    changed = rows.astype(np.float32) + noise
    unit: Floats = changed / np.linalg.norm(changed, axis=1, keepdims=True)
    return unit.astype(np.float16).astype(np.float32)  # as the database will give it back


def _moves(store: ArrayStore, shard: Shard, ids: Ids, vectors: Floats) -> Moves:
    before = _list_of(store.all[store.at(ids)].astype(np.float32), shard)
    after = _list_of(vectors, shard)
    return Moves(ids, vectors, np.union1d(before, after), float((before != after).mean()))


def _list_of(vectors: Floats, shard: Shard) -> Ids:
    return nearest_list(vectors, shard.centroids(), shard.manifest.metric)  # type: ignore[arg-type]
