"""The scans of an index on a card: they propose the rows that the CPU's scans would, or say that they cannot.

What is proposed is ranked like everything else behind the door, in float64 from the stored rows. So an answer is the CPU's
to the last bit wherever no row that belongs to it was left out, and each scan proves that or leaves the query to the CPU:
exact search by its bounds (resident.py); an inverted file by the k-th distance, which must lie below what any row that was
not kept can have; codes by scores that are the CPU's own bits, where none was cut off that ties with the last.
"""

from __future__ import annotations

import threading

import numpy as np

from fabric_pipelines.analytics.index.card_codes import CardCodes
from fabric_pipelines.analytics.index.card_places import Proposed
from fabric_pipelines.analytics.index.card_places import nothing as nothing_settled
from fabric_pipelines.analytics.index.card_rows import CardRows
from fabric_pipelines.analytics.index.coarse import Coarse
from fabric_pipelines.analytics.index.lattice import CodeLists
from fabric_pipelines.analytics.index.lists import FloatLists
from fabric_pipelines.analytics.index.space import Asked
from fabric_pipelines.analytics.index.store import F64
from fabric_pipelines.analytics.kernels_scans import send
from fabric_pipelines.analytics.resident import LENGTH_MAX, ResidentScan
from fabric_pipelines.analytics.search import Floats, Ids, Queries, norms_of
from fabric_pipelines.device import gpu
from fabric_pipelines.device.card import Card
from fabric_pipelines.errors import DeviceRefused


def opened(kind: str) -> CardScans:
    """On the machine's first card. DeviceRefused for a kind without kernels, and without a card that the shipped kernels run
    on; MissingDependency without CuPy."""
    if kind in ("faiss", "cagra", "ivf_pq"):
        where = (
            "the cpu backend"
            if kind == "faiss"
            else "the cpu backend, and cuVS searches on the card"
        )
        raise DeviceRefused(f"an index of kind {kind!r} has no kernels of its own: use {where}")
    return CardScans(gpu.Gpu(0))


class CardScans:
    """One card and the copies on it of the lists that are asked, made at the first search and kept up."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self._lock = threading.Lock()  # copies are brought up to the lists by one search at a time
        self._places: CardRows | CardCodes | None = None
        self._centroids: tuple[Coarse, ResidentScan] | None = None

    def close(self) -> None:
        self._places = self._centroids = None
        self.card.close()

    def nearest(self, coarse: Coarse, working: Floats, count: int) -> tuple[F64, Ids]:
        """As Coarse.nearest, to the last bit."""
        count = min(count, len(coarse))
        with self._lock:
            if self._centroids is None or self._centroids[0] is not coarse:
                self._centroids = None  # its memory goes first
                self._centroids = coarse, self._sent(coarse)
        found, left = self._centroids[1].search(Queries(working, "l2"), count)
        D, lists = found.D, found.I
        if len(left):
            D[left], lists[left] = coarse.nearest(working[left], count)
        return D, lists

    def _sent(self, coarse: Coarse) -> ResidentScan:
        rows = coarse.centroids
        reach = norms_of(rows.astype(np.float64))
        fits = rows.dtype == np.float32 and reach.max(initial=0.0) < LENGTH_MAX
        parts = [
            send(self.card, part)
            for part in (
                rows if fits else rows[:0].astype(np.float32),
                np.arange(len(rows) if fits else 0),
                reach[: len(rows) if fits else 0].astype(np.float32),
            )
        ]
        return ResidentScan(self.card, *parts, metric="l2", length_max=0.0)

    def of_all(self, lists: FloatLists, asked: Asked, k: int, block: int) -> Proposed:
        """What lists.scan(asked, None, k) proposes, or more, or less where it says so."""
        with self._lock:
            rows = self._followed(lists, block)
            assert isinstance(rows, CardRows), "rows were copied as codes"
            return rows.of_all(asked, k) if rows.fits else nothing_settled(len(asked.open))

    def probed(
        self, lists: FloatLists | CodeLists, asked: Asked, probes: Ids, apart: F64, k: int,
        *, watch: bool,
    ) -> Proposed:  # fmt: skip
        """What lists.scan proposes of the lists probes [o, p], as above; watch: and the nearest row of each."""
        with self._lock:
            places = self._followed(lists, None)
            if not places.fits:
                return nothing_settled(len(asked.open))
            if isinstance(places, CardCodes):
                return places.probed(asked, probes, apart, k, watch=watch)
            return places.probed(asked, probes, k, watch=watch)

    def _followed(self, lists: FloatLists | CodeLists, block: int | None) -> CardRows | CardCodes:
        if self._places is None or self._places.lists is not lists:
            self._places = None  # its memory goes first
            if isinstance(lists, CodeLists):
                self._places = CardCodes(self.card, lists)
            else:
                self._places = CardRows(self.card, lists, block=block)
        self._places.follow()
        return self._places
