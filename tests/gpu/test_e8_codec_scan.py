"""Kernel family e8_codec_scan against its twin and the CPU index's own scores: the source on the CPU, and the cubin on a
real card."""

import numpy as np
import pytest

from fabric_pipelines.analytics import kernels_scans as scans
from fabric_pipelines.analytics.index import e8, lattice
from fabric_pipelines.analytics.index.coarse import Coarse
from fabric_pipelines.analytics.index.space import Asked, Space
from fabric_pipelines.analytics.reference import e8_codec_scan as twin
from fabric_pipelines.device.card import Card
from fabric_pipelines.errors import UsageError
from tests.gpu.grid import both

SIZES = np.array([0, 1, 31, 32, 33, 0, 70])
PROBES = np.array([[0, 1, 2, 3, 4, 5, 6], [6, 4, -1, -1, 0, -1, 2], [-1] * 7, *[[6, 4, 3, 2, 1, 0, -1]] * 4])  # fmt: skip


def codes_of(bits: int, dims: int, sizes: np.ndarray = SIZES) -> list[tuple]:
    rng = np.random.default_rng([bits, dims])
    return [
        (rng.integers(0, 256, (size, dims // 8 * bits), np.uint8),
         rng.standard_normal(size).astype(np.float32), rng.standard_normal(size).astype(np.float32))
        for size in sizes
    ]  # fmt: skip


def of_list(product: np.ndarray, plan: scans.Plan, place: int, rows: int) -> np.ndarray:
    task = place // 4
    part = product[plan.first[task] : plan.first[task + 1], place % 4]
    found: np.ndarray = part.reshape(-1)[:rows]
    return found


@pytest.mark.parametrize("bits", [2, 3, 4])
@both("dims,top", [(d, t) for d in (8, 24, 32, 40, 128, 136, 768, 4096, 16384) for t in (127, 900)],
      [(8, 40_000), (24, 900), (32, 127), (40, 32_639), (136, 127), (776, 900)])  # fmt: skip
def test_products_are_those_of_the_twin_in_every_list_and_any_grid(
    card: Card, dims: int, top: int, bits: int
) -> None:
    lists = codes_of(bits, dims)
    rng = np.random.default_rng(top)
    levels = rng.integers(-top, top + 1, (len(PROBES), dims))
    levels[:, 0] = [top, -top, 0, 1, -1, top, 127]
    there = scans.e8_codes(card, lists, bits)
    asked = scans.e8_queries(card, there, levels, np.ones(len(levels)))
    assert asked.planes == (1 if top <= 127 else 2 if top < 32_640 else 3)
    plan = scans.planned(PROBES, there.sizes, scans.GROUP_ROWS)
    found = [
        card.download(scans.e8_codec_scan(card, there, asked, plan, blocks=blocks))
        for blocks in (None, 1)
    ]
    assert found[0].tobytes() == found[1].tobytes()
    for query, number in np.argwhere(plan.at >= 0):
        codes = lists[PROBES[query, number]][0]
        if not len(codes):
            continue
        exact = levels[query] @ e8.decode(codes, bits).astype(np.int64).T
        if dims <= 40:
            assert np.array_equal(twin.products(codes, levels[query, None], bits)[0], exact)
        assert np.array_equal(of_list(found[0], plan, plan.at[query, number], len(codes)), exact)


@both("bits,dim", [(b, d) for b in (2, 3, 4) for d in (1, 7, 100, 384, 768, 2048)],
      [(2, 1), (3, 100), (4, 136)])  # fmt: skip
def test_scores_are_those_of_the_cpu_index_to_the_last_bit(
    card: Card, dim: int, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(dim)
    coarse = Coarse(rng.standard_normal((5, dim)).astype(np.float32))
    lists, space = lattice.CodeLists(coarse, bits, seed=3), Space("l2", np.zeros(dim))
    rows = rng.standard_normal((150, dim)).astype(np.float32)
    rows[7:9] = rows[5]  # copies: the lower place goes first
    labels = coarse.nearest(rows, 1)[1][:, 0]
    lists.append(labels, rows, np.zeros(len(rows)), np.arange(len(rows)))
    asked = Asked(rng.standard_normal((6, dim)).astype(np.float32), space)
    apart, probes = coarse.nearest(asked.working, 5)
    seen: dict[tuple[int, int], np.float32] = {}

    class Recorder(lattice.Shortlist):
        def offer(self, asked, low, slots, slack):  # type: ignore[no-untyped-def]
            assert low.dtype == np.float32
            seen.update({(int(q), int(s)): low[i, j] for i, q in enumerate(asked) for j, s in enumerate(slots)})  # fmt: skip
            super().offer(asked, low, slots, slack)

    monkeypatch.setattr(lattice, "Shortlist", Recorder)
    lists.scan(asked, probes, apart, 10)
    own = [lists[number] for number in range(len(lists))]
    there = scans.e8_codes(card, [(one.codes, one.factor, one.constant) for one in own], bits)
    rounded = lists.rounded(asked.working)
    queries = scans.e8_queries(card, there, rounded.levels, rounded.unit)
    plan = scans.planned(probes, there.sizes, scans.GROUP_ROWS)
    product = scans.e8_codec_scan(card, there, queries, plan)
    for k in (5, 128):
        key = [
            card.download(scans.e8_codec_best(card, there, queries, plan, product, apart, k, blocks=b))
            for b in (None, 1)
        ]  # fmt: skip
        assert key[0].tobytes() == key[1].tobytes()
        score, place = (part.reshape(-1, k) for part in scans.unpacked(key[0]))
        for query, number in np.argwhere(plan.at >= 0):
            one, at = own[probes[query, number]], plan.at[query, number]
            kept = min(k, len(one.slots))
            exact = twin.products(one.codes, rounded.levels[query, None], bits)[0]
            expected, rows_of = twin.best(
                exact, one.factor, rounded.unit[query], one.constant, apart[query, number], k
            )
            assert np.array_equal(score[at, :kept], expected)
            assert np.array_equal(place[at, :kept], rows_of)
            assert (place[at, kept:] == -1).all()
            cpu = [seen[int(query), int(slot)] for slot in one.slots[place[at, :kept]]]
            assert np.array_equal(score[at, :kept], np.array(cpu, np.float32))


def test_a_signal_in_the_last_dimension_is_seen(card: Card) -> None:
    lists = codes_of(3, 104)
    levels = np.zeros((1, 104), np.int64)
    levels[0, -1] = 3
    there = scans.e8_codes(card, lists, 3)
    plan = scans.planned(np.array([[6]]), there.sizes, scans.GROUP_ROWS)
    asked = scans.e8_queries(card, there, levels, np.ones(1))
    found = of_list(card.download(scans.e8_codec_scan(card, there, asked, plan)), plan, 0, 70)
    assert np.array_equal(found, 3 * e8.decode(lists[6][0], 3)[:, -1].astype(int))
    assert len(set(found.tolist())) > 8


def test_a_score_that_is_no_number_is_never_taken_and_copies_keep_their_order(card: Card) -> None:
    codes, factor, constant = codes_of(2, 16, np.array([40]))[0]
    codes[:], factor[:], constant[:] = codes[0], factor[0], constant[0]
    constant[3] = np.nan
    there = scans.e8_codes(card, [(codes, factor, constant)], 2)
    asked = scans.e8_queries(card, there, np.ones((1, 16), int), np.ones(1))
    plan = scans.planned(np.array([[0]]), there.sizes, scans.GROUP_ROWS)
    product = scans.e8_codec_scan(card, there, asked, plan)
    for k in (5, 40):
        key = scans.e8_codec_best(card, there, asked, plan, product, np.ones((1, 1)), k)
        taken = scans.unpacked(card.download(key))[1][0, 0].tolist()
        assert taken == [row for row in range(40) if row != 3][:k] + [-1] * (k == 40)


def test_what_the_scan_does_not_do_is_refused_by_name(card: Card) -> None:
    there = scans.e8_codes(card, codes_of(4, 16), 4)
    asked = scans.e8_queries(card, there, np.ones((1, 16), int), np.ones(1))
    plan = scans.planned(np.array([[1]]), there.sizes, scans.GROUP_ROWS)
    with pytest.raises(UsageError, match="k = 129"):
        scans.e8_codec_best(card, there, asked, plan, there.codes, np.ones((1, 1)), 129)
    wide = scans.e8_codes(card, [], 4, width=4 * 2056 // 8)
    with pytest.raises(UsageError, match="only the products are exact"):
        scans.e8_codec_best(card, wide, asked, plan, there.codes, np.ones((1, 1)), 5)
    with pytest.raises(UsageError, match="twice"):
        scans.planned(np.array([[2, 2]]), there.sizes, 32)
    with pytest.raises(UsageError, match="name lists"):
        scans.planned(np.array([[7]]), there.sizes, 32)
    with pytest.raises(UsageError, match="whole levels"):
        scans.e8_queries(card, there, np.full((1, 16), 0.5), np.ones(1))
    with pytest.raises(UsageError, match="2\\^31"):
        scans.e8_queries(card, there, np.full((1, 16), 7 << 20), np.ones(1))
    with pytest.raises(UsageError, match="float32"):
        scans.e8_codes(card, [(np.zeros((1, 8), np.uint8), np.ones(1), np.ones(1))], 4)
    with pytest.raises(UsageError, match="5 bits"):
        scans.e8_codes(card, [], 5)
