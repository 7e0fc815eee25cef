"""Rows times dimensions pass 2^31 early: what every scan reads beyond 2^32 numbers is what lies there.

On the CPU the arrays are sparse, so that they take no memory but where they are touched; a card takes its own. An offset
that was computed in 32 bits reads zeros, or memory that traps.
"""

from typing import Any

import numpy as np
import pytest

from fabric_pipelines.analytics import kernels, resident
from fabric_pipelines.analytics import kernels_moments as moments
from fabric_pipelines.analytics import kernels_scans as scans
from fabric_pipelines.analytics.index import card_rows, e8
from fabric_pipelines.analytics.index.lists import FloatLists
from fabric_pipelines.analytics.index.space import Space
from fabric_pipelines.analytics.reference import csr_syrk as syrk_twin
from fabric_pipelines.analytics.reference import e8_codec_scan as codes_twin
from fabric_pipelines.analytics.reference import ivf_scan as twin
from fabric_pipelines.analytics.search import Queries, exact_topk, norms_of
from fabric_pipelines.device.card import Card
from fabric_pipelines.errors import DeviceRefused, UsageError
from fabric_pipelines.testing.host_gpu import HostGpu

DIM, NEAR = 4096, 40
FAR = (1 << 32) // DIM + 8  # rows before those that are looked at


def vast(card: Card, *shape: int, dtype: Any) -> Any:
    """As large as its shape, and taking less on the CPU."""
    return card.sparse(shape, dtype) if isinstance(card, HostGpu) else card.empty(shape, dtype)


def put(card: Card, target: Any, host: np.ndarray) -> None:
    card.store(target, np.ascontiguousarray(host, target.dtype))


def test_inverted_lists_are_read_beyond_2_32_numbers(card: Card) -> None:
    rng = np.random.default_rng(1)
    near, xq = (rng.standard_normal((count, DIM)).astype(np.float32) for count in (NEAR, 3))
    rows = vast(card, FAR + NEAR, DIM, dtype=np.float32)
    put(card, rows[FAR:], near)
    length = vast(card, FAR + NEAR, dtype=np.float32)
    put(card, length[FAR:], norms_of(near.astype(float)))
    ids, indptr = vast(card, FAR + NEAR, dtype=np.int64), np.array([0, FAR, FAR + NEAR])
    put(card, ids[FAR:], np.arange(NEAR) + (9 << 40))
    store = scans.FloatStore(rows, length, ids, card.upload(indptr), np.diff(indptr))  # type: ignore[attr-defined]
    reach = scans.send(card, norms_of(xq.astype(float)).astype(np.float32))
    found = scans.ivf_scan(card, store, scans.send(card, xq), reach, np.full((3, 1), 1), 5, "l2")
    for query, row in enumerate(card.download(found.id)):
        true = twin.nearest(twin.distances(xq[query], near, "l2"), np.arange(NEAR), 5)[1]
        assert row.tolist() == [(9 << 40) + place for place in true.tolist()]


@pytest.mark.parametrize("dim", [8, DIM])  # of fewer dimensions than rows, and of more
def test_moments_are_of_rows_beyond_2_32_numbers(card: Card, dim: int) -> None:
    far = (1 << 32) // dim + 8
    near = np.random.default_rng(dim).standard_normal((NEAR, dim)).astype(np.float32)
    rows = vast(card, far + NEAR, dim, dtype=np.float32)
    weight = vast(card, far + NEAR, dtype=np.float64)
    put(card, rows[far:], near)
    put(card, weight[far:], np.ones(NEAR))
    place, mean = np.arange(far, far + NEAR), near.astype(float).mean(axis=0, keepdims=True)
    store = moments.Store(rows, weight, scans.send(card, place), scans.send(card, mean))
    (work,) = moments.waves(np.array([0]), np.array([NEAR]), dim)
    found = card.download(moments.csr_syrk(card, store, work, centred=True))
    exact = syrk_twin.moment(near - mean)
    np.testing.assert_allclose(found.reshape(exact.shape), exact, atol=1e-12 * np.trace(exact))


def test_keys_are_merged_beyond_2_32_numbers(card: Card) -> None:
    first, k = 1 << 27, 10
    key = vast(card, first + 1, scans.QUERIES, k, dtype=np.uint64)
    put(card, key[first, 2], (np.arange(k) + (1 << 31) << 32) + np.arange(k)[::-1])
    there = [scans.send(card, np.array(part)) for part in ([0], [first, first + 1], [[2]])]
    plan = scans.Plan(np.zeros(1, np.int64), np.zeros((1, 4), np.int64), there[1], there[2])
    store = scans.FloatStore(key, key, scans.send(card, np.arange(k) + 70), there[1], there[1])
    found = scans.ivf_merge(card, store, scans.Keys(key, plan, *there))
    assert card.download(found.id)[0].tolist() == list(range(79, 69, -1))


def test_codes_are_read_beyond_2_32_words(card: Card) -> None:
    bits, words = 4, DIM * 4 // 32
    far = (1 << 32) // (words * scans.GROUP_ROWS) + 1  # groups
    near = np.random.default_rng(2).integers(0, 256, (NEAR, DIM // 8 * bits), np.uint8)
    packed = scans.interleaved(near, bits)
    codes = vast(card, far + len(packed), words, scans.GROUP_ROWS, dtype=np.uint32)
    put(card, codes[far:], packed)
    terms = vast(card, far + len(packed), scans.GROUP_ROWS, dtype=np.float32)
    groups, sizes = np.array([0, far, far + len(packed)]), np.array([far * 32, NEAR])
    there = scans.E8Codes(
        codes, terms, terms, scans.send(card, groups), scans.send(card, sizes), sizes, bits, DIM
    )
    levels = np.random.default_rng(3).integers(-127, 128, (2, DIM))
    asked = scans.e8_queries(card, there, levels, np.ones(2, np.float32))
    plan = scans.planned(np.full((2, 1), 1), sizes, scans.GROUP_ROWS)
    product = card.download(scans.e8_codec_scan(card, there, asked, plan))
    true = levels @ e8.decode(near, bits).astype(np.int64).T
    for query in range(2):
        assert product[:, query].reshape(-1)[:NEAR].tolist() == true[query].tolist()


def test_products_of_codes_are_ranked_beyond_2_32_numbers(card: Card) -> None:
    first, k, rng = 1 << 26, 7, np.random.default_rng(4)
    product = vast(card, first + 2, scans.QUERIES, scans.GROUP_ROWS, dtype=np.int32)
    exact = rng.integers(-999, 999, 2 * scans.GROUP_ROWS)
    for group, own in enumerate(exact.reshape(2, -1)):
        put(card, product[first + group, 1], own)
    terms = [rng.standard_normal((2, scans.GROUP_ROWS)).astype(np.float32) for _ in range(2)]
    factor, constant = (scans.send(card, term) for term in terms)
    sizes = np.array([NEAR])
    codes = scans.E8Codes(
        factor, factor, constant, scans.send(card, np.array([0, 2])), scans.send(card, sizes),
        sizes, 4, 32,
    )  # fmt: skip
    unit = np.array([0.25], np.float32)
    asked = scans.E8Queries(factor, factor, scans.send(card, unit), 1)
    plan = scans.Plan(
        np.zeros(1, np.int64), np.array([[-1, 0, -1, -1]]), np.array([first, first + 2]), np.array([[1]])
    )  # fmt: skip
    key = scans.e8_codec_best(card, codes, asked, plan, product, np.array([[2.0]]), k)
    place = scans.unpacked(card.download(key))[1][0, 1]
    own = [term.reshape(-1)[:NEAR] for term in terms]
    true = codes_twin.best(exact[:NEAR], own[0], 0.25, own[1], 2.0, k)[1]
    assert place.tolist() == true.tolist()


@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_products_of_rows_are_judged_beyond_2_32_numbers(card: Card, metric: Any) -> None:
    queries, rows, stride = 3, 100, (1 << 31) + 64
    rng = np.random.default_rng(5)
    products, length = rng.standard_normal((queries, rows)), np.full(rows, 2, np.float32)
    there = vast(card, queries, stride, dtype=np.float32)
    for query in range(queries):
        put(card, there[query, :rows], products[query])
    ones = [scans.send(card, part) for part in (length, np.ones(3, np.float32), np.zeros(3, np.float32))]  # fmt: skip
    tile = kernels.TileScores(there, *ones, queries, rows, 0.0, 0.0, metric)
    bound, limit = card.empty((queries, 1024), np.float32), card.empty(queries, np.float32)
    card.fill(bound, 0x7F)
    kernels.flat_slots(card, tile, bound)
    kernels.flat_limit(card, bound, queries, 4, limit)
    before = 1 << 34
    out = (
        scans.send(card, np.zeros(queries, np.int32)),
        vast(card, 8, queries, dtype=np.int64),
        vast(card, 8, queries, dtype=np.float32),
    )
    kernels.flat_take(card, tile, before, limit, 8, out)
    taken = card.download(out[1])[:4]
    for query in range(queries):
        best = np.argsort(-products[query].astype(np.float32))[:4]
        assert sorted(taken[:, query].tolist()) == sorted((best + before).tolist())


def test_rows_kept_for_many_queries_are_written_beyond_2_32_numbers(card: Card) -> None:
    queries, held = 4096, 1 << 20
    products = np.full((queries, 1), 0.5, np.float32)
    parts = (products, np.ones(1, "f4"), np.ones(queries, "f4"), np.zeros(queries, "f4"))
    tile = kernels.TileScores(*(scans.send(card, p) for p in parts), queries, 1, 0.0, 0.0, "cosine")
    limit = scans.send(card, np.ones(queries, np.float32))
    out = (
        scans.send(card, np.full(queries, held, np.int32)),  # as if so many had been taken
        vast(card, held + 1, queries, dtype=np.int64),
        vast(card, held + 1, queries, dtype=np.float32),
    )
    kernels.flat_take(card, tile, 5, limit, held + 1, out)
    assert card.download(out[0]).tolist() == [held + 1] * queries
    assert card.download(out[1][held]).tolist() == [5] * queries
    assert card.download(out[2][held]).tolist() == [0.5] * queries


def test_exact_search_reaches_rows_beyond_2_32_numbers(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    dim = 1 << 16
    far = (1 << 32) // dim + 8
    for name, value in {"QUERY_TILE": 4, "GATHER_ROWS": 64, "CAPACITY": 64}.items():
        monkeypatch.setattr(resident, name, value)
    near = np.random.default_rng(6).standard_normal((NEAR, dim)).astype(np.float32)
    rows = vast(card, far + NEAR, dim, dtype=np.float32)
    put(card, rows[far:], near)
    length = np.full(far + NEAR, np.nan, np.float32)
    length[far:] = norms_of(near.astype(float))
    ids, products = np.arange(far + NEAR) + (3 << 40), card.products

    def of_rows_that_count(left: Any, right: Any, out: Any, *, add: bool = False) -> None:
        first = max(0, far - (card.offset_of(right) - card.offset_of(rows)) // (4 * dim))
        if len(right) > first:
            products(left, right[first:], out[:, first:], add=add)

    if isinstance(card, HostGpu):  # the others are zeros, and cost what they cost
        monkeypatch.setattr(card, "products", of_rows_that_count)
    scan = resident.ResidentScan(
        card, rows, scans.send(card, ids), scans.send(card, length), metric="l2", length_max=1e3
    )
    xq = near[:3] + np.float32(1e-3)
    found, left = scan.search(Queries(xq, "l2"), 5)
    true = exact_topk(xq, near, ids[far:], 5, metric="l2")
    assert len(left) == 0
    assert found.I.tolist() == true.I.tolist()
    assert found.D.tobytes() == true.D.tobytes()


def test_what_a_launch_could_not_count_is_refused_or_cut_before(card: Card) -> None:
    assert card_rows.bytes_needed(1 << 33, 5, DIM) > (1 << 33) * 4 * DIM
    places = card_rows.CardRows(card, FloatLists(Space("l2", np.zeros(DIM)), 3), block=None)
    sizes = np.full(3, 1 << 31)
    assert int(places.rooms(sizes).sum()) > 3 << 31
    places.start = np.concatenate([[0], np.cumsum(places.rooms(sizes))])
    with pytest.raises(DeviceRefused, match="numbers 2\\^32"):
        places.lay_out()
    many = vast(card, 1 << 17, 1 << 14, dtype=np.float32)  # 2^31 numbers of queries
    store = scans.FloatStore(many, many, many, many, np.zeros(1, np.int64))
    with pytest.raises(UsageError, match="2\\^31 numbers"):
        scans.ivf_scan(card, store, many, many, np.zeros((1 << 17, 1), np.int64), 1, "l2")
    rows = np.broadcast_to(np.zeros(1, np.float32), (resident.ROWS_MAX, 1))
    scan = resident.ResidentScan(card, rows, None, None, metric="l2", length_max=1.0)
    assert scan.candidates(Queries(np.ones((2, 1)), "l2"), 1)[2].tolist() == [0, 1]
