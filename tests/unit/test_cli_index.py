"""`fabric index` and `fabric search`: from a file or a shard to neighbours, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from fabric_pipelines import cli, shards
from fabric_pipelines.analytics.index import Inverted, VectorIndex
from fabric_pipelines.analytics.index.coarse import Coarse
from fabric_pipelines.analytics.search import exact_topk
from fabric_pipelines.bench.decisions import drawn
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.device import gpu
from fabric_pipelines.device.cubins import architecture_for
from fabric_pipelines.errors import DeviceRefused
from fabric_pipelines.testing.vector_store import MemoryVectorStore

PNG = b"\x89PNG\r\n\x1a\n"


def run(*words: object) -> Result:
    return CliRunner().invoke(cli.app, [str(word) for word in words])


def no_card(ordinal: int) -> None:
    raise DeviceRefused("no CUDA device answers: use the cpu backend")


def answer(*words: object) -> dict:
    done = run(*words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    monkeypatch.setenv("FABRIC_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    drawn = np.random.default_rng(1).standard_normal((200, 6)).astype(np.float32)
    columns = {"id": np.arange(200) * 2, "vector": pa.array(list(drawn))}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    return drawn


@pytest.mark.parametrize("kind", ["exact", "inverted", "lattice"])
def test_what_a_file_holds_is_built_measured_and_found(rows: np.ndarray, kind: str) -> None:
    built = answer("index", "build", "one", "--file", "rows.parquet", "--kind", kind)
    assert (built["rows"], built["kind"], built["metric"]) == (200, kind, "cosine")
    effort = {"exact": (), "inverted": ("--nprobe", 99), "lattice": ("--nprobe", 99, "--rerank", 200)}  # fmt: skip
    found = answer("search", "one", "--like", 8, "--like", 10, "-k", 3, *effort[kind])
    true = exact_topk(rows[4:6], rows, np.arange(200) * 2, 3, metric="cosine")
    assert [row["id"] for row in found["rows"]] == true.I.ravel().tolist()
    assert found["found"] == [3, 3]
    met = answer("search", "one", "--like", 8, "-k", 3, *effort[kind], "--health")
    assert (met["rows"], met["where"]) == ([r for r in found["rows"] if r["like"] == 8], "cpu")
    assert met["health"]["probes"] == len(met["health"]["probe"]) == sum(met["health"]["probe"])
    told = answer("index", "recall", "one", "--plot", "curve.png")
    assert Path("curve.png").read_bytes().startswith(PNG)
    assert told["steps"][-1]["recall"] == 1.0
    assert all(step["alone_ms"] > 0 for step in told["steps"])


def test_queries_come_from_a_file_too(rows: np.ndarray) -> None:
    answer("index", "build", "one", "--file", "rows.parquet", "--metric", "l2")
    found = answer("search", "one", "--queries", "rows.parquet", "-k", 1, "--nprobe", 99)
    assert [row["id"] for row in found["rows"]] == [2 * row["query"] for row in found["rows"]]


def test_a_shard_brings_its_rows_and_its_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: np.ndarray
) -> None:
    store = MemoryVectorStore()
    store.put(np.arange(200, dtype=np.int64), rows)
    shards.build(store, tmp_path / "home/shards", "notes", lists=2, seed=1, metric="l2", recipe={})
    monkeypatch.setattr(Database, "of", lambda _: store)
    built = answer("index", "build", "one", "--shard", "notes", "--kind", "lattice", "--bits", 2)
    assert (built["metric"], built["rows"]) == ("l2", 200)


def test_a_list_that_searches_are_sent_to_in_vain_is_a_verdict_that_is_kept(
    rows: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = drawn(np.random.default_rng(1), 1500, 24, 15)
    index = VectorIndex.build(
        store.rows, np.arange(len(store.rows)), kind=Inverted(lists=15), metric="cosine"
    )
    assert index._coarse is not None
    centroids, sizes = index._coarse.centroids.copy(), index.list_sizes()
    far = (centroids @ centroids[int(sizes.argmax())]).argsort()
    gone = int(far[sizes[far] > 31][0])
    centroids[gone] = centroids[far[-1]] * np.float32(1.001)
    index._coarse = Coarse(centroids)
    index.save(Path("one"))
    pq.write_table(pa.table({"vector": pa.array(list(store.rows))}), "asked.parquet")
    asked = ("search", "one", "--queries", "asked.parquet", "--nprobe", 2, "--health")
    met = answer(*asked, "--record")["health"]
    assert met["verdicts"]["REBUILD"] == 1
    (told,) = [each for each in met["decisions"] if each["verdict"] == "REBUILD"]
    assert (told["cluster"], told["stands"]["rule"]) == (gone, "probes_wasted")
    assert told["stands"]["evidence"][1]["value"] == met["wasted"][gone] / met["probe"][gone]
    plain = " ".join(run(*asked).stdout.split())
    assert f"cluster {gone}: REBUILD by probes_wasted since 1: size" in plain
    few = answer("search", "one", "--like", 8, "--nprobe", 2, "--health", "--record")["health"]
    assert few["verdicts"] == {"UNKNOWN": 15}
    back = answer(*asked)["health"]["decisions"][gone]
    assert (back["verdict"], back["measurement"], back["stands"]["since"]) == ("REBUILD", 3, 1)
    Path("one/decisions.json").write_text("{}")
    refused = run(*asked)
    assert "decisions.json cannot be read" in refused.stderr


def wrong_card(ordinal: int) -> None:
    architecture_for((7, 5), frozenset({"sm_90"}))


@pytest.mark.parametrize(
    ("words", "opened", "says"),
    [
        (["search", "one", "--like", 8], no_card, "no CUDA device answers"),
        (["search", "one", "--like", 8], wrong_card, "compute capability 7.5"),
        (["index", "recall", "one"], no_card, "no CUDA device answers"),
    ],
)
def test_a_card_is_refused_unless_there_and_fit(
    rows: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
    words: list[object],
    opened: object,
    says: str,
) -> None:
    answer("index", "build", "one", "--file", "rows.parquet", "--kind", "exact")
    monkeypatch.setattr(gpu, "Gpu", opened)
    done = run(*words, "--backend", "cuda")
    assert done.exit_code == 4, done.output
    assert says in " ".join(done.output.split())
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["index", "build", "one"], "--shard NAME, or --file FILE"),
        (["index", "build", "one", "--file", "none.parquet"], "cannot be read"),
        (["index", "build", "one", "--file", "rows.parquet", "--id-column", "x"], "no column 'x'"),
        (["index", "build", "one", "--file", "rows.parquet", "--vector-column", "id"], "not a list"),
        (["index", "build", "one", "--file", "rows.parquet", "--bits", "2"], "has no bits"),
        (["index", "build", "home", "--file", "rows.parquet", "--aim", "2"], "aim is 2"),
        (["index", "build", "home", "--file", "rows.parquet", "--aim", "nan"], "aim is nan"),
        (["search", "one", "--like", "3"], "no index in one"),
        (["search", "there", "--like", "4", "--record"], "--record keeps what --health finds"),
        (["search", "there"], "--like ID, or --queries FILE"),
        (["search", "there", "--like", "3"], "no row 3"),
        (["search", "there", "--like", "4", "--rerank", "9"], "rerank is no choice"),
        (["index", "build", "there", "--file", "rows.parquet"], "there already"),
    ],
)  # fmt: skip
def test_a_wrong_call_is_one_sentence_and_exit_code_2(
    rows: np.ndarray, words: list[str], says: str
) -> None:
    answer("index", "build", "there", "--file", "rows.parquet")
    done = run(*words)
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
