"""cuVS behind the door, through a stand-in that is held to its signatures: ids, tombstones, bytes, absence, and a graph that falls
apart. What cuVS itself finds is asked on a card (tests/gpu/test_cuvs_on_cuda.py)."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from fabric_pipelines import cli
from fabric_pipelines.analytics.index import (
    Cagra,
    Inverted,
    IvfPq,
    RecallShort,
    VectorIndex,
    cuvs_library,
    cuvs_lists,
    quality,
)
from fabric_pipelines.analytics.reference.flat_topk import flat_topk
from fabric_pipelines.analytics.search import METRICS, recall_at_k
from fabric_pipelines.errors import (
    CorruptionFound,
    DeviceRefused,
    MissingDependency,
    UsageError,
    VersionRefused,
)
from fabric_pipelines.testing.cuvs_standin import Faults, modules

FACTS = json.loads((Path(__file__).parents[2] / "contracts/cuvs_26_6.json").read_text())
ROWS = np.random.default_rng(2).standard_normal((400, 16)).astype(np.float32)
IDS = np.arange(400) * 5
KINDS = (Cagra(), IvfPq(lists=8))
EFFORT: dict[str, dict[str, int]] = {
    "cagra": {"rerank": 64},
    "ivf_pq": {"nprobe": 8, "rerank": 40},
}


@pytest.fixture
def cuvs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Faults]:
    """Puts the stand-in where cuVS and CuPy are imported from; few rows are enough for it."""
    monkeypatch.setattr(cuvs_lists, "WAITING_ROWS", 64)
    monkeypatch.setattr(quality, "QUESTIONS_MAX", 32)

    def there(**faults: object) -> Faults:
        made = Faults(**faults)  # type: ignore[arg-type]
        for name, module in modules(FACTS, made).items():
            monkeypatch.setitem(sys.modules, name, module)
        return made

    return there


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_cuvs_finds_and_our_rows_say_how_far(kind, metric, cuvs, tmp_path):
    faults = cuvs()
    rows = ROWS.copy()
    rows[3] = np.nan
    index = VectorIndex.build(rows, IDS, kind=kind, metric=metric)
    gc.collect()  # what cuVS only borrows is held by the index
    index.remove(IDS[:120:2])
    index.add(rows[:100] + 1, IDS[:100])
    index.add(rows[:5] - 1, np.arange(5) + 10_000)  # which wait
    held = {5 * i: rows[i] for i in range(400) if i % 2 or i >= 120}
    held |= {5 * i: rows[i] + 1 for i in range(100)}
    held |= {10_000 + i: rows[i] - 1 for i in range(5)}
    ids = np.array(sorted(held))
    asked, effort = np.concatenate((rows[100:140], rows[:2] - 1)), EFFORT[kind.name]
    true_d, true_i, _ = flat_topk(asked, np.array([held[i] for i in ids.tolist()]), ids, 10, metric=metric)  # fmt: skip
    D, found, count = index.search(asked, 10, **effort)
    assert recall_at_k(found, true_i) == 1
    assert (true_d == D).all()
    assert count.tolist() == [10] * 42
    assert index.quality is not None
    assert index.quality.recall >= 0.95
    assert index.stats().where == "a stand-in's card (cuda:0)"
    assert {"build", "extend"} <= {call.split(".")[-1] for call, _ in faults.calls}
    index.save(tmp_path / "kept")
    faults.calls.clear()
    again = VectorIndex.load(tmp_path / "kept")
    assert [name for name, _ in faults.calls if name.endswith(("build", "load"))] == [f"{kind.name}.load"]  # fmt: skip
    assert again.recipe() == index.recipe()
    for one in (index, again):
        one.remove(IDS[200:210])
        assert not set(one.search(rows[200:210], 30, **effort).I.ravel().tolist()) & set(IDS[200:210].tolist())  # fmt: skip
        assert recall_at_k(one.search(asked, 10, **effort).I, true_i) > 0.9
    index.remove(ids[20:])  # more dead than alive: made anew
    kept = {-1, *ids[:20].tolist()} - {15}  # which has no distance
    assert set(index.search(asked[:2], 30, **effort).I[0].tolist()) <= kept
    index.remove(ids)
    assert index.search(asked[:2], 3, **effort).found.tolist() == [0, 0]


def test_few_rows_are_looked_at_one_by_one_and_cuvs_gets_the_rest_together(cuvs, tmp_path):
    faults = cuvs()
    index = VectorIndex.build(ROWS[:40], IDS[:40], kind=Cagra(), metric="l2")
    assert [name for name, _ in faults.calls] == []
    assert index.search(ROWS[:40], 1).I[:, 0].tolist() == IDS[:40].tolist()
    index.save(tmp_path / "few")
    index = VectorIndex.load(tmp_path / "few")
    index.add(ROWS[40:60], IDS[40:60])
    index.add(ROWS[60:300], IDS[60:300])
    index.add(ROWS[300:350], IDS[300:350])
    assert [len(given["dataset"]) for name, given in faults.calls if name == "cagra.build"] == [300]
    assert index.search(ROWS[:350], 1).I[:, 0].tolist() == IDS[:350].tolist()


def test_effort_is_what_cuvs_calls_it(cuvs):
    faults = cuvs()
    index = VectorIndex.build(ROWS, IDS, kind=Cagra(degree=32), metric="l2")
    index.search(ROWS[:3], 5, rerank=77)
    assert faults.calls[-2][1]["itopk_size"] == 77
    made = next(given for name, given in faults.calls if name == "cagra.IndexParams")
    assert (made["graph_degree"], made["intermediate_graph_degree"]) == (32, 64)
    index = VectorIndex.build(ROWS, IDS, kind=IvfPq(lists=10, bits=4, parts=4), metric="l2")
    index.search(ROWS[:3], 5, nprobe=3, rerank=20)
    assert faults.calls[-2][1]["n_probes"] == 3
    assert faults.calls[-1][1]["k"] == 20
    made = next(given for name, given in faults.calls if name == "ivf_pq.IndexParams")
    assert (made["n_lists"], made["pq_bits"], made["pq_dim"]) == (10, 4, 4)
    assert index.stats().lists == 10


def test_the_dead_do_not_crowd_out_the_living_where_cuvs_takes_no_filter(cuvs):
    cuvs()
    index = VectorIndex.build(ROWS, IDS, kind=IvfPq(lists=4), metric="l2")
    near = index.search(ROWS[7:8], 150, nprobe=4, rerank=150).I[0]
    index.remove(near[:140])
    found = index.search(ROWS[7:8], 10, nprobe=4, rerank=10).I[0]
    assert found.tolist() == near[140:].tolist()


def test_a_graph_that_does_not_lead_to_the_rows_is_said_aloud_at_every_build(
    cuvs, tmp_path, monkeypatch
):
    cuvs(lost=0.9)
    with pytest.warns(RecallShort, match=r"kind 'cagra' is 0\.\d+ .* below its aim of 0.95: .*take kind inverted or ivf_pq"):  # fmt: skip
        index = VectorIndex.build(ROWS, IDS, kind=Cagra(), metric="l2")
    assert index.quality is not None
    assert index.quality.recall < 0.3
    with pytest.warns(RecallShort):
        index.train()
    index = VectorIndex.build(ROWS, IDS, kind=Cagra(aim=0.01), metric="l2")  # as it promised
    assert index.shortfall() == ""
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"id": IDS, "vector": list(ROWS)}), "rows.parquet")
    run = lambda *words: CliRunner().invoke(cli.app, [*words, "--json"])  # noqa: E731
    built = run("index", "build", "one", "--file", "rows.parquet", "--kind", "cagra")
    assert "warning: recall@10 of this index of kind 'cagra' is 0." in built.stderr
    assert built.exit_code == 0
    searched = run("search", "one", "--like", "1995")
    assert "warning: recall@10 of this index" in searched.stderr


def test_bytes_of_another_cuvs_and_changed_ones_are_refused_by_name(cuvs, tmp_path):
    cuvs()
    VectorIndex.build(ROWS, IDS, kind=Cagra(), metric="l2").save(tmp_path / "one")
    cuvs(version="26.08.00")
    with pytest.raises(VersionRefused, match=r"written by cuVS 26.06.00, and cuVS 26.08.00 is here"):  # fmt: skip
        VectorIndex.load(tmp_path / "one")
    cuvs()
    kept = tmp_path / "one" / "index.cuvs"
    content = bytearray(kept.read_bytes())
    content[-40] ^= 1
    kept.write_bytes(content)
    with pytest.raises(CorruptionFound, match=r"index.cuvs is not what index.json says"):
        VectorIndex.load(tmp_path / "one")


def test_what_cuvs_refuses_is_a_sentence_and_a_lost_index_is_not_asked(cuvs):
    faults = cuvs(refuses={"cagra.extend": "out of memory\n  obtained 9 frames"})
    index = VectorIndex.build(ROWS[:300], IDS[:300], kind=Cagra(), metric="l2")
    with pytest.raises(DeviceRefused, match=r"cuVS 26.06.00 does not take the rows .*'cagra': out of memory; use"):  # fmt: skip
        index.add(ROWS[300:], IDS[300:])
    with pytest.raises(DeviceRefused, match="train it anew"):
        index.search(ROWS[:2], 3)
    faults.refuses.clear()
    index.train()
    assert index.search(ROWS, 1).I[:, 0].tolist() == IDS.tolist()


def test_where_cuvs_is_not_there_a_sentence_says_what_to_do(cuvs, monkeypatch):
    def build() -> None:
        VectorIndex.build(ROWS, IDS, kind=Cagra(), metric="l2")

    cuvs(cards=0)
    with pytest.raises(DeviceRefused, match=r"kind 'cagra' needs a CUDA device, and none is there"):
        build()
    cuvs()
    monkeypatch.setitem(sys.modules, "cuvs", None)
    with pytest.raises(MissingDependency, match=r"kind 'cagra' .*'cuvs-cu13'.*fabric-pipelines\[cuvs\]"):  # fmt: skip
        build()
    monkeypatch.setattr(cuvs_library.importlib, "import_module", lacking)
    with pytest.raises(DeviceRefused, match=r"cannot be loaded \(libcublas.so.13: cannot open"):
        build()
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingDependency, match="cupy"):
        build()


def lacking(name: str) -> None:
    raise ImportError("libcublas.so.13: cannot open shared object file")


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Cagra(degree=1), "degree is 1"),
        (IvfPq(bits=3), "bits is 3"),
        (IvfPq(bits=5, parts=3), "multiple of 8"),
        (Cagra(aim=2), "aim is 2"),
    ],
)
def test_what_cuvs_cannot_be_made_with_is_refused_before_it_is_asked(kind, says):
    with pytest.raises(UsageError, match=says):
        VectorIndex(4, kind=kind, metric="l2")


def test_the_stand_in_refuses_what_cuvs_would_and_holds_to_the_contract(cuvs):
    faults = cuvs()
    found = cuvs_library.library()
    there = found.cupy.asarray(ROWS)
    with pytest.raises(TypeError, match="unexpected keyword argument 'k'"):
        found.cagra.SearchParams(k=3)
    with pytest.raises(TypeError):
        found.ivf_pq.search(found.ivf_pq.SearchParams(), None, there, 3, filter=None)
    index = found.cagra.build(found.cagra.IndexParams(), there)
    with pytest.raises(TypeError, match="search_params"):
        found.cagra.search(found.ivf_pq.SearchParams(), index, there, 3)
    with pytest.raises(AttributeError, match="no size"):
        _ = index.size
    del there
    gc.collect()
    faults.calls.clear()
    with pytest.raises(AssertionError, match="borrows are gone"):
        found.cagra.search(found.cagra.SearchParams(), index, found.cupy.asarray(ROWS[:1]), 3)
    with pytest.raises(AssertionError, match="beyond the rows"):
        found.refine(found.cupy.asarray(ROWS), found.cupy.asarray(ROWS[:1]), found.cupy.asarray([[400]]), 1)  # fmt: skip


def test_a_search_of_cuvs_has_no_choice_that_its_kind_has_not(cuvs):
    cuvs()
    index = VectorIndex.build(ROWS, IDS, kind=Cagra(), metric="l2")
    with pytest.raises(UsageError, match="nprobe is no choice of a search of kind 'cagra'"):
        index.search(ROWS, 1, nprobe=2)
    with pytest.raises(DeviceRefused, match="'cagra' has no kernels of its own"):
        index.use("cuda")
    assert VectorIndex.build(ROWS, IDS, kind=Inverted(), metric="l2").shortfall() == ""
