"""The benchmark of searches runs as it will on a card, on few rows, and says of every system what it did or why it did not."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from fabric_pipelines.testing import cuvs_standin
from tests.bench import search, search_rows, search_systems

CUVS = json.loads((Path(__file__).parents[2] / "contracts/cuvs_26_6.json").read_text())
SYSTEMS = (
    *(f"{kind}{where}" for kind in ("exact", "inverted", "lattice, 4 bits", "lattice, 2 bits") for where in ("", ", on a card")),
    "torch matmul + topk", "torch matmul + topk, on the CPU",
    "faiss Flat", "faiss IVF,Flat", "faiss HNSW32", "faiss IVF,RaBitQ 4 bits + rows",
    "cuVS brute force", "cuVS CAGRA", "cuVS IVF-PQ + rows",
)  # fmt: skip


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "BATCHES", {1: 2, 32: 1, 1024: 1})
    monkeypatch.setattr(search, "QUESTIONS", 20)
    for name in (
        "torch",
        "faiss",
        "cupy",
        "cuvs",
    ):  # seconds to import, and their threads wait for each other
        monkeypatch.setitem(sys.modules, name, None)


def test_a_rehearsal_measures_what_is_there_and_names_what_is_not(
    few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "real.npy", search_rows.drawn("clustered", 200, 24, 3))
    search.main(
        ["--rehearse", "--rows", "150", "--dim", "16", "--skip", "lattice, 2 bits",
         "--embeddings", str(tmp_path / "real.npy"), "--json", str(tmp_path / "told.json")]
    )  # fmt: skip
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["machine"]["versions"]["numpy"] == np.__version__
    assert [run["rows_of"] for run in told["runs"]] == ["uniform", "clustered", "real"]
    shown = capsys.readouterr().out
    for run in told["runs"]:
        own = {line["system"]: line for line in run["lines"] if "why_not" not in line}
        why = {line["system"]: line["why_not"] for line in run["lines"] if "why_not" in line}
        assert set(own) | set(why) >= set(SYSTEMS) - {"lattice, 2 bits, on a card"}
        assert why["lattice, 2 bits"] == "left out by --skip"
        assert "not installed" in why["cuVS CAGRA"]
        for line in own.values():
            assert set(line["queries_per_s"]) == set(line["times_base"]) == {"1", "32", "1024"}
            assert line["recall"] >= line["aim"] - 1e-9
        for aim in ("0.90", "0.95", "0.99"):
            assert shown.count(f"| inverted | cpu | {aim} |") == 3
        assert all(f"| {name} | not measured: {reason}" in shown for name, reason in why.items())


def test_a_system_that_fails_and_rows_that_are_not_there_are_lines_of_their_own(
    few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(xb: np.ndarray) -> search_systems.Made:
        def ask(xq: np.ndarray, effort: object) -> np.ndarray:
            if len(xq) > 32:
                raise MemoryError("no room for so many")
            return np.zeros((len(xq), 10), np.int64)

        return 4.0, [], ask, "card"

    systems = [search_systems.System("exact", 0, 0, 1, [], full(np.ones(1))[2])]
    monkeypatch.setattr(search, "every", lambda xb, skip: iter(systems))
    search.main(["--rehearse", "--rows", "90", "--kind", "uniform", "--kind", "real", "--embeddings", str(tmp_path / "no.npy")])  # fmt: skip
    shown = capsys.readouterr().out
    assert "| exact, None | not measured: MemoryError: no room for so many |" in shown
    assert "real: not measured: [Errno 2]" in shown


def test_texts_are_verses_first_then_runs_of_their_words_each_once() -> None:
    found = [text for text, _ in zip(search_rows.texts(), range(3000), strict=False)]
    assert found[0] == search_rows.verses()[0].text
    assert len(set(found)) == 3000
    assert len(found[-1].split()) == search_rows.RUNS[0]
    xb, xq = search_rows.split(np.arange(40.0).reshape(20, 2), 15, 50)
    assert (xb.shape, xq.shape) == ((15, 2), (50, 2))
    assert not set(map(tuple, xb)) & set(map(tuple, xq))


@pytest.mark.parametrize("place", range(4))
def test_an_index_of_faiss_finds_what_its_greatest_effort_should(place: int) -> None:
    faiss = pytest.importorskip("faiss", reason="the extra `faiss` is not installed")
    threads = faiss.omp_get_max_threads()
    xb = search_rows.drawn("clustered", 400, 16, 1)
    try:
        faiss.omp_set_num_threads(1)
        _, make = list(search_systems.faisses(xb))[place]
        _, efforts, ask, where = make()
        found = ask(xb[:20], efforts[-1] if efforts else None)
    finally:
        faiss.omp_set_num_threads(threads)
    assert where == "cpu"
    assert found[:, 0].tolist() == list(range(20))


@pytest.mark.parametrize("place", range(3))
def test_an_index_of_cuvs_is_called_as_its_own_signatures_say(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = cuvs_standin.Faults()
    for name, module in cuvs_standin.modules(CUVS, faults).items():
        monkeypatch.setitem(sys.modules, name, module)
    xb = search_rows.drawn("clustered", 400, 16, 1)
    name, make = list(search_systems.cuvses(xb))[place]
    width, efforts, ask, where = make()
    gc.collect()  # what an index only borrows has to be held by who asks
    least, most = (efforts[0], efforts[-1]) if efforts else (None, None)
    assert ask(xb[:20], least).shape == (20, search_systems.K), name
    found = ask(xb[:20], most)
    assert found.dtype == np.int64
    assert found[:, 0].tolist() == list(range(20))
    assert where == "a stand-in's card"
    assert width > 0
    assert {call.split(".")[-1] for call, _ in faults.calls} >= {"build", "search"}
