"""A fall of recall is told from the noise of asking other rows."""

from __future__ import annotations

import numpy as np
import pytest

from fabric_pipelines import shards
from fabric_pipelines.shards import probing
from fabric_pipelines.testing.vector_store import MemoryVectorStore

ROWS, DIM, SEEDS = 1500, 16, 8


def corpus(count, rng):
    """One broad cloud: its lists have neighbours across every border, so recall is far from 1."""
    return rng.standard_normal((count, DIM)).astype(np.float16)


def built(root, rng):
    store = MemoryVectorStore()
    store.put(np.arange(ROWS, dtype=np.int64), corpus(ROWS, rng))
    shards.build(store, root, "notes", lists=24, seed=1, metric="l2", recipe={}, iterations=4)
    return store


def move(store, kind, count, rng):
    known = np.array(sorted(store.rows), np.int64)
    if kind == "inserted":
        store.put(known[-1] + 1 + np.arange(count), corpus(count, rng))
    elif kind == "deleted":
        store.remove(rng.choice(known, count, replace=False))
    else:
        store.put(rng.choice(known, count, replace=False), corpus(count, rng))


@pytest.mark.parametrize("kind", ["inserted", "deleted", "changed"])
def test_moves_of_the_same_distribution_never_force_a_full_build(tmp_path, kind, monkeypatch):
    """Few questions make it hard: with 200 of them, two samples of one shard differ by 0.02 and more."""
    monkeypatch.setattr(probing, "QUERIES_MAX", 200)
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        store = built(tmp_path / str(seed), rng)
        for _ in range(2):
            move(store, kind, ROWS // 100, rng)
            done = shards.refresh(store, tmp_path / str(seed), "notes")
            assert (done.how, done.why) == ("increment", "")


def test_the_error_that_is_stated_bounds_the_error_that_is_met(tmp_path, monkeypatch):
    monkeypatch.setattr(probing, "QUERIES_MAX", 300)
    met, stated = [], []
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        root = tmp_path / str(seed)
        store = built(root, rng)
        with shards.open_shard(store, root, "notes") as shard:
            base = probing.probed(shard).recall
        move(store, "changed", ROWS // 20, rng)
        shards.refresh(store, root, "notes")
        with shards.open_shard(store, root, "notes") as shard:
            now = probing.probed(shard)
        met.append(now.recall - base)
        stated.append(now.error)
        assert 0.02 < now.renewed < 0.12
    assert np.sqrt(np.mean(np.square(met))) < np.mean(stated)


@pytest.mark.parametrize("kind", ["inserted", "changed"])
def test_rows_in_a_far_cloud_that_no_centroid_was_trained_for_force_a_full_build(tmp_path, kind):
    """Centroids lie in tight clusters; the cloud is cut between nearly all of them."""
    rng = np.random.default_rng(0)
    centres = 2 * rng.standard_normal((80, DIM))
    store = MemoryVectorStore()
    tight = centres[np.arange(ROWS) % 80] + 0.1 * rng.standard_normal((ROWS, DIM))
    store.put(np.arange(ROWS, dtype=np.int64), tight)
    shards.build(store, tmp_path, "notes", lists=80, seed=1, metric="l2", recipe={}, iterations=4)
    ids = np.arange(270, dtype=np.int64) + (ROWS if kind == "inserted" else 0)
    store.put(ids, 12 * np.eye(1, DIM) + 8 * rng.standard_normal((270, DIM)))
    done = shards.refresh(store, tmp_path, "notes")
    assert (done.how, done.why[:38]) == ("full", "recall@10 of probed search fell by 0.0")


def test_an_insert_or_a_delete_replaces_no_other_question():
    ids = np.random.default_rng(0).integers(0, 1 << 60, 5000)
    asked = set(ids[probing.smallest(ids, 500)].tolist())
    gone = set(ids[::50].tolist())
    left = np.array([name for name in ids.tolist() if name not in gone])
    now = set(left[probing.smallest(left, 500)].tolist())
    assert asked - gone <= now
    more = np.concatenate([ids, np.arange(100)])
    grown = set(more[probing.smallest(more, 500)].tolist())
    assert grown - set(range(100)) <= asked
    assert len(asked - grown) == len(grown & set(range(100))) < 30


def test_questions_are_as_many_as_some_seconds_allow():
    assert probing.questions(20_000, 64) == 2000
    assert probing.questions(1_000_000, 384) == 260
    assert probing.questions(1 << 40, 384) == 64


def test_a_fall_within_noise_is_none():
    sample = probing.Probed(recall=0.93, deviation=0.2, questions=100, renewed=0.01)
    assert sample.error == pytest.approx(0.2 * (2 * 0.21 / 100) ** 0.5)
    assert sample.fell(0.93 + 2.9 * sample.error) == 0
    assert sample.fell(0.93 + 3.1 * sample.error) == pytest.approx(3.1 * sample.error)
    assert probing.Probed(0.93, 0.2, 100, 0.5).error == pytest.approx(0.2 * (2 / 100) ** 0.5)
    steady = probing.Probed(recall=0.93, deviation=0.2, questions=100, renewed=0.0)
    assert (steady.fell(0.9399), steady.fell(0.95)) == (0, pytest.approx(0.02))
