"""Twin of cuda/ivf_scan.cu: one query at a time, one probed list at a time, distances in float64."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
BINS = 64


class Counted(NamedTuple):
    """probe, hit and wasted [lists], margin [64]."""

    probe: I64
    hit: I64
    wasted: I64
    margin: I64


def distances(query: F32, rows: F32, metric: str) -> F64:
    """float64 [n]; the rows' lengths are their norms."""
    q, x = query.astype(np.float64), rows.astype(np.float64)
    if metric == "l2":
        apart: F64 = ((q - x) ** 2).sum(axis=1)
        return apart
    product = x @ q
    if metric == "ip":
        return -product
    with np.errstate(invalid="ignore", divide="ignore"):
        cosine: F64 = 1 - product / (np.sqrt((q * q).sum()) * np.sqrt((x * x).sum(axis=1)))
    return cosine


def nearest(distance: F64 | F32, row: I64, k: int) -> tuple[F64 | F32, I64]:
    """The k least of one query and their rows, ties to the lower row; NaN is never taken."""
    order = np.lexsort((row, distance))
    order = order[~np.isnan(distance[order])][:k]
    return distance[order], row[order]


def counted(per_query: list[list[tuple[int, F32, I64]]], lists: int, k: int) -> Counted:
    """per_query: for each query its probes (list, distances of the list's rows, rows), distances float32 as scanned."""
    out = Counted(*(np.zeros(size, np.int64) for size in (lists, lists, lists, BINS)))
    for probes in per_query:
        every = [part for part in probes if len(part[1])]
        together = [np.concatenate([part[i] for part in every]) for i in (1, 2)] if every else []
        kept, rows = nearest(together[0], together[1], k) if every else (np.empty(0), np.empty(0))
        for number, distance, row in probes:
            hits = int(np.isin(row, rows).sum())
            out.probe[number] += 1
            out.hit[number] += hits
            out.wasted[number] += hits == 0
            if np.any(~np.isnan(distance)):
                out.margin[bin_of(np.float32(np.nanmin(distance)), np.float32(kept[-1]))] += 1
    return out


def bin_of(least: np.float32, last: np.float32) -> int:
    """Where a list's least distance lies beside the query's last one that was kept; below 32: the list had a hit."""
    with np.errstate(over="ignore", invalid="ignore"):
        size = np.abs(least) + np.abs(last)
        if not size > 0 or np.isinf(size):
            return BINS // 2
        margin = (least - last) / size
        return min(max(int((margin + np.float32(1)) * np.float32(32)), 0), BINS - 1)
