"""Kernel family flat_select against its twin, and the search that stands on it against the CPU, on a real card."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fabric_pipelines.analytics import kernels, resident
from fabric_pipelines.analytics.reference import flat_select as twin
from fabric_pipelines.analytics.search import Metric, Queries, exact_topk
from fabric_pipelines.device.card import Card
from fabric_pipelines.device.gpu import Gpu
from tests.gpu.grid import DIMS, both
from tests.support_resident import on_card, same_answers, tight_rows

ROOT = Path(__file__).parents[2]
GAMMA, TINY = 2e-5, 1e-37
TILES = [(1, 1, 1), (1, 31, 33), (3, 1023, 1024), (5, 1024, 1024), (7, 1025, 1100), (2, 2049, 2049)]


def tile(card: Card, queries: int, rows: int, metric: Metric, stride: int) -> tuple[tuple, tuple]:
    """The same tile for the twin and on the card; some rows do not count, and columns past `rows` are poison."""
    rng = np.random.default_rng([queries, rows])
    products = np.full((queries, stride), -1e30, np.float32)
    products[:, :rows] = rng.standard_normal((queries, rows))
    length = rng.uniform(2, 3, rows).astype(np.float32)
    length[rng.random(rows) < 0.1] = np.nan
    reach = rng.uniform(2, 3, queries).astype(np.float32)
    slack = rng.uniform(0, 1e-4, queries).astype(np.float32)
    host = (products, length, reach, slack)
    there = kernels.TileScores(
        *(card.upload(part) for part in host), queries, rows, GAMMA, TINY, metric
    )
    scored = twin.scored(products[:, :rows], *host[1:], GAMMA, TINY, l2=metric == "l2")
    return scored, (there,)


@pytest.mark.parametrize("metric", ["cosine", "l2"])
@both("queries,rows,stride", [*TILES, (512, 5000, 65536), (33, 65536, 65536)], TILES)
def test_bounds_limits_and_rows_taken_are_the_twins(
    card: Card, queries: int, rows: int, stride: int, metric: Metric
) -> None:
    (score, margin), (there,) = tile(card, queries, rows, metric, stride)
    bound = np.full((queries, twin.SLOTS), twin.UNSEEN, np.float32)
    bound_there = card.upload(bound)
    twin.slots(score, margin, bound)
    kernels.flat_slots(card, there, bound_there)
    found = card.download(bound_there)
    np.testing.assert_allclose(found, bound, rtol=1e-6, atol=1e-5)
    for k in {1, 10, 256, 1024}:
        limit_there = card.empty(queries, np.float32)
        kernels.flat_limit(card, bound_there, queries, k, limit_there)
        limit = card.download(limit_there)
        assert np.array_equal(limit, twin.limit(found, k))
    capacity, k = 300, 40
    kernels.flat_limit(card, bound_there, queries, k, limit_there)
    limit = card.download(limit_there)
    out = (
        card.upload(np.zeros(queries, np.int32)),
        card.upload(np.full(capacity * queries, -1)),
        card.upload(np.full(capacity * queries, np.nan, np.float32)),
    )
    kernels.flat_take(card, there, 1 << 40, limit_there, capacity, out)
    count, taken, lower = (card.download(part) for part in out)
    taken, lower = taken.reshape(capacity, queries), lower.reshape(capacity, queries)
    least = score - margin
    for query in range(queries):
        sure = np.flatnonzero(least[query] <= limit[query] - 1e-5)
        possible = np.flatnonzero(least[query] <= limit[query] + 1e-5)
        assert len(sure) <= count[query] <= len(possible)
        kept = min(int(count[query]), capacity)
        rows_taken = taken[:kept, query] - (1 << 40)
        assert len(set(rows_taken.tolist())) == kept
        assert set(rows_taken.tolist()) <= set(possible.tolist())
        if count[query] <= capacity:
            assert set(sure.tolist()) <= set(rows_taken.tolist())
        np.testing.assert_allclose(lower[:kept, query], least[query, rows_taken], atol=1e-5)
        assert (taken[kept:, query] == -1).all()


@pytest.mark.parametrize("width", [1, 2, 31, 384, 1025])
def test_words_are_gathered_whatever_their_number(card: Card, width: int) -> None:
    source = (
        np.random.default_rng(width).integers(0, 1 << 32, (5000, width), np.uint64).astype("u4")
    )
    rows = np.random.default_rng(1).integers(0, 5000, 777)
    out = card.upload(np.full((800, width), 7, np.uint32))
    kernels.flat_words(card, card.upload(source), card.upload(rows), 777, out)
    found = card.download(out)
    assert np.array_equal(found[:777], source[rows])
    assert (found[777:] == 7).all()


@pytest.mark.parametrize("kind", ["<f4", "<f2"])
@pytest.mark.parametrize("metric", ["cosine", "l2"])
@both("dim", [d for d in DIMS if d <= 1536], [31, 129, 768])
def test_the_ranked_list_is_that_of_the_cpu_to_the_last_bit(
    card: Card, dim: int, metric: Metric, kind: str
) -> None:
    if dim % 2 and kind == "<f2":
        dim += 1  # rows of float16 are gathered by words
    rows, ids, xq = tight_rows(70_000 if dim < 64 else 6000, dim, kind)
    found, left = on_card(card, rows.astype(kind), ids, metric).search(Queries(xq, metric), 10)
    truth = exact_topk(xq, rows, ids, 10, metric=metric)
    settled = np.setdiff1d(np.arange(len(xq)), left)
    if dim >= 8:  # below, a cluster is so tight that more rows lie within rounding than are kept
        assert len(left) == 0
    for part in ("D", "I", "found"):
        there, here = getattr(found, part)[settled], getattr(truth, part)[settled]
        assert there.tobytes() == here.tobytes(), part


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1, 100, resident.K_MAX])
def test_many_queries_over_several_tiles_of_rows(gpu: Gpu, k: int) -> None:
    rows, ids, _ = tight_rows(150_000, 48, "<f4")
    xq = np.random.default_rng(3).standard_normal((1100, 48)).astype(np.float32)
    dead = np.arange(150_000) % 7 == 0
    found, left = on_card(gpu, rows, ids, "l2", dead=dead).search(Queries(xq, "l2"), k)
    assert len(left) == 0
    same_answers(found, exact_topk(xq, rows[~dead], ids[~dead], k, metric="l2"))


@pytest.mark.gpu
def test_a_search_compiles_nothing(gpu: Gpu, tmp_path: Path) -> None:
    program = (
        "import numpy as np\n"
        "from fabric_pipelines.analytics.search import Queries\n"
        "from fabric_pipelines.device.gpu import Gpu\n"
        "from tests.support_resident import on_card, tight_rows\n"
        "rows, ids, xq = tight_rows(3000, 64, '<f2')\n"
        "with Gpu() as gpu:\n"
        "    for kind in ('<f4', '<f2'):\n"
        "        found, _ = on_card(gpu, rows.astype(kind), ids, 'cosine').search(Queries(xq, 'cosine'), 10)\n"
        "        assert (found.found == 10).all()\n"
    )
    caches = {"CUPY_CACHE_DIR": str(tmp_path / "cupy"), "CUDA_CACHE_PATH": str(tmp_path / "cuda")}
    environ = {**os.environ, **caches, "CUDA_DISABLE_PTX_JIT": "1", "PYTHONPATH": os.pathsep.join(
        [str(ROOT), os.environ.get("PYTHONPATH", "")]
    )}  # fmt: skip
    subprocess.run([sys.executable, "-c", program], check=True, env=environ, cwd=tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
