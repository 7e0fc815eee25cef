"""What a search says it met: the same answer as without, and counts that a plain loop over the same lists finds."""

from __future__ import annotations

import numpy as np
import pytest

from fabric_pipelines.analytics.index import Exact, Inverted, Lattice, VectorIndex, lattice, lists
from fabric_pipelines.analytics.index.space import Asked
from fabric_pipelines.analytics.index.traffic import LEVEL, bins
from fabric_pipelines.analytics.reference.search_health import search_health
from fabric_pipelines.analytics.search import METRICS
from tests.unit.analytics.test_index import clustered

COUNTS = ("probe", "hit", "wasted", "margin")


def built(kind, metric, rows):
    ids = np.random.default_rng(2).permutation(len(rows)) * 5
    index = VectorIndex.build(rows, ids, kind=kind, metric=metric)
    index.remove(ids[10:30])
    index.add(clustered(40, rows.shape[1], seed=8), np.concatenate([ids[40:60], np.arange(20) + 10**6]))  # fmt: skip
    return index


def by_plain_loop(index, xq, nprobe, k):
    """The twin over the index's own lists; for codes the nearest row of a list is sought by score alone."""
    asked = Asked(xq, index._space)
    apart, probes = index._coarse.nearest(asked.working, nprobe)
    listed = np.flatnonzero(index._list_of >= 0)

    def first(query, number, members):
        if isinstance(index.kind, Inverted):
            return members
        far = apart[query, probes[query] == number][:, None]
        found = index._lists.scan(asked.only(np.array([query])), np.array([[number]]), far, 1)[1]
        return np.flatnonzero(np.isin(listed, found))

    return search_health(
        asked.wide[asked.open], index._rows.vectors[listed], index._rows.ids[listed],
        index._list_of[listed], probes, k, metric=index.metric, lists=len(index._lists), first=first,
    )  # fmt: skip


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", [Inverted(lists=12), Lattice(lists=12)], ids=str)
@pytest.mark.parametrize(("batch", "threads"), [(40, False), (40, True), (1, False)])
def test_counts_are_a_plain_loops_and_the_answer_is_the_same_bytes(
    kind, metric, batch, threads, monkeypatch
):
    monkeypatch.setattr(lists, "FLOP_FOR_THREADS", 0 if threads else 1e99)
    monkeypatch.setattr(lattice, "VALUES_FOR_THREADS", 0 if threads else 1e99)
    rows, xq = clustered(500, 16), clustered(40, 16, seed=4)
    rows[100:120] = rows[100]
    xq[7], xq[8] = np.nan, rows[100]
    index = built(kind, metric, rows)
    effort = {"nprobe": 4, "rerank": 9999} if kind.name == "lattice" else {"nprobe": 4}
    total = None
    for start in range(0, len(xq), batch):
        part = xq[start : start + batch]
        plain, told = (index.search(part, 6, **effort, health=on) for on in (False, True))
        for one, other in zip(plain, told, strict=True):
            assert one.tobytes() == other.tobytes()
        assert plain.health is None
        total = told.health if total is None else total + told.health
    for name, true in zip(COUNTS, by_plain_loop(index, xq, 4, 6), strict=True):
        assert getattr(total, name).tolist() == true.tolist(), name
    assert total.probe.sum() == 39 * 4
    assert total.margin[:LEVEL].sum() <= total.probe.sum() - total.wasted.sum()
    assert total.wasted_share == total.wasted.sum() / total.probe.sum()
    assert (total.nonfinite, total.norm_changed) == (0, 0)


@pytest.mark.parametrize("kind", [Exact(), Inverted(lists=4), Lattice(lists=4)], ids=str)
def test_rows_that_rotted_in_memory_are_met_and_counted_once_a_search(kind):
    rows = clustered(300, 8)
    index = VectorIndex.build(rows, np.arange(300), kind=kind, metric="l2")
    index._rows.vectors[11, 2] = np.nan
    index._rows.vectors[12, 3] *= 2
    for queries in (rows[11:13], np.repeat(rows[11:13], 9, axis=0)):
        met = index.search(queries, 4, health=True).health
        assert (met.nonfinite, met.norm_changed) == (1, 1)
    assert met.ranked >= 18 * 4
    assert len(met.probe) == (0 if kind.name == "exact" else 4)


def test_an_index_without_rows_and_queries_without_a_direction_meet_nothing():
    index = VectorIndex(4, kind=Inverted(), metric="cosine")
    empty = index.search(np.ones((2, 4)), 3, health=True).health
    assert (empty.probe.sum(), empty.margin.sum(), empty.ranked) == (0, 0, 0)
    assert np.isnan(empty.wasted_share)
    index.add(clustered(20, 4), np.arange(20))
    nobody = index.search(np.zeros((2, 4)), 3, health=True)
    assert nobody.found.tolist() == [0, 0]
    assert nobody.health.probe.sum() == nobody.health.margin.sum() == 0


def test_a_margin_lies_in_the_bin_of_its_share():
    nearest = np.array([0.0, 0.0, 1.0, 3.0, 1.0, -1e-16, 2.0])
    last = np.array([0.0, 1.0, 1.0, 1.0, 3.0, 1.0, 0.0])
    assert bins(nearest, last).tolist() == [32, 0, 32, 48, 16, 0, 63]
