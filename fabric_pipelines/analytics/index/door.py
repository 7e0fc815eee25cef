"""VectorIndex: one door to exact, inverted-file and lattice search over rows with stable int64 ids.

Every kind proposes candidates by its own scan; what is answered is ranked from the stored float32 rows in float64,
ties to the lower id, so that distances mean the same whatever the kind, and an answer has the same bytes on any
number of threads. Exact search proposes every row that could belong to the answer; the others leave rows out, how
many is measured against exact search on every training and kept. The metric is part of the index and of its type.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics.index import quality, saved
from fabric_pipelines.analytics.index.card_places import Proposed
from fabric_pipelines.analytics.index.coarse import Coarse, capacity_of, place, train
from fabric_pipelines.analytics.index.cuvs_lists import CuvsLists
from fabric_pipelines.analytics.index.faiss_lists import FaissLists
from fabric_pipelines.analytics.index.kinds import (
    REMEDIES,
    Cagra,
    Exact,
    Faiss,
    IvfPq,
    Kind,
    Lattice,
    Theirs,
    check,
    choices_of,
    kind_of,
)
from fabric_pipelines.analytics.index.lattice import CodeLists
from fabric_pipelines.analytics.index.lists import FloatLists
from fabric_pipelines.analytics.index.quality import Quality, RecallShort
from fabric_pipelines.analytics.index.space import Answer, Asked, Space, distances_of, ranked
from fabric_pipelines.analytics.index.store import F64, Rows
from fabric_pipelines.analytics.index.traffic import Firsts, Watch
from fabric_pipelines.analytics.search import Floats, Ids, Metric
from fabric_pipelines.analytics.threads import ONE_THREAD
from fabric_pipelines.errors import CorruptionFound, UsageError

if TYPE_CHECKING:
    from fabric_pipelines.analytics.index.on_card import CardScans

BLOCK_ROWS = 4096  # of the exact kind's lists: rows by slot
NPROBE, RERANK = 8, 8  # until recall was measured; rerank in multiples of k
CUVS_FILE = "index.cuvs"  # cuVS's own bytes
DEAD_MAX = 0.5  # share of slots under a tombstone above which the store is compacted

M = TypeVar("M", bound=Metric)
TheirLists = FaissLists | CuvsLists  # of kinds that are Theirs: they hold on to dead rows
Backend = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Stats:
    """rows: those that count, unscorable ones (NaN, infinite, no direction) included. largest: rows of the largest
    list over the mean. row_bytes: stored rows; scan_bytes: what scans read."""

    kind: str
    metric: Metric
    dim: int
    rows: int
    unscorable: int
    tombstones: int
    lists: int
    largest: float
    row_bytes: int
    scan_bytes: int
    quality: Quality | None
    where: str  # "cpu", or the card's name


class VectorIndex(Generic[M]):
    """An index in memory. Not for calls from two threads at once, of which one changes it.

    backend "cuda" scans on a card, where the same answer comes from, to the last bit (on_card.py)."""

    def __init__(
        self,
        dim: int,
        *,
        kind: Kind,
        metric: M,
        seed: int = 0,
        backend: Backend = "cpu",
    ) -> None:
        check(dim, kind, metric)
        self.dim, self.kind, self.metric, self.seed = dim, kind, metric, seed
        self.quality: Quality | None = None
        self._rows = Rows(dim, metric)
        self._space = Space(metric, np.zeros(dim))
        self._coarse: Coarse | None = None
        self._lists: FloatLists | CodeLists | TheirLists = FloatLists(self._space, 0)
        self._list_of: Ids = np.empty(0, np.int64)  # of each slot; -1: in none
        self._card: CardScans | None = None
        self.asked = self.left = 0  # queries since a card was taken; those it left to the CPU
        self.use(backend)

    @classmethod
    def build(
        cls,
        vectors: Floats,
        ids: npt.NDArray[Any],
        *,
        kind: Kind,
        metric: M,
        seed: int = 0,
        backend: Backend = "cpu",
    ) -> VectorIndex[M]:
        """Of rows [n, d] named ids [n]; of an id that comes twice the last row counts."""
        if vectors.ndim != 2:
            raise UsageError(f"rows have {vectors.ndim} axes; they must be [n, d]")
        index = cls(
            vectors.shape[1],
            kind=kind,
            metric=metric,
            seed=seed,
            backend=backend,
        )
        index._rows.upsert(*index._rows.checked(vectors, ids))
        index.train()
        return index

    def __len__(self) -> int:
        return len(self._rows)

    def use(self, backend: Backend) -> None:
        """Scan on the CPU from now on, or on the machine's first card. Raises DeviceRefused for "cuda" with
        kind faiss, and without a card that the shipped kernels run on; MissingDependency without CuPy."""
        if backend not in ("cpu", "cuda"):
            raise UsageError(f"backend {backend!r} is unknown; it must be 'cpu' or 'cuda'")
        fresh = None
        if backend == "cuda":
            # here and not above: it imports what imports this, and the CPU needs none of it
            from fabric_pipelines.analytics.index.on_card import opened

            fresh = opened(self.kind.name)
        self.close()
        self._card, self.asked, self.left = fresh, 0, 0

    def close(self) -> None:
        """Give a card back, if there is one; searches go on on the CPU."""
        if self._card is not None:
            self._card.close()
            self._card = None

    def train(self) -> None:
        """Cut the lists anew from the rows that are there, and measure recall."""
        self._rows.compact()
        slots = np.sort(self._scorable_live())
        vectors = self._rows.vectors
        self._space = Space.around(vectors[slots], self.metric)
        self._coarse = None
        self._list_of = np.full(self._rows.count, -1, np.int64)
        self._lists = FloatLists(self._space, 0)
        if len(slots):
            self._first(slots)
        self.measure()

    def add(self, vectors: Floats, ids: npt.NDArray[Any]) -> int:
        """Insert rows [n, d], or replace those whose id is there; returns how many ids are new. Lists stay as they
        were cut; an index that has none cuts them from these rows."""
        rows, names = self._rows.checked(vectors, ids)
        before = len(self._rows)
        slots, dead = self._rows.upsert(rows, names)
        self._bury(dead)
        self._list_of = np.append(self._list_of, np.full(len(slots), -1, np.int64))
        good = slots[self._rows.scorable[slots]]
        if len(good) and not len(self._lists):
            self._space = Space.around(self._rows.vectors[good], self.metric)
            self._first(good)
        elif len(good):
            working, reach = self._working(good)
            self._append(good, working, reach, self._nearest_list(good, working))
        self._tidy()
        return len(self._rows) - before

    def remove(self, ids: npt.NDArray[Any]) -> int:
        """Take rows out; returns how many were there."""
        dead = self._rows.remove(np.asarray(ids, np.int64))
        self._bury(dead)
        self._tidy()
        return len(dead)

    def search(
        self,
        xq: Floats,
        k: int,
        *,
        nprobe: int | None = None,
        rerank: int | None = None,
        health: bool = False,
    ) -> Answer:
        """The k nearest rows of each query [q, d]; fewer where there are fewer, `found` says how many.

        nprobe: lists looked at; rerank: candidates ranked by their rows (at least k). Left out, they are what
        reached the kind's aim when recall was measured. health: the answer, which is the same to the last bit, also
        says what this search met (`answer.health`)."""
        if k < 1:
            raise UsageError(f"k is {k}; ask for at least one neighbour")
        wide, deep = self.effort(k, nprobe, rerank)
        # The library's own threads wait for each other at matrices of this size; lists are spread over ours.
        with ONE_THREAD:
            return self._search(Asked(xq, self._space), k, wide, deep, health=health)

    def _search(self, asked: Asked, k: int, wide: int, deep: int, *, health: bool) -> Answer:
        watch = Watch() if health else None
        probes, apart = self._probes(asked, wide)
        found = self._proposed(asked, probes, apart, k, wide, deep, watched=health)
        answer, slots = ranked(asked, self._rows, found.query, found.slot, k, watch)
        near = found.pair, found.near
        if self._card is not None:
            near = self._doubted(
                asked, (probes, apart), (k, wide, deep), found, answer, slots, watch
            )
        if watch is None:
            return answer
        own = slots[asked.open]
        query, place = np.nonzero(own >= 0)
        numbers = self._list_of[own[query, place]]
        last = answer.D[asked.open, np.maximum(answer.found[asked.open] - 1, 0)]
        listed = len(self._lists) if self._coarse is not None else 0
        hit = (query, numbers) if listed else (query[:0], query[:0])
        counted = watch.counted(
            probes if listed else probes[:, :0],
            listed,
            hit,
            last,
            near,
            lambda q, slot: distances_of(asked, self._rows, q, slot),
        )
        return replace(answer, health=counted)

    def _doubted(
        self,
        asked: Asked,
        coarse: tuple[Ids, F64],
        effort: tuple[int, int, int],
        found: Proposed,
        answer: Answer,
        slots: Ids,
        watch: Watch | None,
    ) -> tuple[Ids, Ids]:
        """Ask the CPU again where the card may have left out a row that belongs to an answer; `answer` and `slots`
        are written to. Returns which rows are the nearest of their lists."""
        probes, apart = coarse
        k = effort[0]
        kth = answer.D[asked.open, k - 1]
        sure = (found.limit == np.inf) | (kth < found.limit)
        doubt = np.flatnonzero(~sure)
        self.asked, self.left = self.asked + len(sure), self.left + len(doubt)
        if not len(doubt):
            return found.pair, found.near
        some = asked.only(doubt)
        again = self._scanned(some, probes[doubt], apart[doubt], *effort, watched=watch is not None)
        better, where = ranked(some, self._rows, again.query, again.slot, k, watch)
        for old, new in (*zip(answer, better, strict=True), (slots, where)):
            old[some.open] = new[some.open]
        width = max(1, probes.shape[1])
        kept = sure[found.pair // width]
        query, place = np.divmod(again.pair, width)
        pair = np.concatenate([found.pair[kept], doubt[query] * width + place])
        return pair, np.concatenate([found.near[kept], again.near])

    def _probes(self, asked: Asked, wide: int) -> tuple[Ids, F64]:
        """Lists that each query looks at [o, p], and squared distances to their centroids; [o, 0] where there are none."""
        if self._coarse is None or not len(asked.open):
            return np.empty((len(asked.open), 0), np.int64), np.empty((len(asked.open), 0))
        if self._card is not None:
            apart, probes = self._card.nearest(self._coarse, asked.working, wide)
        else:
            apart, probes = self._coarse.nearest(asked.working, wide)
        return probes, apart

    def _proposed(
        self, asked: Asked, probes: Ids, apart: F64, k: int, wide: int, deep: int, *, watched: bool
    ) -> Proposed:
        """Candidates, by the card where there is one."""
        if self._card is None or not len(asked.open) or not len(self._lists):
            return self._scanned(asked, probes, apart, k, wide, deep, watched=watched)
        assert not isinstance(self._lists, TheirLists), "it has no kernels of ours"
        if self._coarse is None:
            assert isinstance(self._lists, FloatLists), "codes without centroids"
            return self._card.of_all(self._lists, asked, k, BLOCK_ROWS)
        most = deep if isinstance(self._lists, CodeLists) else k
        return self._card.probed(self._lists, asked, probes, apart, most, watch=watched)

    def _scanned(
        self, asked: Asked, probes: Ids, apart: F64, k: int, wide: int, deep: int, *, watched: bool
    ) -> Proposed:
        """Candidates, by the CPU."""
        none = np.empty(0, np.int64)
        near = none, none
        if not len(asked.open) or not len(self._lists):
            query, slot = none, none
        elif isinstance(self._lists, TheirLists):
            query, slot = self._lists.scan(asked, wide, deep, k)
        elif isinstance(self._lists, CodeLists):
            firsts = Firsts(probes.size) if watched else None
            query, slot = self._lists.scan(asked, probes, apart, deep, firsts)
            near = firsts.candidates() if firsts is not None else near
        elif self._coarse is None:
            query, slot = self._lists.scan(asked, None, k)
        else:
            least = self._lists.nearest_of_each(asked, probes) if watched else None
            query, slot = self._lists.scan(asked, probes, k, least)
            near = least.candidates() if least is not None else near
        return Proposed(query, slot, np.full(len(asked.open), np.inf), *near)

    def rows_of(self, ids: npt.NDArray[Any]) -> Floats:
        """Copies of the stored rows [n, d] of ids [n]. UsageError naming an id that is not there."""
        names = np.asarray(ids, np.int64)
        slots, there = self._rows.find(names)
        if not there.all():
            raise UsageError(f"the index has no row {names[~there][0]}")
        return self._rows.vectors[slots]

    def questions(self) -> tuple[Ids, Floats]:
        """Ids and rows that recall is asked of."""
        slots = self._scorable_live()
        asked = slots[quality.questions_of(self._rows.ids[slots])]
        return self._rows.ids[asked], self._rows.vectors[asked]

    def exact(self, xq: Floats, k: int) -> Answer:
        """What an index of kind Exact over the same rows answers."""
        slots = self._scorable_live()
        lists = FloatLists(self._space, 1)
        lists.append(np.zeros(len(slots), np.int64), *self._working(slots), slots)
        with ONE_THREAD:
            asked = Asked(xq, self._space)
            return ranked(asked, self._rows, *lists.scan(asked, None, k), k)[0]

    def measure(self) -> Quality | None:
        """Measure recall@10 against exact search over the same rows; None where there is nothing to ask."""
        self.quality = None
        own, xq = self.questions()
        if not len(own) or isinstance(self.kind, Exact):
            return None
        choices = choices_of(self.kind)
        self.quality = quality.curve(
            own,
            int(self._scorable_live().size),
            getattr(self.kind, "aim", 1.0),
            self.exact(xq, quality.K + 1).I,
            len(self._lists),
            "rerank" in choices,
            lambda count, nprobe, rerank: (
                self.search(
                    xq,
                    count,
                    nprobe=nprobe if "nprobe" in choices else None,
                    rerank=rerank or None,
                ).I
            ),
        )
        if said := self.shortfall():
            warnings.warn(RecallShort(said), stacklevel=2)
        return self.quality

    def shortfall(self) -> str:
        """A sentence where the measured recall is below the aim whatever the effort; else nothing."""
        found = self.quality
        if found is None or found.recall >= found.aim:
            return ""
        remedy = REMEDIES.get(self.kind.name, "take kind exact")
        return (
            f"recall@{found.k} of this index of kind {self.kind.name!r} is {found.recall:.3f} at the greatest effort that was "
            f"measured, below its aim of {found.aim:g}: {remedy}; or state a lower aim"
        )

    def stats(self) -> Stats:
        sizes = self._lists.sizes()
        live = self._rows.live()
        return Stats(
            self.kind.name,
            self.metric,
            self.dim,
            len(self),
            int((~self._rows.scorable[live]).sum()),
            self._rows.tombstones,
            len(sizes),
            float(sizes.max() * len(sizes) / sizes.sum()) if sizes.sum() else 0.0,
            len(self) * self.dim * 4,
            self._lists.bytes,
            self.quality,
            self._where(),
        )

    def _where(self) -> str:
        if isinstance(self._lists, CuvsLists):
            return self._lists.where
        return "cpu" if self._card is None else self._card.card.name

    def recipe(self) -> dict[str, Any]:
        """How it was made and what it reached: with the digests of a saved state, what a receipt says of it."""
        theirs = {"cuvs": self._lists.version} if isinstance(self._lists, CuvsLists) else {}
        return {
            "kind": asdict(self.kind),
            "metric": self.metric,
            "dim": self.dim,
            "seed": self.seed,
            "quality": asdict(self.quality) if self.quality else None,
        } | ({"library": theirs} if theirs else {})

    def content_sha256(self) -> str:
        """Digest of the live rows by id, whatever became of others before."""
        live = self._rows.live()
        return saved.content_sha256(self._rows.ids[live], self._rows.vectors[live])

    def save(self, folder: Path) -> str:
        """Write rows, lists and recall into a new folder; returns the digest that names this state."""
        live = self._rows.live()
        trained = self._coarse.centroids if self._coarse else np.empty((0, self.dim), np.float32)
        arrays: dict[str, npt.NDArray[Any]] = {
            "ids": self._rows.ids[live],
            "vectors": self._rows.vectors[live],
            "list_of": self._list_of[live],
            "centroids": trained,
            "centre": self._space.centre,
        }
        files = {}
        if isinstance(self._lists, CuvsLists) and self._lists.taken:
            numbers = np.full(self._rows.count, -1, np.int64)
            numbers[live] = np.arange(len(live))
            arrays["places"] = self._lists.places(numbers)
            files[CUVS_FILE] = self._lists.save
        return saved.write(folder, self.recipe(), arrays, files)

    @classmethod
    def load(cls, folder: Path, *, backend: Backend = "cpu") -> VectorIndex[Any]:
        """What `save` left, checked to the last byte; it answers as it did."""
        manifest, arrays = saved.read(folder)
        try:
            recipe = manifest["recipe"]
            kind = kind_of(recipe["kind"])
            index = cls(recipe["dim"], kind=kind, metric=recipe["metric"], seed=recipe["seed"])
            index.quality = quality.of_json(recipe["quality"])
            index._space = Space(recipe["metric"], arrays["centre"])
            slots, _ = index._rows.upsert(arrays["vectors"], arrays["ids"])
            index._list_of = np.full(len(slots), -1, np.int64)
            if len(arrays["centroids"]):
                index._coarse = Coarse(arrays["centroids"])
                index._empty_lists(index._coarse)
            listed = np.flatnonzero(arrays["list_of"] >= 0)
            if isinstance(index._lists, FloatLists):
                index._lists.space = index._space
            if isinstance(kind, Theirs):
                if "places" in arrays:
                    index._again(folder, recipe["library"]["cuvs"], arrays["places"], listed)
                elif len(listed):
                    index._first(listed)
                index.use(backend)
                return index
            working, reach = index._working(listed)
            labels = listed // BLOCK_ROWS if index._coarse is None else arrays["list_of"][listed]
            index._append(listed, working, reach, labels)
        except (KeyError, TypeError, ValueError) as fault:
            raise CorruptionFound(f"{folder} is not an index: {fault}; build it anew") from fault
        index.use(backend)
        return index

    def list_sizes(self) -> Ids:
        """Rows of each list."""
        return self._lists.sizes()

    def effort(self, k: int, nprobe: int | None, rerank: int | None) -> tuple[int, int]:
        """nprobe and rerank that a search of these uses."""
        choices = choices_of(self.kind)
        for name, value in (("nprobe", nprobe), ("rerank", rerank)):
            if value is None:
                continue
            if name not in choices:
                raise UsageError(
                    f"{name} is no choice of a search of kind {self.kind.name!r}: leave it out"
                )
            if value < 1:
                raise UsageError(f"{name} is {value}; it must be at least 1")
        measured = self.quality
        wide = nprobe or (measured.nprobe if measured else NPROBE)
        deep = rerank or (-(-measured.rerank * k // measured.k) if measured else RERANK * k)
        return wide, max(deep, k)

    def _first(self, slots: Ids) -> None:
        """Lists from rows at slots, where there are none."""
        working, reach = self._working(slots)
        kind = self.kind
        if isinstance(kind, Exact):
            self._append(slots, working, reach, slots // BLOCK_ROWS)
            return
        if isinstance(kind, Theirs):
            self._lists = self._theirs(kind)
            self._append(slots, working, reach, np.zeros(len(slots), np.int64))
            return
        count = min(kind.lists or max(1, round(len(slots) ** 0.5)), len(slots))
        ids = self._rows.ids[slots]
        self._coarse = Coarse(
            train(
                working, ids, count, seed=self.seed, metric=self.metric,
                iterations=kind.iterations, balance=kind.balance,
            )
        )  # fmt: skip
        self._empty_lists(self._coarse)
        labels = place(working, ids, self._coarse, capacity_of(len(slots), count, kind.balance))
        self._append(slots, working, reach, labels)

    def _theirs(self, kind: Theirs) -> TheirLists:
        """Another library's index, empty."""
        if isinstance(kind, Faiss):
            return FaissLists(self._space, kind.factory)
        if isinstance(kind, Cagra):
            return CuvsLists(self._space, kind.name, degree=kind.degree)
        how = {"lists": kind.lists, "bits": kind.bits, "parts": kind.parts}
        return CuvsLists(self._space, kind.name, **how)

    def _again(self, folder: Path, version: str, places: Ids, listed: Ids) -> None:
        """cuVS's own index from its bytes, and the rows at slots `listed` that it did not have yet."""
        assert isinstance(self.kind, Cagra | IvfPq), "places are kept of cuVS's kinds alone"
        lists = self._theirs(self.kind)
        assert isinstance(lists, CuvsLists)
        lists.load(folder / CUVS_FILE, places, version)
        self._lists = lists
        self._list_of[places[places >= 0]] = 0
        rest = np.setdiff1d(listed, places)
        self._append(rest, *self._working(rest), np.zeros(len(rest), np.int64))

    def _empty_lists(self, coarse: Coarse) -> None:
        if isinstance(self.kind, Lattice):
            self._lists = CodeLists(coarse, self.kind.bits, self.seed)
        else:
            self._lists = FloatLists(self._space, len(coarse))

    def _nearest_list(self, slots: Ids, working: Floats) -> Ids:
        if isinstance(self.kind, Theirs):
            return np.zeros(len(slots), np.int64)
        if self._coarse is None:
            return slots // BLOCK_ROWS
        return self._coarse.nearest(working, 1)[1][:, 0]

    def _append(
        self, slots: Ids, working: Floats, reach: npt.NDArray[np.float64], labels: Ids
    ) -> None:
        if isinstance(self._lists, FloatLists):
            self._lists.grow(int(labels.max(initial=-1)) + 1)
        self._lists.append(labels, working, reach, slots)
        self._list_of[slots] = labels

    def _bury(self, dead: Ids) -> None:
        listed = dead[self._list_of[dead] >= 0]
        if len(listed):
            self._lists.drop(self._list_of[listed], listed)
            self._list_of[listed] = -1

    def _tidy(self) -> None:
        if self._rows.tombstones > DEAD_MAX * self._rows.count:
            kept = self._rows.alive[: self._rows.count]
            self._list_of = self._list_of[kept]
            self._lists.renumber(self._rows.compact())
            if isinstance(self._lists, TheirLists):
                slots = np.sort(self._scorable_live())
                self._lists = FloatLists(self._space, 0)
                if len(slots):
                    self._first(slots)

    def _working(self, slots: Ids) -> tuple[Floats, npt.NDArray[np.float64]]:
        return self._space.working(self._rows.vectors[slots], self._rows.norms[slots])

    def _scorable_live(self) -> Ids:
        live = self._rows.live()
        return live[self._rows.scorable[live]]
