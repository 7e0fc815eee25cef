"""Float rows of an index on a card: the exact scan of all of them, and that of probed lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics import kernels_scans as scans
from fabric_pipelines.analytics.index.card_places import (
    REMEDY,
    WORK_BYTES,
    Places,
    Proposed,
    nothing,
    parts,
)
from fabric_pipelines.analytics.index.lists import FloatLists, ScanList
from fabric_pipelines.analytics.index.space import Asked
from fabric_pipelines.analytics.index.store import F64
from fabric_pipelines.analytics.resident import LENGTH_MAX, ResidentScan, workspace_bytes
from fabric_pipelines.analytics.search import Floats, Ids, Metric, Queries, dot_error
from fabric_pipelines.device.card import Card, DeviceArray
from fabric_pipelines.errors import DeviceRefused

SPARE = 8  # nearest rows beyond k: they prove that none of the k was lost to rounding
ROOM = 8  # places of a list beside an eighth of its size
HALF_ULP = float(np.finfo(np.float32).eps) / 2


class CardRows(Places):
    """rows f32 [places, d] in working space, length f32 [places] (NaN: no row)."""

    def __init__(self, card: Card, lists: FloatLists, *, block: int | None) -> None:
        """block: rows of every list but the last (the exact kind's), None: lists of any size."""
        super().__init__(card, lists)
        self._block = block
        self._wide: dict[int, bool] = {}
        self._rows: DeviceArray = None
        self._length: DeviceArray = None
        self._scan: ResidentScan | None = None
        self._store: scans.FloatStore | None = None

    @property
    def fits(self) -> bool:
        """Whether float32 holds every row and its square."""
        return not any(self._wide.values())

    @property
    def metric(self) -> Metric:
        return self.lists.space.metric  # type: ignore[no-any-return]

    def rooms(self, sizes: Ids) -> Ids:
        if self._block is None or len(sizes) == 1:
            grown: Ids = sizes + sizes // 8 + ROOM
            return grown
        to_come = np.full(len(sizes) // 8, self._block)
        return np.concatenate([np.maximum(sizes, self._block), to_come])

    def lay_out(self) -> None:
        places, dim = int(self.start[-1]), self.lists.space.dim
        self._scan = self._store = None
        self._rows = self._length = None
        self._wide = {}
        self.card.trim()
        if self._block is None and places >= scans.ROWS_MAX:
            raise DeviceRefused(f"lists of {places:,} rows: the scan numbers 2^32: {REMEDY}")
        launch = (
            WORK_BYTES if self._block is None else 0
        )  # an exact scan has its memory from the start
        self.card.require_memory(
            bytes_needed(places, len(self.start), dim) + launch,
            f"an index of {places:,} rows",
            REMEDY,
        )
        self._rows = self.card.empty((places, dim), np.float32)
        self._length = self.card.empty(places, np.float32)
        self.card.fill(self._length, 0xFF)
        names = scans.send(self.card, np.arange(places))
        if self._block is not None:
            self._scan = ResidentScan(
                self.card, self._rows, names, self._length, metric=self.metric, length_max=0.0
            )
            return
        self._store = scans.FloatStore(
            self._rows, self._length, names, scans.send(self.card, self.start), self.start[:0]
        )

    def content(self, one: ScanList) -> npt.NDArray[Any]:
        return one.rows

    def write(self, number: int) -> None:
        one = self.lists[number]
        first, last = int(self.start[number]), int(self.start[number + 1])
        narrow = one.rows.dtype == np.float32 and one.reach.max(initial=0.0) < LENGTH_MAX
        self._wide[number] = not narrow
        length = np.full(last - first, np.nan, np.float32)
        if narrow and len(one.slots):
            length[: len(one.slots)] = one.reach
            self.card.store(self._rows[first : first + len(one.slots)], one.rows)
        if len(length):
            self.card.store(self._length[first:last], length)

    def settle(self, sizes: Ids) -> None:
        if self._store is not None:
            self._store = self._store._replace(sizes=sizes)

    def of_all(self, asked: Asked, k: int) -> Proposed:
        """The rows that can be among the k nearest of all."""
        assert self._scan is not None, "lists of any size are probed"
        queries = Queries(asked.working, self.metric)
        query, place, left = self._scan.candidates(queries, k)
        none = nothing(len(asked.open))
        none.limit[np.setdiff1d(queries.open, left)] = np.inf
        return none._replace(query=query, slot=self.slot_of[place])

    def probed(self, asked: Asked, probes: Ids, k: int, *, watch: bool) -> Proposed:
        """The k nearest of the lists probes [o, p], and SPARE more."""
        kept, count = min(scans.K_MAX, k + SPARE), len(asked.open)
        if kept <= k or asked.working.dtype != np.float32:
            return nothing(count)
        assert self._store is not None, "the exact kind has no lists to probe"
        pieces = -(-self._store.sizes // scans.PIECE_ROWS)
        cost = pieces[probes].sum(axis=1) * (8 * kept * scans.QUERIES)
        most = (scans.LIMIT - 1) // asked.working.shape[1]
        found = [
            self._of_part(asked.only(np.arange(part.start, part.stop)), probes[part], kept, watch)
            for part in parts(cost, most)
        ]
        starts = np.cumsum([0, *(len(one.limit) for one in found)])
        joined = [
            one._replace(query=one.query + start, pair=one.pair + start * probes.shape[1])
            for one, start in zip(found, starts, strict=False)
        ]
        return Proposed(*(np.concatenate(column) for column in zip(*joined, strict=True)))

    def _of_part(self, asked: Asked, probes: Ids, kept: int, watch: bool) -> Proposed:
        store, card = self._store, self.card
        assert store is not None, "nothing was laid out"
        xq, reach = (
            scans.send(card, part) for part in (asked.working, asked.reach.astype(np.float32))
        )
        keys = scans.ivf_keys(card, store, xq, reach, probes, kept, self.metric)
        there = scans.ivf_merge(card, store, keys)
        distance, place, found = (card.download(part) for part in there)
        query, column = np.nonzero(np.arange(kept) < found[:, None])
        low, _ = bounds(distance[:, -1], asked.reach, asked.working.shape[1], self.metric)
        limit = np.where(found == kept, low, np.inf)
        limit[~(asked.reach < LENGTH_MAX)] = -np.inf
        pair = near = query[:0]
        if watch:
            pair, near, unsure = self._nearest(card.download(keys.key), keys.plan, asked)
            limit[unsure] = -np.inf
        slot = self.slot_of[place[query, column]]
        return Proposed(query, slot, limit, pair, self.slot_of[near])

    def _nearest(
        self, key: npt.NDArray[np.uint64], plan: scans.Plan, asked: Asked
    ) -> tuple[Ids, Ids, Ids]:
        """Pairs and places of rows of which one is the nearest of its list, and the queries of which some list may
        have others."""
        pair = np.flatnonzero(plan.at.ravel() >= 0)
        task, column = np.divmod(plan.at.ravel()[pair], scans.QUERIES)
        pieces = plan.first[task + 1] - plan.first[task]
        pair, task, column, pieces = (part[pieces > 0] for part in (pair, task, column, pieces))
        if not len(pair):
            return pair, pair, pair
        begin = np.cumsum(pieces) - pieces
        owner = np.repeat(np.arange(len(pair)), pieces)
        item = plan.first[task][owner] + np.arange(len(owner)) - begin[owner]
        distance, place = scans.unpacked(key[item, column[owner]])
        of_query = pair // plan.at.shape[1]
        reach = asked.reach[of_query][owner]
        low, high = (
            bound.reshape(distance.shape)
            for bound in bounds(
                distance.ravel(), np.repeat(reach, distance.shape[1]),
                asked.working.shape[1], self.metric,
            )
        )  # fmt: skip
        least = np.fmin.reduceat(high[:, 0], begin)  # NaN: nothing in that piece
        near = low <= least[owner][:, None]
        piece, at = np.nonzero(near)
        unsure = np.unique(of_query[owner[near[:, -1]]])
        return pair[owner[piece]], place[piece, at], unsure


def bounds(distance: Floats, reach: F64, dim: int, metric: Metric) -> tuple[F64, F64]:
    """The least and the greatest true distance [n] behind what ivf_scan found in float32, to the query of length reach.

    A sum of d squares in any order is off by at most a share of itself (search.dot_error), or by what underflows. Rows
    and queries are rounded themselves, each by a share u of its length, and a row is no longer than the query and
    their distance: three u of the query's length and two of the distance."""
    off = dot_error(dim, HALF_ULP)
    wide = distance.astype(np.float64)
    if metric == "cosine":
        return wide - off, wide + off
    tiny = dim * float(np.finfo(np.float32).tiny)
    near = np.sqrt(np.maximum(wide - tiny, 0.0) / (1 + off)) * (1 - 2 * HALF_ULP)
    far = np.sqrt((wide + tiny) * (1 + off)) * (1 + 2 * HALF_ULP)
    apart = 3 * HALF_ULP * reach
    return np.square(np.maximum(near - apart, 0.0)), np.square(far + apart)


def bytes_needed(places: int, lists: int, dim: int) -> int:
    """Device memory of a copy and of exact searches on it; scans of lists take up to WORK_BYTES more."""
    return places * (4 * dim + 4 + 8) + 8 * lists + workspace_bytes(places, dim)
