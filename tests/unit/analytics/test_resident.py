"""Search over rows on a card equals the CPU twin, bit for bit, and says what it could not settle."""

from __future__ import annotations

import numpy as np
import pytest

from fabric_pipelines.analytics import resident
from fabric_pipelines.analytics.search import Queries, exact_topk
from fabric_pipelines.testing.standin_card import StandInCard
from tests.support_resident import on_card, same_answers, tight_rows


@pytest.mark.parametrize("kind", ["<f4", "<f2"])
@pytest.mark.parametrize("metric", ["cosine", "l2"])
@pytest.mark.parametrize(("count", "dim"), [(1, 2), (7, 24), (3000, 32), (70_000, 6)])
def test_the_ranked_list_is_the_twins_to_the_last_bit(count, dim, metric, kind) -> None:
    rows, ids, xq = tight_rows(count, dim, kind)
    found, left = on_card(StandInCard(), rows.astype(kind), ids, metric).search(
        Queries(xq, metric), 10
    )
    assert len(left) == 0
    same_answers(found, exact_topk(xq, rows, ids, 10, metric=metric))


def test_rows_that_do_not_count_are_never_found_and_bad_queries_find_nothing() -> None:
    rows, ids, xq = tight_rows(500, 16, "<f4")
    dead = np.arange(500) % 3 == 0
    xq[1], xq[2, 5] = 0, np.nan
    found, left = on_card(StandInCard(), rows, ids, "cosine", dead=dead).search(
        Queries(xq, "cosine"), 5
    )
    assert left.tolist() == []
    assert found.found[[1, 2]].tolist() == [0, 0]
    same_answers(found, exact_topk(xq, rows[~dead], ids[~dead], 5, metric="cosine"))


def test_more_neighbours_than_rows_are_found_as_far_as_there_are_rows() -> None:
    rows, ids, xq = tight_rows(9, 8, "<f4")
    found, left = on_card(StandInCard(), rows, ids, "l2").search(Queries(xq, "l2"), 100)
    assert len(left) == 0
    assert set(found.found.tolist()) == {9}
    same_answers(found, exact_topk(xq, rows, ids, 100, metric="l2"))


def test_copies_of_one_row_go_to_the_lower_ids_and_too_many_are_named() -> None:
    rows, ids, _ = tight_rows(300, 8, "<f4")
    rows[50:150] = rows[50]
    found, left = on_card(StandInCard(), rows, ids, "cosine").search(
        Queries(rows[50:51], "cosine"), 10
    )
    assert len(left) == 0
    assert found.I[0].tolist() == np.sort(ids[50:150])[:10].tolist()
    many = np.repeat(rows[:1], resident.CAPACITY + 1, axis=0)
    scan = on_card(StandInCard(), many, np.arange(len(many)), "cosine")
    found, left = scan.search(Queries(rows[:2], "cosine"), 10)
    assert left.tolist() == [0, 1]
    assert found.found.tolist() == [0, 0]


@pytest.mark.parametrize(("scale", "k"), [(1e19, 3), (1.0, resident.K_MAX + 1)])
def test_what_overflows_float32_or_asks_for_too_much_is_named(scale: float, k: int) -> None:
    rows, ids, xq = tight_rows(400, 8, "<f4")
    scan = on_card(StandInCard(), (rows * scale).astype(np.float32), ids, "l2")
    assert scan.search(Queries(xq, "l2"), k)[1].tolist() == list(range(len(xq)))


def test_a_search_takes_no_memory_that_was_not_counted_at_the_start() -> None:
    rows, ids, xq = tight_rows(3000, 16, "<f4")
    card = StandInCard()
    scan = on_card(card, rows, ids, "l2")
    taken = card.memory().total_bytes - card.memory().free_bytes
    scan.search(Queries(xq, "l2"), 10)
    assert card.peak_bytes == taken
    assert taken <= resident.workspace_bytes(3000, 16) + 3000 * (4 * 16 + 8 + 4)
