"""What a refresh writes is what moved: 1 % of the rows is at most 3 % of the bytes, wherever they lie."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench import rebuild

QUESTIONS = 1000  # half of the bench's: most of the time is theirs
SIZE = ["--rows", "20000", "--dim", "64", "--lists", "100", "--iterations", "4", "--json"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    folder = str(tmp_path_factory.mktemp("bench"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rebuild, "QUESTIONS", QUESTIONS)
        return {str(row["moves"]): row for row in rebuild.main([*SIZE, "--folder", folder])}


@pytest.mark.parametrize("moves", ["random", "confined"])
def test_one_percent_of_the_rows_is_at_most_three_percent_of_the_bytes(
    measured: dict[str, dict[str, object]], moves: str
) -> None:
    row = measured[moves]
    assert (row["how"], row["moved"]) == ("increment", 200)
    assert float(str(row["bytes_share"])) <= 0.03
    assert int(str(row["files_linked"])) >= 7 * 3  # every block of vectors, ids and columns


def test_moves_confined_to_a_hundredth_of_the_lists_write_those_lists_and_no_other(
    measured: dict[str, dict[str, object]],
) -> None:
    row = measured["confined"]
    assert (row["lists"], row["lists_moved"]) == (100, 1)
    assert (row["lists_written"], row["lists_written_and_unmoved"]) == (1, 0)
    assert row["pieces_max"] == 1  # no list is left in two places


def test_random_moves_reach_most_lists_and_none_is_rewritten_whole(
    measured: dict[str, dict[str, object]],
) -> None:
    row = measured["random"]
    assert int(str(row["lists_moved"])) > 70
    assert row["lists_written_and_unmoved"] == 0
    assert row["layers"] == 1


@pytest.mark.parametrize("asked", ["rows", "moved"])
@pytest.mark.parametrize("moves", ["random", "confined"])
def test_probes_find_as_much_as_after_a_full_build_along_the_same_centroids(
    measured: dict[str, dict[str, object]], moves: str, asked: str
) -> None:
    """To the last hit: each moved row lies where a full build puts it."""
    row: Any = measured[moves]
    assert row["recall_at_10"][asked] == row["full"]["same centroids"]["recall_at_10"][asked]


@pytest.mark.parametrize("moves", ["random", "confined"])
def test_probes_find_as_much_as_after_a_full_build_with_new_centroids(
    measured: dict[str, dict[str, object]], moves: str
) -> None:
    row: Any = measured[moves]
    full = row["full"]["seed 1"]["recall_at_10"]["rows"]
    for nprobe in ("8", "16", "32"):
        assert row["recall_at_10"]["rows"][nprobe] == pytest.approx(full[nprobe], abs=0.005)
    assert full["8"] > 0.5


LAID_OVER = [
    "--rows",
    "10000",
    "--dim",
    "32",
    "--lists",
    "100",
    "--iterations",
    "5",
    "--times",
    "10",
]


@pytest.fixture(scope="module")
def laid_over(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = str(tmp_path_factory.mktemp("bench"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rebuild, "QUESTIONS", QUESTIONS)
        found = rebuild.main([*LAID_OVER, "--json", "--folder", folder])
    return {kind: [row for row in found if row["moves"] == kind] for kind in rebuild.KINDS}


@pytest.mark.parametrize("moves", ["random", "confined"])
def test_ten_refreshes_one_over_the_other_find_what_a_full_build_finds_at_a_bounded_price(
    laid_over: dict[str, list[dict[str, Any]]], moves: str
) -> None:
    *refreshes, last, full = laid_over[moves]
    assert (last["turn"], last["how"]) == (10, "increment")
    assert full["how"] == "full build beside it"
    for row in (row for row in [*refreshes, last] if row["how"] == "increment"):
        assert row["bytes_share"] <= 0.03
    assert last["recall_at_10"]["8"] == pytest.approx(full["recall_at_10"]["8"], abs=0.005)
    layers = {"random": 5, "confined": 1}[moves]
    assert last["layers"] == layers
    assert last["pieces_max"] <= (layers + 1 if moves == "random" else 1)
    assert last["dead_share"] < 0.1
