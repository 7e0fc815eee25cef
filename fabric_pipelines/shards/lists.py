"""Cut rows into lists around centroids: seeded k-means whose result depends on the rows alone.

Every step has one order. The first centroids are the rows whose mixed ids are smallest (no random stream that a
library version could change), assignment is an exact nearest-centroid search in which ties go to the lower
list, sums run in float64 over rows sorted by list and id. So the same rows and seed give the same bytes on
any number of threads. Cosine is spherical: rows count by direction and centroids have length one. Rows that
cannot be scored must be taken out before (admission.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics.search import FlatScan, Floats, Metric, Queries, Ranked
from fabric_pipelines.errors import UsageError
from fabric_pipelines.ledger import hash64

ITERATIONS_DEFAULT = 20
ROWS_AT_ONCE = 1 << 16
TRAINING_ROWS_PER_LIST = 256  # more rows hardly move a centroid (faiss uses the same cap)


@dataclass(frozen=True, slots=True)
class Lists:
    """`order` [n] sorts rows by (list, id); rows indptr[l]:indptr[l+1] of that order form list l."""

    centroids: npt.NDArray[np.float64]
    order: npt.NDArray[np.int64]
    indptr: npt.NDArray[np.int64]
    iterations: int


def cut(
    vectors: Floats,
    ids: npt.NDArray[np.int64],
    count: int,
    *,
    seed: int,
    metric: Metric,
    iterations: int,
    beat: Callable[[], None] = lambda: None,
) -> Lists:
    """Train `count` centroids on the rows, then cut along them. `beat` is called between steps."""
    if not 1 <= count <= len(ids):
        raise UsageError(
            f"{count} lists cannot be cut from {len(ids)} rows: ask for 1 to {len(ids)} lists"
        )
    centroids, steps = train(
        vectors, ids, count, seed=seed, metric=metric, iterations=iterations, beat=beat
    )
    return cut_along(vectors, ids, centroids, metric=metric, iterations=steps)


def cut_along(
    vectors: Floats,
    ids: npt.NDArray[np.int64],
    centroids: npt.NDArray[np.float64],
    *,
    metric: Metric,
    iterations: int = 0,
) -> Lists:
    """Cut rows along given centroids, which stay as they are."""
    labels = nearest_list(vectors, centroids, metric)
    order = np.lexsort((ids, labels)).astype(np.int64)
    indptr = np.zeros(len(centroids) + 1, np.int64)
    np.cumsum(np.bincount(labels, minlength=len(centroids)), out=indptr[1:])
    return Lists(centroids, order, indptr, iterations)


def nearest_list(
    vectors: Floats, centroids: npt.NDArray[np.float64], metric: Metric
) -> npt.NDArray[np.int64]:
    """List [n] of each row: the nearest centroid in float64, ties to the lower list."""
    labels = np.empty(len(vectors), np.int64)
    for start in range(0, len(vectors), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        nearest = _nearest(Queries(vectors[part], metric), centroids)
        assert (nearest.found == 1).all(), "a row that cannot be scored reached the lists"
        labels[part] = nearest.I[:, 0]
    return labels


def train(
    vectors: Floats,
    ids: npt.NDArray[np.int64],
    count: int,
    *,
    seed: int,
    metric: Metric,
    iterations: int,
    beat: Callable[[], None] = lambda: None,
) -> tuple[npt.NDArray[np.float64], int]:
    """Centroids float64 [count, d] and the number of steps taken; stops early when no row changes its list."""
    ranked = _mixed_order(ids, seed)
    sample = np.sort(ranked[: count * TRAINING_ROWS_PER_LIST])
    sample = sample[np.argsort(ids[sample], kind="stable")]
    rows = _directed(np.asarray(vectors[sample], np.float64), metric)
    centroids = _directed(np.asarray(vectors[ranked[:count]], np.float64), metric)
    queries = Queries(rows, metric)
    labels = np.full(len(rows), -1, np.int64)
    for step in range(iterations):
        nearest = _nearest(queries, centroids)
        if np.array_equal(nearest.I[:, 0], labels):
            return centroids, step
        labels = nearest.I[:, 0]
        placed = _fill_empty(labels, nearest.D[:, 0], count)
        centroids = _means(rows, placed, centroids, metric)
        beat()
    return centroids, iterations


def _nearest(queries: Queries, centroids: npt.NDArray[np.float64]) -> Ranked:
    scan = FlatScan(queries, 1)
    scan.add(centroids, np.arange(len(centroids)))
    return scan.ranked()


def _mixed_order(ids: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.int64]:
    """Row numbers in an order that looks random and depends on nothing but id and seed."""
    salt = hash64(np.array([seed], np.int64)).astype(np.int64)[0]
    return np.lexsort((ids, hash64(ids ^ salt))).astype(np.int64)


def _directed(rows: npt.NDArray[np.float64], metric: Metric) -> npt.NDArray[np.float64]:
    if metric == "l2":
        return rows
    directions: npt.NDArray[np.float64] = rows / np.sqrt((rows * rows).sum(axis=1))[:, None]
    return directions


def _fill_empty(
    labels: npt.NDArray[np.int64], distances: npt.NDArray[np.float64], count: int
) -> npt.NDArray[np.int64]:
    """Give each empty list the row farthest from its own centroid, if its list can spare one.

    When all rows lie on their centroids (duplicates) the list stays empty: there is nothing to cut."""
    sizes = np.bincount(labels, minlength=count)
    empty = np.flatnonzero(sizes == 0)
    if not len(empty):
        return labels
    placed = labels.copy()
    farthest = iter(np.lexsort((np.arange(len(labels)), -distances)))
    for target in empty:
        for row in farthest:
            if distances[row] <= 0:
                return placed
            if sizes[placed[row]] > 1:
                sizes[placed[row]] -= 1
                placed[row], sizes[target] = target, 1
                break
    return placed


def _means(
    rows: npt.NDArray[np.float64],
    labels: npt.NDArray[np.int64],
    before: npt.NDArray[np.float64],
    metric: Metric,
) -> npt.NDArray[np.float64]:
    """Mean of each list; an empty list, or one whose directions cancel out, keeps its centroid."""
    order = np.argsort(labels, kind="stable")
    present, starts = np.unique(labels[order], return_index=True)
    # Each list is summed row after row, in the order of ids. (np.add.reduceat along axis 0 is 3 times slower.)
    parts = np.split(order, starts[1:])
    means = np.stack([rows[part].sum(axis=0) / len(part) for part in parts])
    if metric == "cosine":
        norms = np.sqrt((means * means).sum(axis=1))
        kept = norms > 1e-9
        present, means = present[kept], means[kept] / norms[kept, None]
    after = before.copy()
    after[present] = means
    return after
