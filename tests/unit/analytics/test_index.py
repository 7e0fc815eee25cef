"""VectorIndex: every kind answers with exact distances of what it looked at, whatever was added and removed before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from fabric_pipelines.analytics.index import Exact, Inverted, Lattice, VectorIndex, lattice, lists
from fabric_pipelines.analytics.index.tradeoff import best_steps
from fabric_pipelines.analytics.reference.flat_topk import flat_topk
from fabric_pipelines.analytics.search import METRICS, NO_ID, pair_distance, recall_at_k
from fabric_pipelines.errors import UsageError

KINDS = (Exact(), Inverted(lists=9), Lattice(lists=9), Lattice(bits=2, lists=1))
EVERYTHING = {"exact": {}, "inverted": {"nprobe": 999}, "lattice": {"nprobe": 999, "rerank": 9999}}


def clustered(rows, dim, seed=0, clusters=12, spread=0.3):
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((clusters, dim))
    return (centres[rng.integers(0, clusters, rows)] + spread * rng.standard_normal((rows, dim))).astype(np.float32)  # fmt: skip


def assert_answers_as_twin(index, held, xq, k):
    ids = np.array(sorted(held), np.int64)
    rows = np.array([held[i] for i in ids.tolist()], np.float32).reshape(len(ids), index.dim)
    D, I, found = index.search(xq, k, **EVERYTHING[index.kind.name])  # noqa: E741
    true_d, true_i, true_found = flat_topk(xq, rows, ids, k, metric=index.metric)
    np.testing.assert_array_equal(I, true_i)
    np.testing.assert_array_equal(found, true_found)
    np.testing.assert_array_equal(D, true_d)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dim", [1, 7, 33, 129])
def test_looking_at_everything_every_kind_is_exact(kind, metric, dim):
    rows = clustered(250, dim, dim)
    rows[3], rows[4], rows[5] = np.nan, np.inf, 0.0
    rows[6:9] = rows[10]  # copies
    ids = np.random.default_rng(1).permutation(250).astype(np.int64) * 3 - 101
    index = VectorIndex.build(rows, ids, kind=kind, metric=metric)
    xq = np.concatenate([rows[:12], clustered(6, dim, 9), np.full((1, dim), 1e-20, np.float32)])
    assert_answers_as_twin(index, dict(zip(ids.tolist(), rows, strict=True)), xq, 10)
    assert_answers_as_twin(index, dict(zip(ids.tolist(), rows, strict=True)), xq[:1], 300)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@settings(max_examples=8, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "remove", "train"]), st.integers(0, 2**32 - 1)),
        max_size=8,
    ),
    st.sampled_from(METRICS),
)
def test_any_history_of_adds_and_removals_answers_as_its_rows_do(kind, steps, metric):
    index, held = VectorIndex(3, kind=kind, metric=metric), {}
    for what, seed in steps:
        rng = np.random.default_rng(seed)
        ids = rng.integers(0, 30, rng.integers(0, 25))  # often twice in one add
        if what == "add":
            rows = rng.integers(-2, 3, (len(ids), 3)).astype(np.float32)
            new = len(set(ids.tolist()) - set(held))
            assert index.add(rows, ids) == new
            held.update(zip(ids.tolist(), rows, strict=True))
        elif what == "remove":
            assert index.remove(ids) == len(set(ids.tolist()) & set(held))
            held = {name: row for name, row in held.items() if name not in set(ids.tolist())}
        else:
            index.train()
        assert len(index) == len(held)
        assert_answers_as_twin(index, held, np.eye(3) + 0.5, 7)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_index_without_rows_finds_nothing_and_takes_rows_afterwards(kind):
    rows = clustered(60, 5)
    index = VectorIndex.build(rows[:40], np.arange(40), kind=kind, metric="l2")
    assert index.remove(np.arange(40)) == 40
    D, I, found = index.search(rows, 3)  # noqa: E741
    assert found.tolist() == [0] * 60
    assert (I == NO_ID).all()
    assert np.isnan(D).all()
    index.train()
    assert index.search(rows, 3).found.sum() == 0
    assert index.add(rows, np.arange(60)) == 60
    assert_answers_as_twin(index, dict(enumerate(rows)), rows[:5], 3)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_answers_are_the_same_bytes_on_any_number_of_threads_and_for_any_batch(
    kind, metric, monkeypatch
):
    rows = clustered(1500, 24)
    index = VectorIndex.build(rows, np.arange(1500), kind=kind, metric=metric)
    effort = {"exact": {}, "inverted": {"nprobe": 3}, "lattice": {"nprobe": 3, "rerank": 25}}
    answers = []
    for threads, batch in ((1, 60), (2, 60), (2, 7), (1, 1)):
        monkeypatch.setattr(lists, "FLOP_FOR_THREADS", 0 if threads > 1 else 1e99)
        monkeypatch.setattr(lattice, "VALUES_FOR_THREADS", 0 if threads > 1 else 1e99)
        monkeypatch.setattr(lists, "TILE_PAIRS", 1000 * batch)
        with threadpool_limits(threads):
            parts = [
                index.search(rows[:60][s : s + batch], 10, **effort[kind.name])
                for s in range(0, 60, batch)
            ]
        answers.append([np.concatenate([part.D for part in parts]), np.concatenate([part.I for part in parts])])  # fmt: skip
    for D, found in answers[1:]:
        assert D.tobytes() == answers[0][0].tobytes()
        assert found.tobytes() == answers[0][1].tobytes()
    own = pair_distance(rows[answers[0][1][:, 4]], rows[:60], metric)
    np.testing.assert_array_equal(own, answers[0][0][:, 4])


@pytest.mark.parametrize("kind", [Inverted(), Lattice(), Lattice(bits=2)], ids=str)
def test_recall_is_measured_on_every_build_and_searches_reach_it(kind):
    rows = clustered(2500, 32, clusters=60, spread=0.5)
    index = VectorIndex.build(rows, np.arange(2500), kind=kind, metric="cosine")
    kept = index.quality
    assert kept is not None
    assert kept.recall >= kind.aim
    assert kept.nprobe < 50
    xq = clustered(100, 32, clusters=60, spread=0.5)
    _, truth, _ = flat_topk(xq, rows, np.arange(2500), 10, metric="cosine")
    assert recall_at_k(index.search(xq, 10).I, truth) > 0.9
    grown = [p.recall for p in kept.points if p.rerank == kept.points[0].rerank]
    assert grown == sorted(grown)


def test_more_candidates_find_more_and_all_find_everything():
    rows = clustered(2000, 64, clusters=4)
    index = VectorIndex.build(rows, np.arange(2000), kind=Lattice(bits=2, lists=4), metric="l2")
    xq = clustered(100, 64, clusters=4, seed=3)
    _, truth, _ = flat_topk(xq, rows, np.arange(2000), 10, metric="l2")
    recalls = [
        recall_at_k(index.search(xq, 10, nprobe=4, rerank=n).I, truth) for n in (10, 20, 40, 2000)
    ]
    assert recalls == sorted(recalls), recalls
    assert recalls[0] > 0.4
    assert recalls[1] > 0.75
    assert recalls[-1] == 1.0


def test_one_row_far_out_does_not_make_every_row_a_candidate(monkeypatch):
    rows = clustered(2000, 16)
    rows[7] = 1e6
    index = VectorIndex.build(rows, np.arange(2000), kind=Exact(), metric="l2")
    offered = []
    of = index._lists.scan
    monkeypatch.setattr(
        index._lists, "scan", lambda *args: offered.append(of(*args)) or offered[-1]
    )
    assert index.search(rows[:50], 5).I[:, 0].tolist() == list(range(50))
    assert len(offered[0][0]) < 50 * 60  # the far row itself asks for all of them


@pytest.mark.parametrize("scale", [1e-30, 1e25])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_scales_that_break_float32_squares_do_not_break_the_list(kind, scale):
    rows = (clustered(300, 12) * np.float64(scale)).astype(np.float32)
    index = VectorIndex.build(rows, np.arange(300), kind=kind, metric="l2")
    assert_answers_as_twin(index, dict(enumerate(rows)), rows[:20], 5)


def test_no_list_takes_more_than_its_bound_when_all_rows_are_copies():
    index = VectorIndex.build(
        np.ones((400, 4), np.float32), np.arange(400), kind=Inverted(lists=20, balance=2.0), metric="l2"
    )  # fmt: skip
    assert index.stats().largest <= 2.0
    assert index.search(np.ones((1, 4)), 3, nprobe=20).I.tolist() == [[0, 1, 2]]


def test_stats_say_what_is_there():
    rows = clustered(100, 8)
    rows[0] = np.nan
    index = VectorIndex.build(rows, np.arange(100), kind=Lattice(bits=2, lists=4), metric="cosine")
    index.remove(np.arange(50, 60))
    stats = index.stats()
    assert (stats.rows, stats.unscorable, stats.tombstones, stats.lists) == (90, 1, 10, 4)
    assert stats.scan_bytes == 89 * (2 + 8 + 4 + 4)
    index.remove(np.arange(1, 50))
    assert index.stats().tombstones == 0  # compacted: more were dead than alive
    assert index.search(rows[70:71], 1).I.tolist() == [[70]]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda i: i.search(np.ones((1, 4)), 1), "dimension 3"),
        (lambda i: i.search(np.ones((1, 3)), 0), "k is 0"),
        (lambda i: i.search(np.ones((1, 3)), 1, nprobe=2), "nprobe is no choice"),
        (lambda i: i.add(np.ones((2, 3)), np.arange(3)), "do not fit 3 ids"),
        (lambda i: i.add(np.ones((1, 3)), np.array([NO_ID])), "nothing was found"),
        (lambda i: i.add(np.ones((1, 3)), np.array([0.5])), "int64"),
        (lambda i: VectorIndex(3, kind=Exact(), metric="dot"), "'dot' is unknown"),
        (lambda i: VectorIndex(3, kind=Lattice(bits=5), metric="l2"), "bits is 5"),
        (lambda i: VectorIndex(3, kind=Inverted(balance=0.5), metric="l2"), "balance is 0.5"),
        (lambda i: VectorIndex(0, kind=Exact(), metric="l2"), "dimension is 0"),
    ],
)
def test_a_wrong_question_is_refused_in_one_sentence(wrong, says):
    index = VectorIndex(3, kind=Exact(), metric="l2")
    with pytest.raises(UsageError, match=says):
        wrong(index)


def test_the_line_of_a_curve_leaves_out_what_a_faster_effort_surpasses():
    taken, recall = np.array([3.0, 1.0, 2.0, 4.0, 1.0]), np.array([0.7, 0.5, 0.9, 0.95, 0.6])
    assert best_steps(taken, recall) == [4, 2, 3]
