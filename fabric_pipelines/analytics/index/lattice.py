"""Lists of lattice codes: each row's difference from its centroid, rotated, scaled by its own length, on E8.

A score is the squared distance with the difference r replaced by f z, z the decoded integers and f = |r|^2 / (r.z), which
leaves no bias in products (as in RaBitQ, arXiv 2405.12497):

    |q - c - r|^2 ~ |q - c|^2 + |r|^2 + 2 c.(f z) - 2 f q.z

The first term is exact, from the choice of lists; the next two are a number a row; the last is a product of integers, the
query rounded to as many levels as keep every partial sum below 2^24. Such a float32 product is exact in any order,
so scores, and with them the candidates that are then ranked by their stored rows, are the same bytes on any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fabric_pipelines.analytics.index import e8
from fabric_pipelines.analytics.index.coarse import Coarse
from fabric_pipelines.analytics.index.lists import pairs_of, probed
from fabric_pipelines.analytics.index.shortlist import Shortlist
from fabric_pipelines.analytics.index.space import Asked
from fabric_pipelines.analytics.index.store import F64
from fabric_pipelines.analytics.index.traffic import Firsts
from fabric_pipelines.analytics.search import Floats, Ids
from fabric_pipelines.analytics.threads import run_side_by_side, workers

ROWS_AT_ONCE = 1 << 12
DIMS_AT_ONCE = (
    2048  # of one exact product: 2^24 / (31 * 2048) = 264 levels of the query at four bits
)
LEVELS_MAX = 1 << 15
TILE_PAIRS = 1 << 18
SHARED_MIN = 1.5  # queries a probed list: decoding a list is worth sharing sooner than reading it
VALUES_FOR_THREADS = (
    1 << 22
)  # decoded values, below which a pool of threads costs more than it spares


@dataclass(frozen=True, slots=True)
class CodeList:
    """codes uint8 [n, bytes]; slots [n]; factor [n] is -2 f, constant [n] is |r|^2 + 2 c.(f z)."""

    codes: e8.U8
    slots: Ids
    factor: Floats
    constant: Floats

    def at(self, rows: slice | Ids) -> CodeList:
        return CodeList(self.codes[rows], self.slots[rows], self.factor[rows], self.constant[rows])

    @classmethod
    def joined(cls, parts: list[CodeList]) -> CodeList:
        if len(parts) == 1:
            return parts[0]
        columns = zip(*((p.codes, p.slots, p.factor, p.constant) for p in parts), strict=True)
        return cls(*(np.concatenate(column) for column in columns))


@dataclass(frozen=True, slots=True)
class Rounded:
    """Queries in whole levels: levels float32 [o, padded], unit [o] of one level."""

    levels: Floats
    unit: Floats


class CodeLists:
    """Lists of codes. A slot is in at most one."""

    def __init__(self, coarse: Coarse, bits: int, seed: int) -> None:
        dim = coarse.centroids.shape[1]
        self.bits = bits
        self._coarse, self._rotation = coarse, e8.Rotation(dim, seed)
        self._centroids = self._rotation(coarse.centroids)
        width = self._rotation.padded
        empty = np.empty(0, np.float32)
        none = CodeList(
            np.empty((0, width // 8 * bits), np.uint8), np.empty(0, np.int64), empty, empty
        )
        self._lists = [none] * len(coarse)
        self.version = 0  # grows with every change

    def __len__(self) -> int:
        return len(self._lists)

    def __getitem__(self, number: int) -> CodeList:
        return self._lists[number]

    def sizes(self) -> Ids:
        return np.array([len(one.slots) for one in self._lists], np.int64)

    @property
    def width(self) -> int:
        """Dimensions of a code."""
        return self._rotation.padded

    @property
    def bytes(self) -> int:
        return sum(
            one.codes.nbytes + one.slots.nbytes + one.factor.nbytes + one.constant.nbytes
            for one in self._lists
        )

    def append(self, labels: Ids, rows: Floats, reach: F64, slots: Ids) -> None:
        """Put each row, in working space, into list labels [n]."""
        if not len(labels):
            return
        self.version += 1
        order = np.argsort(labels, kind="stable")
        labels, coded = labels[order], self._coded(rows[order], labels[order], slots[order])
        present, starts = np.unique(labels, return_index=True)
        for number, start, stop in zip(present, starts, [*starts[1:], len(order)], strict=True):
            old = [self._lists[number]] if len(self._lists[number].slots) else []
            self._lists[number] = CodeList.joined([*old, coded.at(slice(start, stop))])

    def drop(self, labels: Ids, dead: Ids) -> None:
        self.version += 1
        for number in np.unique(labels):
            old = self._lists[number]
            self._lists[number] = old.at(
                np.flatnonzero(np.isin(old.slots, dead[labels == number], invert=True))
            )

    def renumber(self, moved: Ids) -> None:
        self.version += 1
        self._lists = [
            CodeList(one.codes, moved[one.slots], one.factor, one.constant) for one in self._lists
        ]

    def scan(
        self, asked: Asked, probes: Ids, apart: F64, k: int, near: Firsts | None = None
    ) -> tuple[Ids, Ids]:
        """Query numbers (in asked.open) and slots of the k rows of least score in the lists `probes` [o, p], all
        that tie with the last of them included. apart [o, p]: squared distances to the lists' centroids. near: is
        offered the rows of each probe, by its number."""
        found = Shortlist(len(asked.open), k, np.zeros(len(asked.open)))
        rounded = self.rounded(asked.working)
        apart = apart.astype(rounded.unit.dtype)

        def one_query(number: int) -> None:
            full = [p for p, at in enumerate(probes[number]) if len(self._lists[at].slots)]
            if not full:
                return
            lists = [self._lists[probes[number, p]] for p in full]
            sizes = [len(one.slots) for one in lists]
            far = np.repeat(apart[number, full], sizes)
            rows, ends = CodeList.joined(lists), np.cumsum(sizes)
            pairs = number * probes.shape[1] + np.array(full)

            def watch(_: slice, span: slice, low: Floats) -> None:
                assert near is not None, "nobody watches"
                for pair, end, size in zip(pairs, ends, sizes, strict=True):
                    first, last = max(end - size, span.start), min(end, span.stop)
                    if first < last:
                        own = low[:, first - span.start : last - span.start]
                        near.offer(np.array([pair]), own, rows.slots[first:last])

            watched = None if near is None else watch
            self._offer(np.array([number]), rounded, rows, far[None], found, watched)

        def one_list(task: tuple[int, Ids]) -> None:
            number, whose = task
            far = apart[whose][probes[whose] == number]
            slots, pairs = self._lists[number].slots, pairs_of(probes, whose, number)

            def watch(queries: slice, span: slice, low: Floats) -> None:
                assert near is not None, "nobody watches"
                near.offer(pairs[queries], low, slots[span])

            watched = None if near is None else watch
            self._offer(whose, rounded, self._lists[number], far[:, None], found, watched)

        tasks = [
            (number, whose) for number, whose in probed(probes) if len(self._lists[number].slots)
        ]
        if len(probes) == 1 or probes.size < SHARED_MIN * len(tasks):
            for number in range(len(probes)):
                one_query(number)
            return found.candidates()
        values = sum(len(self._lists[number].slots) for number, _ in tasks) * self._rotation.padded
        if values > VALUES_FOR_THREADS and workers() > 1:
            run_side_by_side(one_list, tasks)
        else:
            for task in tasks:
                one_list(task)
        return found.candidates()

    def _offer(
        self, whose: Ids, rounded: Rounded, rows: CodeList, apart: Floats, found: Shortlist,
        watched: Callable[[slice, slice, Floats], None] | None = None,
    ) -> None:  # fmt: skip
        """apart [m, 1] or [1, n]; watched is told which of `whose` and which rows a tile of scores is of."""
        for first in range(0, len(rows.slots), ROWS_AT_ONCE):
            span = slice(first, first + ROWS_AT_ONCE)
            part = rows.at(span)
            values = e8.decode(part.codes, self.bits).astype(np.float32)
            step = max(1, TILE_PAIRS // len(part.slots))
            for start in range(0, len(whose), step):
                asked = whose[start : start + step]
                products = _product(rounded.levels[asked], values)
                far = apart[start : start + step] if apart.shape[1] == 1 else apart[:, span]
                low = scores(products, part, rounded.unit[asked, None], far)
                found.offer(asked, low, part.slots, None)
                if watched is not None:
                    watched(slice(start, start + step), span, low)

    def _coded(self, rows: Floats, labels: Ids, slots: Ids) -> CodeList:
        parts = [
            self._coded_block(rows[s : s + ROWS_AT_ONCE], labels[s : s + ROWS_AT_ONCE])
            for s in range(0, len(rows), ROWS_AT_ONCE)
        ]
        codes, factor, constant = (np.concatenate(column) for column in zip(*parts, strict=True))
        return CodeList(codes, slots, factor, constant)

    def _coded_block(self, rows: Floats, labels: Ids) -> tuple[e8.U8, Floats, Floats]:
        centres = self._centroids[labels]
        apart = self._rotation(rows) - centres
        square = (apart * apart).sum(axis=1)
        scale = np.sqrt(square / apart.shape[1]) * e8.SCALES[self.bits]
        codes = e8.encode(apart / np.where(scale > 0, scale, 1.0)[:, None], self.bits)
        values = e8.decode(codes, self.bits).astype(np.float64)
        along = (apart * values).sum(axis=1)
        factor = np.where(along > 0, square / np.where(along > 0, along, 1.0), 0.0)
        constant = square + 2 * factor * (centres * values).sum(axis=1)
        return codes, (-2 * factor).astype(rows.dtype), constant.astype(rows.dtype)

    def rounded(self, working: Floats) -> Rounded:
        """Queries [o, d] in working space, as they are multiplied with codes."""
        turned = self._rotation(working)
        most = np.abs(turned).max(axis=1, initial=0.0)
        width = min(turned.shape[1], DIMS_AT_ONCE)
        levels = min(LEVELS_MAX, 2**24 // (e8.top_value(self.bits) * width))
        unit = most / levels
        whole = np.rint(turned / np.where(unit > 0, unit, 1.0)[:, None])
        return Rounded(whole.astype(np.float32), unit.astype(working.dtype))


def scores(products: Floats, rows: CodeList, unit: Floats, apart: Floats) -> Floats:
    """[m, n] of products [m, n] of queries with rows [n]; in this order, each step rounded."""
    low: Floats = products * rows.factor
    low *= unit
    low += rows.constant
    low += apart
    return low


def _product(levels: Floats, values: Floats) -> Floats:
    """levels @ values.T, exact: each product of DIMS_AT_ONCE dimensions is, and sums of them are in float64."""
    width = levels.shape[1]
    if width <= DIMS_AT_ONCE:
        return levels @ values.T
    total = np.zeros((len(levels), len(values)))
    for start in range(0, width, DIMS_AT_ONCE):
        part = slice(start, start + DIMS_AT_ONCE)
        total += levels[:, part] @ values[:, part].T
    return total
