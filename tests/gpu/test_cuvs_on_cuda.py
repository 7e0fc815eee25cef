"""cuVS itself behind the door, on a card: recall as measured, tombstones, ids, its own bytes, and a graph that falls apart being told.

Needs cuVS (the group `cuvs` of tests/bench/gpu_machine/packages, or the extra); where there is a card and no cuVS it skips and says so.
"""

from __future__ import annotations

import inspect
import json
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric_pipelines.analytics.index import Cagra, IvfPq, RecallShort, VectorIndex, quality
from fabric_pipelines.analytics.index.cuvs_library import Library, library
from fabric_pipelines.analytics.search import recall_at_k
from fabric_pipelines.device.gpu import Gpu
from fabric_pipelines.errors import MissingDependency

pytestmark = pytest.mark.gpu
FACTS = json.loads((Path(__file__).parents[1] / "contracts/cuvs_26_6.json").read_text())
KINDS = (Cagra(), IvfPq())
EFFORT: dict[str, dict[str, int]] = {
    "cagra": {"rerank": 512},
    "ivf_pq": {"nprobe": 10**6, "rerank": 1024},
}
ROWS = np.random.default_rng(5).random((20_000, 32), np.float32)
IDS = np.random.default_rng(6).permutation(len(ROWS)).astype(np.int64) * 7


@pytest.fixture(scope="module")
def cuvs(gpu: Gpu) -> Library:
    try:
        return library()
    except MissingDependency as fault:
        pytest.skip(str(fault))


def true_ids(index: VectorIndex[Any], xq: np.ndarray, k: int) -> np.ndarray:
    return index.exact(xq, k).I


def test_the_contract_is_what_is_installed(cuvs: Library) -> None:
    assert cuvs.version == FACTS["source"]["module_version"]
    for name, call in FACTS["calls"].items():
        where, _, what = name.rpartition(".")
        there = getattr(getattr(cuvs, where), what) if where else cuvs.refine
        if what.endswith("Params"):
            made = there()  # every default, by keyword
            assert made is not None, name
            there(**{key: value for key, value in call["defaults"].items() if plain(key, value)})
            continue
        names = [*call["positional"], *call["keyword_only"]]
        assert list(inspect.signature(there).parameters) == names, name
    for name, fields in FACTS["fields"].items():
        there = getattr(cuvs, name.split(".")[0]).Index
        assert set(fields["names"]) <= set(dir(there)), name


def plain(key: str, value: object) -> bool:
    """Whether the contract holds the default itself, not the name of a type of it."""
    return value is not None and not key.endswith("_dtype")


@pytest.mark.parametrize("metric", ["l2", "cosine"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_recall_reaches_its_aim_on_even_rows_and_is_what_was_measured(
    cuvs: Library, kind: Any, metric: Any
) -> None:
    index = VectorIndex.build(ROWS, IDS, kind=kind, metric=metric)  # RecallShort would fail here
    assert index.quality is not None
    assert index.quality.recall >= 0.95
    xq = np.random.default_rng(7).random((200, 32), np.float32)
    D, found, count = index.search(xq, 10)
    true = index.exact(xq, 10)
    assert recall_at_k(found, true.I) >= 0.9
    same = found == true.I
    assert (D[same] == true.D[same]).all(), "distances are ours, whoever found the rows"
    assert count.tolist() == [10] * 200
    assert index.stats().where.endswith("(cuda:0)")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_dead_are_never_found_the_new_are_and_ids_stay(cuvs: Library, kind: Any) -> None:
    effort = EFFORT[kind.name]
    index = VectorIndex.build(ROWS[:16_000], IDS[:16_000], kind=kind, metric="l2")
    gone = IDS[:6_000]
    index.remove(gone)
    _, found, count = index.search(ROWS[:200], 50, **effort)
    assert not np.isin(found, gone).any()
    assert (count == 50).all()
    assert recall_at_k(found, true_ids(index, ROWS[:200], 50)) >= 0.9
    index.add(ROWS[16_000:], IDS[16_000:])  # extended
    index.add(ROWS[:10] + np.float32(3), IDS[15_000:15_010])  # replaced; they wait
    asked = np.concatenate((ROWS[16_000:16_200], ROWS[:10] + np.float32(3)))
    named = np.concatenate((IDS[16_000:16_200], IDS[15_000:15_010]))
    nearest = index.search(asked, 1, **effort)
    assert (nearest.I[:, 0] == named).mean() >= 0.9
    assert (nearest.I[200:, 0] == named[200:]).all()
    assert not np.isin(index.search(asked, 50, **effort).I, gone).any()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_its_own_bytes_come_back_and_answer_as_before(
    cuvs: Library, kind: Any, tmp_path: Path
) -> None:
    index = VectorIndex.build(ROWS, IDS, kind=kind, metric="cosine")
    index.remove(IDS[:100])
    index.add(ROWS[:50], IDS[:50])
    index.save(tmp_path / "kept")
    again = VectorIndex.load(tmp_path / "kept")
    effort = EFFORT[kind.name]
    before, after = (one.search(ROWS[:300], 10, **effort) for one in (index, again))
    assert recall_at_k(after.I, before.I) >= 0.98
    assert not np.isin(after.I, IDS[50:100]).any()
    assert again.recipe() == index.recipe()
    more = np.random.default_rng(9).random((2000, 32), np.float32)
    again.add(more, np.arange(2000) + 10**9)  # what was read is extended
    assert (again.search(more, 1, **effort).I[:, 0] >= 10**9).mean() > 0.9


@pytest.mark.parametrize("rows", [1023, 1024, 1100, 3000])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_few_rows_and_copies_of_one_are_no_trouble(cuvs: Library, kind: Any, rows: int) -> None:
    few = ROWS[:rows].copy()
    few[10:30] = few[10]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecallShort)  # asked below
        index = VectorIndex.build(few, IDS[:rows], kind=kind, metric="l2")
    found = index.search(few[100:300], 1, **EFFORT[kind.name])
    assert (found.I[:, 0] == IDS[100:300]).mean() >= 0.98
    assert (found.found == 1).all()


@pytest.mark.parametrize(("clusters", "spread"), [(2000, 0.02), (200, 0.02)])
def test_whether_a_graph_fell_apart_is_told_as_it_is(
    cuvs: Library, clusters: int, spread: float, request: pytest.FixtureRequest
) -> None:
    """1M x 128 unit vectors in 2,000 tight clusters are where CAGRA was seen at recall 0.05 to 0.09, without a word."""
    rng = np.random.default_rng(8)
    each = 500
    centres = rng.standard_normal((clusters, 128), np.float32)
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    rows = np.repeat(centres, each, axis=0)
    rows += spread * rng.standard_normal(rows.shape, np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    rows = rows[rng.permutation(len(rows))]
    begin = time.perf_counter()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", RecallShort)
        index = VectorIndex.build(rows, np.arange(len(rows)), kind=Cagra(), metric="l2")
    took = time.perf_counter() - begin
    found = index.quality
    assert found is not None
    own, xq = index.questions()
    held = cuvs.cupy.asarray(rows)  # which the exact index borrows
    flat = cuvs.brute_force.build(held, metric="sqeuclidean")
    nearest = cuvs.brute_force.search(flat, cuvs.cupy.asarray(xq), quality.K + 1)[1]
    true = quality.without(own, cuvs.cupy.asnumpy(cuvs.cupy.asarray(nearest)))
    got = quality.without(own, index.search(xq, quality.K + 1, rerank=found.rerank).I)
    again = recall_at_k(got, true)
    request.config.pluginmanager.get_plugin("terminalreporter").write_line(
        f"{clusters} clusters: recall {found.recall:.3f}, by cuVS's exact search {again:.3f}, built and measured in {took:.1f} s"
    )
    assert abs(again - found.recall) < 0.05, "the gate says what cuVS's own exact search says"
    told = [str(each.message) for each in said if issubclass(each.category, RecallShort)]
    assert bool(told) == (found.recall < found.aim)
    assert all("take kind inverted or ivf_pq" in each for each in told)
