"""What a refresh writes is what moved: 1 % of the rows is at most 3 % of the bytes, wherever they lie."""

from __future__ import annotations

import pytest

from tests.bench import rebuild

SIZE = ["--rows", "50000", "--dim", "64", "--lists", "100", "--iterations", "4", "--json"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    folder = str(tmp_path_factory.mktemp("bench"))
    return {str(row["moves"]): row for row in rebuild.main([*SIZE, "--folder", folder])}


@pytest.mark.parametrize("moves", ["random", "confined"])
def test_one_percent_of_the_rows_is_at_most_three_percent_of_the_bytes(
    measured: dict[str, dict[str, object]], moves: str
) -> None:
    row = measured[moves]
    assert (row["how"], row["moved"]) == ("increment", 500)
    assert float(str(row["bytes_share"])) <= 0.03
    assert int(str(row["files_linked"])) >= 7 * 3  # every block of vectors, ids and columns


@pytest.mark.parametrize("moves", ["random", "confined"])
def test_probes_find_as_much_as_after_a_full_build(
    measured: dict[str, dict[str, object]], moves: str
) -> None:
    part, full = (measured[moves][name] for name in ("recall_at_10", "recall_at_10_full"))
    assert isinstance(part, dict)
    assert isinstance(full, dict)
    assert part["8"] == pytest.approx(full["8"], abs=0.005)
    assert full["8"] > 0.5
