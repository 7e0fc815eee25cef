"""Rows on a card for tests, real or stand-in: one body for both."""

from __future__ import annotations

import numpy as np

from fabric_pipelines.analytics.resident import ResidentScan
from fabric_pipelines.analytics.search import Metric, Ranked
from fabric_pipelines.device.card import Card


def tight_rows(count: int, dim: int, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows float32 that `kind` holds exactly, in clusters sorted one after the other (the worst order for a tile),
    with shuffled ids; and queries, of which some are rows."""
    rng = np.random.default_rng([count, dim])
    label = np.sort(rng.integers(0, max(1, count // 50), count))
    centres = rng.standard_normal((max(1, count // 50), dim))
    rows = centres[label] + 1e-2 * rng.standard_normal((count, dim))
    rows = rows.astype(kind).astype(np.float32)
    near = rows[rng.integers(0, count, 3)]
    xq = np.concatenate([near, near + np.float32(1e-3), rng.standard_normal((4, dim))])
    return rows, rng.permutation(count).astype(np.int64) + (7 << 40), xq.astype(np.float32)


def on_card(
    card: Card, rows: np.ndarray, ids: np.ndarray, metric: Metric, dead: np.ndarray | None = None
) -> ResidentScan:
    length = np.sqrt(np.square(rows.astype(np.float64)).sum(axis=1))
    top = float(length.max(initial=0))
    if dead is not None:
        length[dead] = np.nan
    parts = []
    for host in (rows, ids, length.astype(np.float32)):
        parts.append(card.empty(host.shape, host.dtype))
        card.store(parts[-1], host)
    return ResidentScan(card, *parts, metric=metric, length_max=top)


def same_answers(found: Ranked, truth: Ranked) -> None:
    np.testing.assert_array_equal(found.found, truth.found)
    np.testing.assert_array_equal(found.I, truth.I)
    assert found.D.tobytes() == truth.D.tobytes()
