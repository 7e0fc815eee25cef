"""Lattice codes of an index on a card: the rows of least score in the probed lists, by the CPU's own scores."""

from __future__ import annotations

from typing import Any, NamedTuple

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
from fabric_pipelines.analytics.index.lattice import DIMS_AT_ONCE, CodeList, CodeLists, scores
from fabric_pipelines.analytics.index.shortlist import limits_of
from fabric_pipelines.analytics.index.space import Asked
from fabric_pipelines.analytics.index.store import F64
from fabric_pipelines.analytics.search import Floats, Ids
from fabric_pipelines.device.card import Card, DeviceArray

SPARE = 8  # scores beyond k, of which the last one shows whether a tie was cut off


class _Scored(NamedTuple):
    """pair (number of a probe) and place of rows, their scores; cut [o]: a score of this or more may be missing."""

    pair: Ids
    place: Ids
    score: Floats
    cut: F64


class CardCodes(Places):
    """Codes as e8_codec_scan.cu has them: groups of 32 rows, so places are multiples of 32."""

    lists: CodeLists

    def __init__(self, card: Card, lists: CodeLists) -> None:
        super().__init__(card, lists)
        self._wide: dict[int, bool] = {}
        self._codes: DeviceArray = None
        self._factor: DeviceArray = None
        self._constant: DeviceArray = None

    @property
    def fits(self) -> bool:
        """Whether every row's terms are float32."""
        return not any(self._wide.values())

    def rooms(self, sizes: Ids) -> Ids:
        group = scans.GROUP_ROWS
        rooms: Ids = -(-(sizes + sizes // 8 + 1) // group) * group
        return rooms

    def lay_out(self) -> None:
        self._codes = self._factor = self._constant = None
        self._wide = {}
        self.card.trim()
        bits, groups = self.lists.bits, int(self.start[-1]) // scans.GROUP_ROWS
        self._words = -(-self.lists.width // scans.STEP_DIMS) * bits
        self.card.require_memory(
            groups * scans.GROUP_ROWS * (4 * self._words + 8) + 16 * len(self.start) + WORK_BYTES,
            f"an index of {int(self.start[-1]):,} codes",
            REMEDY,
        )
        self._codes = self.card.empty((groups, self._words, scans.GROUP_ROWS), np.uint32)
        self._factor, self._constant = (
            self.card.empty((groups, scans.GROUP_ROWS), np.float32) for _ in range(2)
        )
        self._list_group = scans.send(self.card, self.start // scans.GROUP_ROWS)

    def content(self, one: CodeList) -> npt.NDArray[Any]:
        return one.codes

    def write(self, number: int) -> None:
        one = self.lists[number]
        self._wide[number] = one.factor.dtype != np.float32
        if self._wide[number] or not len(one.slots):
            return
        first = int(self.start[number]) // scans.GROUP_ROWS
        packed = scans.interleaved(one.codes, self.lists.bits)
        part = slice(first, first + len(packed))
        self.card.store(self._codes[part], packed)
        for there, term in ((self._factor, one.factor), (self._constant, one.constant)):
            padded = np.zeros(len(packed) * scans.GROUP_ROWS, np.float32)
            padded[: len(term)] = term
            self.card.store(there[part], padded.reshape(-1, scans.GROUP_ROWS))

    def settle(self, sizes: Ids) -> None:
        dims = scans.STEP_DIMS * self._words // self.lists.bits
        self._store = scans.E8Codes(
            self._codes, self._factor, self._constant, self._list_group,
            scans.send(self.card, sizes), sizes, self.lists.bits, dims,
        )  # fmt: skip

    def probed(self, asked: Asked, probes: Ids, apart: F64, k: int, *, watch: bool) -> Proposed:
        """Rows with the k least scores in the lists probes [o, p], all that tie with the last included; apart [o, p]:
        squared distances to the lists' centroids. The nearest of a list is the one of least score."""
        count, width = probes.shape
        rounded = self.lists.rounded(asked.working)
        if rounded.unit.dtype != np.float32:
            return nothing(count)
        groups = -(-self._store.sizes // scans.GROUP_ROWS)
        cost = groups[probes].sum(axis=1) * (4 * scans.QUERIES * scans.GROUP_ROWS)
        most = (scans.LIMIT - 1) // (scans.PLANES_MAX * self._store.dims)
        pieces = []
        for part in parts(cost, most):
            plan = scans.planned(probes[part], self._store.sizes, scans.GROUP_ROWS)
            there = scans.e8_queries(
                self.card, self._store, rounded.levels[part], rounded.unit[part]
            )
            product = scans.e8_codec_scan(self.card, self._store, there, plan)
            far = apart[part].astype(np.float32)
            if k < scans.K_MAX and self._store.dims <= DIMS_AT_ONCE:
                one = self._by_card(there, plan, product, far, min(k + SPARE, scans.K_MAX))
            else:
                one = self._by_products(plan, product, probes[part], rounded.unit[part], far)
            pieces.append(one._replace(pair=one.pair + part.start * width))
        pair, place, score, cut = (np.concatenate(column) for column in zip(*pieces, strict=True))
        query = pair // width
        limit = limits_of(query, score.astype(np.float64), count, k)
        kept = score <= limit[query]
        near = _first_of_each(pair, score) if watch else query[:0]
        return Proposed(
            query[kept],
            self.slot_of[place[kept]],
            np.where((cut <= limit) & (cut < np.inf), -np.inf, np.inf),
            pair[near],
            self.slot_of[place[near]],
        )

    def _by_card(
        self, there: scans.E8Queries, plan: scans.Plan, product: DeviceArray, far: Floats, k: int
    ) -> _Scored:
        """The k best of each query and list."""
        key = self.card.download(
            scans.e8_codec_best(
                self.card, self._store, there, plan, product, far.astype(np.float64), k
            )
        )
        score, place = scans.unpacked(key.reshape(-1, k))
        pair = np.flatnonzero(plan.at.ravel() >= 0)
        at = plan.at.ravel()[pair]
        score, place = score[at], place[at]
        first = self.start[plan.task_list[at // scans.QUERIES]]
        row, column = np.nonzero(place >= 0)
        more = self._store.sizes[plan.task_list[at // scans.QUERIES]] > k
        cut = np.full(plan.at.shape, np.inf)
        cut.ravel()[pair] = np.where(more, score[:, -1], np.inf)
        return _Scored(
            pair[row],
            first[row] + place[row, column],
            score[row, column],
            cut.min(axis=1, initial=np.inf),
        )

    def _by_products(
        self, plan: scans.Plan, product: DeviceArray, probes: Ids, unit: Floats, far: Floats
    ) -> _Scored:
        """All rows of each query and list, scored here from exact products."""
        whole, kind = self.card.download(product), np.float32
        if self.lists.width > DIMS_AT_ONCE:
            kind = np.float64  # type: ignore[assignment]
        none = np.empty(0, np.int64)
        found = [(none, none, np.empty(0, kind))]
        for pair in np.flatnonzero(plan.at.ravel() >= 0).tolist():
            query, number = pair // probes.shape[1], int(probes.ravel()[pair])
            task, column = divmod(int(plan.at.ravel()[pair]), scans.QUERIES)
            one = self.lists[number]
            own = whole[plan.first[task] : plan.first[task + 1], column].reshape(-1)
            exact = own[None, : len(one.slots)].astype(kind)
            apart = far.ravel()[pair : pair + 1, None]
            score = scores(exact, one, unit[query : query + 1, None], apart)[0]
            there = np.flatnonzero(~np.isnan(score))
            found.append((np.full(len(there), pair), self.start[number] + there, score[there]))
        pairs, places, score = (np.concatenate(column) for column in zip(*found, strict=True))
        return _Scored(pairs, places, score, np.full(len(probes), np.inf))


def _first_of_each(pair: Ids, score: Floats) -> Ids:
    """Where the least score of each pair stands, the first one of equals; rows of a pair come in order of their places
    where scores are equal."""
    order = np.lexsort((np.arange(len(pair)), score, pair))
    firsts = np.flatnonzero(np.diff(pair[order], prepend=-1))
    return order[firsts]
