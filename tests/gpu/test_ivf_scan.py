"""Kernel family ivf_scan against its twin and the CPU's inverted file: the source on the CPU, and the cubin on a real card."""

import numpy as np
import pytest

from fabric_pipelines.analytics import kernels_scans as scans
from fabric_pipelines.analytics.index.lists import FloatLists
from fabric_pipelines.analytics.index.space import Asked, Space
from fabric_pipelines.analytics.reference import ivf_scan as twin
from fabric_pipelines.analytics.search import norms_of
from fabric_pipelines.device.card import Card
from fabric_pipelines.errors import UsageError
from tests.gpu.grid import both

SIZES = np.array([0, 1, 7, 8, 9, 33, 0, 1025])
PROBES = np.array([[0, 1, 2, 3, 4, 5, 6, 7], [2, 4, -1, -1, 0, -1, 1, -1], [-1] * 8, *[[7, 5, 4, 3, 2, 1, 0, -1]] * 4])  # fmt: skip
METRICS = ["l2", "ip", "cosine"]


def drawn(dim: int, *, whole: bool, sizes: np.ndarray = SIZES) -> tuple[np.ndarray, ...]:
    """Rows, lengths, ids, queries; whole numbers, whose distances float32 holds exactly, have many ties."""
    rng = np.random.default_rng([dim, whole])
    count = int(sizes.sum())
    if whole:
        rows, xq = rng.integers(-3, 4, (count, dim)), rng.integers(-3, 4, (len(PROBES), dim))
    else:
        rows, xq = rng.standard_normal((count, dim)), rng.standard_normal((len(PROBES), dim))
    rows, xq = rows.astype(np.float32), xq.astype(np.float32)
    length = norms_of(rows.astype(np.float64)).astype(np.float32)
    length[rng.random(count) < 0.1] = np.nan
    rows[3], rows[5, -1] = np.nan, np.inf
    length[3] = length[5] = np.nan
    return rows, length, rng.permutation(count).astype(np.int64) << 33, xq


def on(card: Card, rows: np.ndarray, length: np.ndarray, ids: np.ndarray) -> scans.FloatStore:
    indptr = np.concatenate([[0], np.cumsum(SIZES)])
    return scans.FloatStore(*(card.upload(part) for part in (rows, length, ids, indptr)), SIZES)


def scan(card: Card, host: tuple, probes: np.ndarray, k: int, metric: str, **rest: object) -> list:
    *stored, xq = host
    reach = norms_of(xq.astype(np.float64)).astype(np.float32)
    found = scans.ivf_scan(
        card, on(card, *stored), card.upload(xq), card.upload(reach), probes, k, metric, **rest
    )
    return [card.download(part) for part in found]


def probed(host: tuple, query: int, metric: str) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """What each probe of a query sees, by the twin."""
    rows, length, _, xq = host
    indptr, out = np.concatenate([[0], np.cumsum(SIZES)]), []
    for number in PROBES[query][PROBES[query] >= 0]:
        own = np.arange(indptr[number], indptr[number + 1])
        with np.errstate(invalid="ignore"):
            distance = twin.distances(xq[query], rows[own], metric)
        out.append((int(number), np.where(np.isnan(length[own]), np.nan, distance), own))
    return out


def every(host: tuple, query: int, metric: str) -> tuple[np.ndarray, np.ndarray]:
    parts = [part[1:] for part in probed(host, query, metric)]
    if not parts:
        return np.empty(0), np.empty(0, np.int64)
    return np.concatenate([d for d, _ in parts]), np.concatenate([row for _, row in parts])


@pytest.mark.parametrize("metric", ["l2", "ip"])
@both("dim,k", [(d, k) for d in (1, 3, 32, 33, 129, 768, 4096) for k in (1, 10, 32, 33, 128)],
      [(1, 33), (3, 10), (33, 128), (129, 1)])  # fmt: skip
def test_whole_numbers_give_the_twins_answer_to_the_bit_counting_or_not_on_any_grid(
    card: Card, dim: int, k: int, metric: str
) -> None:
    host = drawn(dim, whole=True)
    plain = scan(card, host, PROBES, k, metric)
    counts = scans.health_of(card, len(SIZES))
    counting = scan(card, host, PROBES, k, metric, health=counts, blocks=1)
    assert [part.tobytes() for part in plain] == [part.tobytes() for part in counting]
    for query in range(len(PROBES)):
        distance, row = twin.nearest(*every(host, query, metric), k)
        assert plain[2][query] == len(row)
        assert np.array_equal(plain[0][query, : len(row)], distance)
        assert np.array_equal(plain[1][query, : len(row)], host[2][row])
        assert np.isnan(plain[0][query, len(row) :]).all()
        assert (plain[1][query, len(row) :] == -1).all()
    seen = [
        [(n, d.astype(np.float32), row) for n, d, row in probed(host, query, metric)]
        for query in range(len(PROBES))
    ]
    expected = twin.counted(seen, len(SIZES), k)
    for found, true in zip(counts, expected, strict=True):
        assert np.array_equal(card.download(found), true)
    assert expected.hit.sum() == plain[2].sum()
    assert expected.probe.sum() == (PROBES >= 0).sum()


@pytest.mark.parametrize("metric", METRICS)
@both("dim", [1, 2, 31, 128, 384, 1025, 4096], [2, 65, 257])
def test_distances_are_the_twins_up_to_float32(card: Card, dim: int, metric: str) -> None:
    host, k = drawn(dim, whole=False), 20
    found = scan(card, host, PROBES, k, metric)
    for query in range(len(PROBES)):
        distance, row = every(host, query, metric)
        true, order = twin.nearest(distance, row, k)
        size = 1.0 if metric == "cosine" else (norms_of(host[3][query].astype(float)[None])[0] + 4 * np.sqrt(dim)) ** 2  # fmt: skip
        off = (dim / 32 + 8) * 2.0**-24 * size
        kept = found[2][query]
        assert kept == len(order)
        np.testing.assert_allclose(found[0][query, :kept], true, rtol=0, atol=off)
        by_id = dict(zip(host[2][row].tolist(), distance, strict=True))
        named = [by_id[one] for one in found[1][query, :kept].tolist()]
        assert len(set(found[1][query, :kept].tolist())) == kept
        np.testing.assert_allclose(found[0][query, :kept], named, rtol=0, atol=off)


def test_ids_are_those_of_the_cpus_inverted_file(card: Card) -> None:
    rows, length, ids, xq = drawn(40, whole=False)
    good = ~np.isnan(length)
    space = Space("l2", np.zeros(40))
    lists, labels = FloatLists(space, len(SIZES)), np.repeat(np.arange(len(SIZES)), SIZES)
    reach = norms_of(np.where(good[:, None], rows, 0).astype(np.float64))
    lists.append(labels[good], rows[good], reach[good], np.flatnonzero(good))
    asked = Asked(xq, space)
    query, slot = lists.scan(asked, PROBES, 10)
    distance, found, count = scan(card, (rows, length, ids, xq), PROBES, 10, "l2")
    for number in range(len(xq)):
        slots = slot[query == number]
        apart = twin.distances(xq[number], rows[slots], "l2")
        expected = ids[twin.nearest(apart, slots, 10)[1]]
        assert np.array_equal(found[number, : count[number]], expected)
        assert (np.diff(distance[number, : count[number]]) >= 0).all()


@pytest.mark.parametrize("metric", METRICS)
def test_a_signal_in_the_last_dimension_decides(card: Card, metric: str) -> None:
    rows, length, ids, xq = drawn(161, whole=True)
    rows[:], xq[:] = 1.0, 1.0
    rows[:, -1] = np.random.default_rng(1).permutation(len(rows)) * 20 / len(rows)
    xq[:, -1] = 5000
    length[:] = norms_of(rows.astype(np.float64))
    found = scan(card, (rows, length, ids, xq[:1]), PROBES[:1], 3, metric)
    assert found[1][0].tolist() == ids[np.argsort(-rows[:, -1])[:3]].tolist()


def test_what_the_scan_does_not_do_is_refused_by_name(card: Card) -> None:
    host = drawn(4, whole=True)
    with pytest.raises(UsageError, match="k = 200"):
        scan(card, host, PROBES, 200, "l2")
    with pytest.raises(UsageError, match="7 queries"):
        scan(card, host, PROBES[:2], 3, "l2")
    nobody = (*host[:3], host[3][:1])
    assert scan(card, nobody, PROBES[2:3], 3, "l2")[2].tolist() == [0]
