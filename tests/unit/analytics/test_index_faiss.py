"""faiss behind the door: same ids, tombstones and distances; a sentence where it is not installed."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from fabric_pipelines.analytics.index import Faiss, VectorIndex
from fabric_pipelines.analytics.reference.flat_topk import flat_topk
from fabric_pipelines.analytics.search import METRICS, recall_at_k
from fabric_pipelines.errors import MissingDependency, UsageError

RNG = np.random.default_rng(2)
ROWS = RNG.standard_normal((600, 16)).astype(np.float32)


def test_without_faiss_a_sentence_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingDependency, match=r"fabric-pipelines\[faiss\]"):
        VectorIndex.build(ROWS, np.arange(600), kind=Faiss(), metric="l2")


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("factory", ["Flat", "IVF8,Flat", "HNSW16"])
def test_faiss_finds_and_our_rows_say_how_far(factory, metric, tmp_path):
    pytest.importorskip("faiss", reason="the extra `faiss` is not installed")
    rows = ROWS.copy()
    rows[3] = np.nan
    index = VectorIndex.build(rows, np.arange(600) * 5, kind=Faiss(factory), metric=metric)
    index.remove(np.arange(0, 300, 2) * 5)
    index.add(rows[:10] + 1, np.arange(10) * 5)
    held = {i * 5: rows[i] for i in range(600) if i % 2 or i >= 300}
    held |= {i * 5: rows[i] + 1 for i in range(10)}
    ids = np.array(sorted(held))
    effort = {"Flat": {}, "IVF8,Flat": {"nprobe": 8}, "HNSW16": {"rerank": 300}}[factory]
    D, found, count = index.search(rows[100:150], 10, **effort)
    true_d, true_i, _ = flat_topk(rows[100:150], np.array([held[i] for i in ids.tolist()]), ids, 10, metric=metric)  # fmt: skip
    assert recall_at_k(found, true_i) > 0.99
    assert set(D[found == true_i]) == set(true_d[found == true_i])
    assert count.tolist() == [10] * 50
    assert index.quality is not None
    assert index.quality.recall > 0.9
    index.save(tmp_path / "kept")
    again = VectorIndex.load(tmp_path / "kept").search(rows[100:150], 10, **effort)
    assert recall_at_k(again.I, true_i) > 0.99
    index.remove(ids[20:])  # more dead than alive: made anew
    kept = {-1, *ids[:20].tolist()} - {15}  # which has no distance
    assert set(index.search(rows[:2], 30, **effort).I[0].tolist()) == kept


def test_a_factory_that_faiss_does_not_know_is_refused():
    pytest.importorskip("faiss", reason="the extra `faiss` is not installed")
    with pytest.raises(UsageError, match="makes no index 'Nonsense7'"):
        VectorIndex.build(ROWS, np.arange(600), kind=Faiss("Nonsense7"), metric="l2")
    with pytest.raises(UsageError, match="nprobe is no choice"):
        VectorIndex.build(ROWS, np.arange(600), kind=Faiss(), metric="l2").search(ROWS, 1, nprobe=2)
