"""Probes that gave nothing: counted as a plain loop counts them, unknown where there were few, and a rule of their own."""

from __future__ import annotations

import numpy as np
import pytest

from fabric_pipelines.analytics.decisions import Decision, decide
from fabric_pipelines.analytics.index import Inverted, VectorIndex
from fabric_pipelines.analytics.index.coarse import Coarse
from fabric_pipelines.analytics.probes import (
    PROBES_MIN,
    WIDTH,
    WIDTH_MAX,
    K,
    Probes,
    of_own_rows,
    questions,
)
from fabric_pipelines.analytics.readings import Status
from fabric_pipelines.analytics.rules import Verdict, shipped
from fabric_pipelines.analytics.search import METRICS, Metric, pair_distance
from fabric_pipelines.analytics.signals import OF_SEARCHES, of_searches
from fabric_pipelines.bench.decisions import drawn

RULES = shipped().within(OF_SEARCHES)


def searched(wasted: int, probe: int = 1000, *, width: int = 4) -> Probes:
    """Of the first of ten lists; the others gave always."""
    probes, none = np.full(10, 1000), np.zeros(10, np.int64)
    probes[0], none[0] = probe, wasted
    return Probes(probes, none, width)


def after(*met: Probes, rows: int = 100) -> Decision:
    before: dict[int, Decision] = {}
    for number, probes in enumerate(met, 1):
        found = of_searches(np.full(10, rows), probes)
        before = {each.cluster: each for each in decide(RULES, found, before, number)}
    return before[0]


def test_a_list_that_is_probed_in_vain_is_rebuilt_after_two_measurements_or_at_once() -> None:
    once, twice = after(searched(980)), after(searched(980), searched(981))
    assert (once.verdict, once.seen, once.needed) == (Verdict.KEEP, 1, 2)
    assert (twice.verdict, twice.shown.rule) == (Verdict.REBUILD, "probes_wasted")
    said = {each.signal: (each.value, each.status) for each in twice.shown.evidence}
    assert said == {"size": (100.0, "OK"), "wasted_probes": (0.981, "OK")}
    assert after(searched(995)).verdict is Verdict.REBUILD
    assert after(searched(995), searched(900)).verdict is Verdict.REBUILD
    assert after(searched(995), searched(900), searched(900)).verdict is Verdict.KEEP


def test_too_few_probes_or_too_wide_a_search_say_unknown_and_never_keep() -> None:
    few = after(searched(PROBES_MIN - 1, PROBES_MIN - 1))
    wide = after(searched(0, width=WIDTH_MAX + 1))
    assert (few.verdict, wide.verdict) == (Verdict.UNKNOWN, Verdict.UNKNOWN)
    assert [each.status for each in few.shown.evidence] == ["OK", "U_SIZE"]
    assert [each.status for each in wide.shown.evidence] == ["OK", "U_CONTEXT"]
    assert after(searched(PROBES_MIN, PROBES_MIN)).verdict is Verdict.REBUILD


def test_who_looks_at_every_list_or_at_a_tiny_one_blames_none() -> None:
    assert after(searched(1000, width=10)).verdict is Verdict.KEEP
    assert after(searched(1000), rows=20).verdict is Verdict.KEEP


@pytest.mark.parametrize("metric", METRICS)
def test_own_rows_are_asked_as_a_plain_loop_asks_them(metric: Metric) -> None:
    rng = np.random.default_rng(4)
    rows, lists = rng.standard_normal((160, 6)).astype(np.float32), 8
    rows[20:36] = rows[20]  # a row with more copies than an answer has places
    labels, ids = rng.integers(0, lists - 1, 160), rng.permutation(160) + 1000
    centroids = np.full((lists, 6), np.nan)  # the last one was merged away
    for number in range(lists - 1):
        centroids[number] = rows[labels == number].mean(axis=0)
    place = {int(name): at for at, name in enumerate(ids)}
    asked = questions(ids, lists)
    met = of_own_rows(
        rows[asked], ids[asked], centroids,
        lambda number: (rows[labels == number], ids[labels == number]),
        lambda names: labels[[place[int(name)] for name in names]], metric,
    )  # fmt: skip
    probe, wasted = np.zeros((2, lists), np.int64)
    for at in asked:
        far = pair_distance(np.broadcast_to(rows[at], (lists - 1, 6)), centroids[:-1], metric)
        near = np.argsort(far, kind="stable")[:WIDTH]
        seen = np.flatnonzero(np.isin(labels, near) & (ids != ids[at]))
        apart = pair_distance(np.broadcast_to(rows[at], (len(seen), 6)), rows[seen], metric)
        answer = labels[seen[np.lexsort((ids[seen], apart))[:K]]]
        for number in near:
            probe[number] += 1
            wasted[number] += number not in answer
    assert (met.probe.tolist(), met.wasted.tolist()) == (probe.tolist(), wasted.tolist())
    assert (met.width, met.reading().status[-1]) == (WIDTH, Status.U_SIZE)


def test_sound_lists_of_an_index_stay_below_the_threshold_and_a_stray_centroid_does_not() -> None:
    store = drawn(np.random.default_rng(1), 3000, 32, 30)
    index = VectorIndex.build(
        store.rows, np.arange(len(store.rows)), kind=Inverted(lists=30), metric="cosine"
    )
    sizes = index.list_sizes()

    def verdicts(nprobe: int) -> list[Verdict]:
        met = index.search(store.rows, K, nprobe=nprobe, health=True).health
        assert met is not None
        found = of_searches(sizes, Probes(met.probe, met.wasted, nprobe))
        return [each.verdict for each in decide(RULES, found, {}, 1)]

    for nprobe in (2, 4, 8):
        assert set(verdicts(nprobe)) == {Verdict.KEEP}
    assert index._coarse is not None
    centroids = index._coarse.centroids.copy()
    host = int(sizes.argmax())
    far = (centroids @ centroids[host]).argsort()
    gone = far[sizes[far] > 31][0]
    centroids[gone] = centroids[host] * np.float32(1.001)
    index._coarse = Coarse(centroids)
    said = verdicts(2)
    assert said[gone] is Verdict.REBUILD
    assert set(np.delete(said, gone)) <= {Verdict.KEEP, Verdict.UNKNOWN}
