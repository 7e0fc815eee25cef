"""What each pass costs on a card: the bytes that it holds there at most beyond the rows, and its arithmetic where a kernel's differs
from the CPU's. Known before anything is sent, from the sizes of the clusters alone.

A sum here and an array taken in analytics.kernels* belong together: tests/gpu/test_card_plan.py counts what a stand-in hands out.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fabric_pipelines.analytics import kernels_moments, kernels_tiles
from fabric_pipelines.analytics.csr import Csr
from fabric_pipelines.analytics.neighbours import LOF_NEIGHBOURS
from fabric_pipelines.analytics.sweeps import Cost

RUN_ROWS = 256  # rows of one partial sum: kRun of csr_centroid.cu
SLAB = 128  # dimensions of one warp: kSlab of csr_centroid.cu
REDUCE_ROWS = 1024  # rows of one partial: kRun of csr_reduce.cu
MOVE_ROWS = 128  # rows of one partial: kRun of two_means.cu
WINDOW_BYTES = 1 << 30  # partial sums, or centred rows, held at once
STURM_FLOP = 53 * 4  # halvings of an eigenvalue, and a step of a count
SHARES = 3  # quantiles asked at once


def window_width(slots: int, dim: int, window_bytes: int | None = None) -> int:
    """Dimensions whose partial sums, one f64 a slot, fit the window; 128 at least."""
    window = WINDOW_BYTES if window_bytes is None else window_bytes
    return min(dim, max(SLAB, window // max(1, 8 * slots) // SLAB * SLAB))


def window_rows(dim: int, window_bytes: int | None = None) -> int:
    """Centred rows, with what is found of them, that fit the window."""
    window = WINDOW_BYTES if window_bytes is None else window_bytes
    return max(1, window // row_bytes(dim))


def row_bytes(dim: int) -> int:
    """A centred row and what is found of it, its neighbours most of all."""
    return 4 * kernels_tiles.pitch_of(dim) + 8 * kernels_tiles.NEIGHBOURS_MAX + 48


def opening_bytes(csr: Csr) -> int:
    """Rows, ids and borders, which stay."""
    return len(csr.rows) * (4 * csr.dim + 8) + 8 * (csr.clusters + 1)


def costs(csr: Csr) -> Mapping[str, Cost]:
    """Of every pass, if it runs on the card."""
    rows, dim, clusters = len(csr.rows), csr.dim, csr.clusters
    largest = int(csr.sizes.max(initial=0))
    means = 8 * clusters * dim
    reduced = 48 * (2 * clusters + -(-rows // REDUCE_ROWS))
    sums = 8 * rows + means + _partials(rows, RUN_ROWS, csr)
    radii = 16 * rows + means
    table = 8 << (2 * rows - 1).bit_length() if rows else 0
    listed = min(LOF_NEIGHBOURS, max(0, largest - 1))
    place = 4 if rows <= np.iinfo(np.int32).max else 8
    pitch = 4 * kernels_tiles.pitch_of(dim)
    centres = clusters * (pitch + 36) + 32
    points = centres + 8 * (rows + dim) + 64 + min(rows, window_rows(dim)) * (pitch + 48)
    at_once = min(rows, max(window_rows(dim), largest))
    quantile = 9 * rows + 8 * (clusters + 1)  # of P8 and P9, once their tiles are gone
    window = 8 * rows + at_once * (pitch + 48) + means + 48 * clusters + 64
    slots = -(-rows // MOVE_ROWS) + clusters
    halves = 26 * rows + 2 * means + 25 * clusters + 8 * slots + _partials(rows, MOVE_ROWS, csr)
    return {
        "P1": Cost(max(25 * rows, 9 * rows + reduced)),
        "P2": Cost(sums),
        "P3": Cost(max(radii, 9 * rows + reduced)),
        "P4": Cost(max(9 * rows + 8 * SHARES * (clusters + 1), 32 * rows + table + reduced)),
        "P5": Cost(max(radii, sums)),
        "P6": _spectra(csr),
        "P7": Cost(centres),
        "P8": Cost(max(points, quantile)),
        "P9": Cost(max(window + at_once * 8 * listed, quantile)),
        "P10": Cost(((place + 8) * listed + 53) * rows + 8 * clusters),
        "P11": Cost(window),
        "P12": Cost(halves),
    }


def _partials(rows: int, run: int, csr: Csr) -> int:
    slots = -(-rows // run) + csr.clusters
    return 8 * slots * window_width(slots, csr.dim)


def _spectra(csr: Csr) -> Cost:
    """Three moments, one after another: upper halves, then 4/3 m^3 and the counts of m eigenvalues each."""
    size = csr.sizes[csr.sizes > 0]
    side = np.minimum(size, csr.dim).astype(np.float64)
    flop = 3 * float((size * csr.dim * side + 4 / 3 * side**3 + STURM_FLOP * side**2).sum())
    return Cost(kernels_moments.bytes_needed(csr), flop)
