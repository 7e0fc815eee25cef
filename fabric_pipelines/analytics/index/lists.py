"""Scan copies of rows, list by list, and the one sweep over them that answers a batch of queries.

A list holds its rows side by side as they are multiplied. Many queries are answered list-major: the rows of a list are
read once for all queries that probe it. Few queries are answered one by one, since a matrix product of one row and
the bookkeeping of a tile cost more than they share. Both ways offer the same rows, so they find the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fabric_pipelines.analytics.index.shortlist import Shortlist
from fabric_pipelines.analytics.index.space import Asked, Space
from fabric_pipelines.analytics.index.store import F64
from fabric_pipelines.analytics.search import Floats, Ids
from fabric_pipelines.analytics.threads import run_side_by_side, workers

TILE_PAIRS = 1 << 18  # 1 MiB of float32 scores a tile
SHARED_MIN = 2.5  # queries a probed list, above which lists are read for all of them at once
FLOP_OF_A_TASK = (
    5e5  # lists of so much work are read one by one even for one query: the exact kind's
)
FLOP_FOR_THREADS = 2e7  # below it a pool of threads, 0.2 ms, costs more than it spares


@dataclass(frozen=True, slots=True)
class ScanList:
    """One list: rows [n, d] as they are multiplied, their slots [n], reach [n] and the terms of Space.row_terms."""

    rows: Floats
    slots: Ids
    reach: F64
    bias: Floats | None
    slack: Floats | None

    @classmethod
    def of(cls, space: Space, rows: Floats, slots: Ids, reach: F64) -> ScanList:
        return cls(rows, slots, reach, *space.row_terms(reach, rows.dtype))

    def low(self, queries: Floats) -> Floats:
        """Lower bounds [m, n] for queries [m, d] in working space."""
        products: Floats = queries @ self.rows.T
        np.negative(products, out=products)
        if self.bias is not None:
            products += self.bias
        return products


class FloatLists:
    """Lists of float rows. A slot is in at most one."""

    def __init__(self, space: Space, count: int) -> None:
        self.space = space
        empty = np.empty((0, space.dim), np.float32)
        none = np.empty(0, np.int64)
        self._lists = [ScanList.of(space, empty, none, np.empty(0)) for _ in range(count)]
        self._sizes: Ids | None = None  # None: some list changed
        self.version = 0  # grows with every change

    def __len__(self) -> int:
        return len(self._lists)

    def __getitem__(self, number: int) -> ScanList:
        return self._lists[number]

    def sizes(self) -> Ids:
        if self._sizes is None:
            self._sizes = np.array([len(one.slots) for one in self._lists], np.int64)
        return self._sizes

    @property
    def bytes(self) -> int:
        return sum(one.rows.nbytes + one.slots.nbytes + one.reach.nbytes for one in self._lists)

    def grow(self, count: int) -> None:
        """Have at least `count` lists."""
        self._changed()
        self._lists += FloatLists(self.space, max(0, count - len(self._lists)))._lists

    def append(self, labels: Ids, rows: Floats, reach: F64, slots: Ids) -> None:
        """Put each row into list labels [n]."""
        if not len(labels):
            return
        self._changed()
        order = np.argsort(labels, kind="stable")
        rows, reach, slots = rows[order], reach[order], slots[order]
        present, starts = np.unique(labels[order], return_index=True)
        for number, start, stop in zip(present, starts, [*starts[1:], len(order)], strict=True):
            part, old = slice(start, stop), self._lists[number]
            new = rows[part], slots[part], reach[part]
            if len(old.slots):
                both = zip((old.rows, old.slots, old.reach), new, strict=True)
                new = tuple(np.concatenate(pair) for pair in both)  # type: ignore[assignment]
            self._lists[number] = ScanList.of(self.space, *new)

    def drop(self, labels: Ids, dead: Ids) -> None:
        """Take the slots `dead` [n] out of their lists labels [n]."""
        self._changed()
        for number in np.unique(labels):
            old = self._lists[number]
            kept = np.isin(old.slots, dead[labels == number], invert=True)
            self._lists[number] = ScanList.of(
                self.space, old.rows[kept], old.slots[kept], old.reach[kept]
            )

    def renumber(self, moved: Ids) -> None:
        """Slots were compacted: old slot -> new slot."""
        self.version += 1
        self._lists = [
            ScanList(one.rows, moved[one.slots], one.reach, one.bias, one.slack)
            for one in self._lists
        ]

    def _changed(self) -> None:
        self._sizes = None
        self.version += 1

    def scan(
        self, asked: Asked, probes: Ids | None, k: int, near: Shortlist | None = None
    ) -> tuple[Ids, Ids]:
        """Query numbers (in asked.open) and slots that may be among the k nearest in the lists `probes` [o, p]
        (-1: none; None: all lists). near: is offered the rows of each probe, by its number."""
        found = Shortlist(len(asked.open), k, self.space.gap(asked.reach))
        if probes is None:
            probes = np.broadcast_to(np.arange(len(self)), (len(asked.open), len(self)))
        if not probes.size:
            return found.candidates()
        sizes = self.sizes()
        flop = 2.0 * self.space.dim * float(sizes[probes[probes >= 0]].sum())
        lists = len(np.unique(probes))
        shared = len(probes) > 1 and probes.size >= SHARED_MIN * lists
        if shared or flop > FLOP_OF_A_TASK * lists:
            aside = flop > FLOP_FOR_THREADS and workers() > 1
            tasks = [(number, whose) for number, whose in probed(probes) if sizes[number]]
            self._list_major(asked, tasks, found, aside, probes, near)
        else:
            self._query_major(asked, probes, found, near)
        return found.candidates()

    def nearest_of_each(self, asked: Asked, probes: Ids) -> Shortlist:
        """For `near` of a scan: which rows can be the nearest of each probe."""
        gap = np.repeat(self.space.gap(asked.reach), probes.shape[1])
        return Shortlist(probes.size, 1, gap)

    def _query_major(
        self, asked: Asked, probes: Ids, found: Shortlist, near: Shortlist | None
    ) -> None:
        for number, own in enumerate(probes):
            full = [p for p, at in enumerate(own) if at >= 0 and len(self._lists[at].slots)]
            if not full:
                continue
            lists = [self._lists[own[p]] for p in full]
            query = asked.working[number]
            ends = np.cumsum([len(one.slots) for one in lists])
            low = np.empty(ends[-1], np.result_type(query, *{one.rows.dtype for one in lists}))
            for one, end in zip(lists, ends, strict=True):
                np.matmul(one.rows, query, out=low[end - len(one.slots) : end])
            np.negative(low, out=low)
            bias = slack = None
            if lists[0].bias is not None:
                bias = np.concatenate([one.bias for one in lists])
                slack = np.concatenate([one.slack for one in lists])
                low += bias
            slots = np.concatenate([one.slots for one in lists])
            found.offer(np.array([number]), low[None], slots, slack)
            if near is not None:
                for p, one, end in zip(full, lists, ends, strict=True):
                    pair = np.array([number * len(own) + p])
                    near.offer(pair, low[None, end - len(one.slots) : end], one.slots, one.slack)

    def _list_major(
        self, asked: Asked, tasks: list[tuple[int, Ids]], found: Shortlist, aside: bool,
        probes: Ids, near: Shortlist | None,
    ) -> None:  # fmt: skip
        def scan_list(task: tuple[int, Ids]) -> None:
            one, whose = self._lists[task[0]], task[1]
            pairs = pairs_of(probes, whose, task[0]) if near is not None else whose
            for queries, rows in tiles(len(whose), len(one.slots)):
                part = ScanList(
                    one.rows[rows],
                    one.slots[rows],
                    one.reach[rows],
                    None if one.bias is None else one.bias[rows],
                    None if one.slack is None else one.slack[rows],
                )
                low = part.low(asked.working[whose[queries]])
                found.offer(whose[queries], low, part.slots, part.slack)
                if near is not None:
                    near.offer(pairs[queries], low, part.slots, part.slack)

        if aside:
            run_side_by_side(scan_list, tasks)
        else:
            for task in tasks:
                scan_list(task)


def probed(probes: Ids) -> Iterator[tuple[int, Ids]]:
    """Each list that is probed and the numbers of the queries that probe it, ascending."""
    flat = probes.ravel()
    order = np.argsort(flat, kind="stable")
    present, starts = np.unique(flat[order], return_index=True)
    owners = order // probes.shape[1]
    for number, start, stop in zip(present, starts, [*starts[1:], len(order)], strict=True):
        if number >= 0:
            yield int(number), owners[start:stop]


def pairs_of(probes: Ids, whose: Ids, number: int) -> Ids:
    """The numbers (query times probes plus place) under which the queries `whose` probe list `number`."""
    pairs: Ids = whose * probes.shape[1] + (probes[whose] == number).argmax(axis=1)
    return pairs


def tiles(queries: int, rows: int) -> Iterator[tuple[slice, slice]]:
    row_step = min(rows, 4096)
    query_step = max(1, TILE_PAIRS // row_step)
    for first in range(0, rows, row_step):
        for start in range(0, queries, query_step):
            yield slice(start, start + query_step), slice(first, first + row_step)
