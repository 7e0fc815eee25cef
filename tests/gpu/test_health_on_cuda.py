"""The health table by kernels equals the one by twins; offsets pass 2^31; nothing is compiled at run time.

The first also runs on the kernels' sources on the CPU (testing.host_gpu); the others are a real card's.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fabric_pipelines.analytics import kernels, passes, threads
from fabric_pipelines.analytics.card_tiles import CardTiles
from fabric_pipelines.analytics.csr import group
from fabric_pipelines.analytics.gauss_sums import gauss
from fabric_pipelines.analytics.health import METRICS, TILED, HealthTable, Metric, measure
from fabric_pipelines.analytics.neighbours import neighbours
from fabric_pipelines.analytics.reference.row_admit import row_hash
from fabric_pipelines.analytics.stacks import Members
from fabric_pipelines.analytics.sweeps import CpuSweeps
from fabric_pipelines.device.card import Card
from fabric_pipelines.device.gpu import Gpu
from fabric_pipelines.testing.host_gpu import HostGpu
from tests.gpu.grid import both
from tests.unit.analytics import test_far_away as far_away

FLOAT32 = 1e-5  # of passes whose distances are float32 on a card
LISTED = 0.05  # of the graph of its lists: float32 may call two rows equally near, and one of them the tenth
ROOT = Path(__file__).parents[2]


@pytest.fixture
def backend(card: Card, monkeypatch: pytest.MonkeyPatch) -> str:
    """The cuda backend opens its card by itself; on the host it gets the stand-in instead."""
    if isinstance(card, HostGpu):
        monkeypatch.setattr(kernels, "Gpu", lambda ordinal: card)
    return "cuda"


@pytest.mark.parametrize("metric", ["l2", "cosine"])
@both("dim,count", [(dim, 6000) for dim in (2, 31, 128, 384, 1025)], [(31, 3000), (384, 900)])
def test_every_metric_equals_the_cpu_backend_and_the_table_says_where_it_ran(
    backend: str, dim: int, count: int, metric: Metric
) -> None:
    rng = np.random.default_rng(dim)
    labels = rng.integers(0, 30, count)
    rows = (rng.standard_normal((30, dim))[labels] + rng.standard_normal((count, dim))).astype("f4")
    rows[5, -1], rows[6], rows[7, 0] = np.nan, 0.0, np.inf
    rows[8:12], labels[8:12] = rows[8], labels[8]  # copies in one cluster
    csr, _ = group(rows, labels, np.arange(count), 31)
    cpu = measure(csr.rows, csr.indptr, csr.ids, metric=metric)
    reference = cpu.reference()
    cuda = measure(
        csr.rows,
        csr.indptr,
        csr.ids,
        metric=metric,
        backend=backend,
        reference=reference,
    )
    cpu = measure(csr.rows, csr.indptr, csr.ids, metric=metric, reference=reference)
    for name, spec in METRICS.items():
        assert np.array_equal(cuda.readings[name].status, cpu.readings[name].status), name
        slack = FLOAT32 if spec.pass_name in TILED else LISTED if spec.pass_name == "P10" else 1e-9
        np.testing.assert_allclose(
            cuda.readings[name].value,
            cpu.readings[name].value,
            rtol=slack,
            atol=slack,
            err_msg=name,
        )
    assert (cuda.readings["checksum_mismatch"].value == 0).all()
    assert len(cuda.breaches) == 0
    assert set(cuda.backend.values()) == {"cuda"}


@pytest.mark.parametrize("metric", ["l2", "cosine"])
@both("dim,count", [(dim, 20_000) for dim in (31, 128, 384)], [(31, 900)])
def test_the_silhouette_alone_is_that_of_the_whole_table_and_the_same_bytes_every_time(
    backend: str, dim: int, count: int, metric: Metric
) -> None:
    """Alone nothing of a row comes to the host, and memory, streams and launches of the call before are used again."""
    rng = np.random.default_rng(dim)
    labels = rng.integers(0, 20, count)
    rows = (rng.standard_normal((20, dim))[labels] + rng.standard_normal((count, dim))).astype("f4")
    rows[5, -1], rows[6], rows[7, 0] = np.nan, 0.0, np.inf
    csr, _ = group(rows, labels, np.arange(count), 21)

    def found(*only: str) -> HealthTable:
        return measure(csr.rows, csr.indptr, csr.ids, metric=metric, backend=backend, only=only)  # type: ignore[arg-type]

    rowwise = found("silhouette", "radius_median")
    alone = [found("silhouette") for _ in range(10 if count > 900 else 3)]
    assert {len(table.facts.radii.radius2) for table in alone} == {0}
    assert len(rowwise.facts.radii.radius2) == count
    one, other = alone[0].readings["silhouette"], rowwise.readings["silhouette"]
    assert {table.readings["silhouette"].value.tobytes() for table in alone} == {
        one.value.tobytes()
    }
    assert np.array_equal(one.status, other.status)
    np.testing.assert_allclose(one.value, other.value, rtol=0, atol=1e-14)
    for name, column in alone[0].aux.items():
        assert column.tobytes() == rowwise.aux[name].tobytes(), name
    assert len(alone[0].breaches) == 0


@pytest.mark.parametrize("offset", far_away.OFFSETS)
def test_far_from_the_origin_and_from_each_other_clusters_are_what_they_are(
    backend: str, offset: float
) -> None:
    moved = far_away.moved(offset, 1e-9, backend=backend)
    parted = far_away.parted(offset, FLOAT32, backend=backend)
    assert len(moved.breaches) == len(parted.breaches) == 0


@pytest.mark.parametrize(
    ("family", "whole", "short", "pair"),
    [
        ("row_admit", "WIDE ? dim / 4 : (dim + 1) / 2", "WIDE ? (dim < 128 ? dim : 128) / 4 : ((dim < 128 ? dim : 128) + 1) / 2",
         "P1 and P2, P3"),
        ("csr_radius", "WIDE ? dim / 4 : dim", "WIDE ? (dim < 128 ? dim : 128) / 4 : (dim < 128 ? dim : 128)",
         "P1 and P2, P3"),
        ("pair_tile", "if (t < dim && w != 0.0)", "if (t < dim && t < 128 && w != 0.0)", "P3 and P9"),
    ],
    ids=["host-row_admit", "host-csr_radius", "host-pair_tile"],
)  # fmt: skip
def test_a_kernel_that_drops_dimensions_past_128_makes_every_cluster_corrupt(
    host: HostGpu,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    whole: str,
    short: str,
    pair: str,
) -> None:
    shutil.copytree(ROOT / "cuda", tmp_path / "cuda")
    source = tmp_path / "cuda" / f"{family}.cu"
    text = source.read_text()
    assert text.count(whole) == 1
    source.write_text(text.replace(whole, short))
    card = HostGpu(tmp_path / "cuda", ROOT / "build" / "host_cuda")
    monkeypatch.setattr(kernels, "Gpu", lambda ordinal: card)
    rng = np.random.default_rng(0)
    for dim in (128, 129, 384):
        rows = rng.standard_normal((60, dim)).astype(np.float32)
        found = measure(rows, np.array([0, 20, 60]), np.arange(60), metric="l2", backend="cuda")
        named = {name: at.tolist() for name, at in found.disagreements.items() if len(at)}
        assert named.get(pair) == (None if dim == 128 else [0, 1]), (dim, named)


@both("dim", [3, 128], [3, 40])
def test_windows_of_one_cluster_or_row_give_the_same_bytes(
    card: Card, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(dim)
    labels = rng.integers(0, 5, 120)
    rows = (
        1e20 * (rng.standard_normal((6, dim))[labels] + rng.standard_normal((120, dim)))
    ).astype("f4")
    csr, _ = group(rows, labels, np.arange(120), 6)
    sweeps = CpuSweeps(csr)
    found = passes.admit(csr, sweeps, min_norm=1e-12)
    means = passes.centroid(csr, sweeps, found, cosine=False)
    radii = passes.radius(csr, sweeps, found, means)
    members = Members.of(csr, found.good, found.size, means.weight, means.mean)
    nobody = np.arange(120)
    results = []
    for window_bytes, span in ((1, 50), (1 << 30, threads.SPAN_VALUES)):  # of rows on the host
        monkeypatch.setattr(threads, "SPAN_VALUES", span)
        sweeps.tiles = CardTiles(card, card.upload(csr.rows), csr, window_bytes=window_bytes)
        near = neighbours(csr, sweeps, members, radii.radius2, nobody)
        heat = near.bandwidth**2
        gas = gauss(csr, members, near, radii.radius2, nobody, heat, sweeps.tiles)
        points = passes.points(csr, sweeps, found, means, radii)
        results.append([near.row, near.distance, near.distance_sum, gas.log_partition, gas.modes,
                        points.silhouette_sum, points.margin_p10])  # fmt: skip
        assert np.isfinite(near.distance_sum[:5]).all()
        assert near.imbalance[:5].max() < 1e-6
        assert points.own_error.max() < 1
    for one, whole in zip(*results, strict=True):
        assert one.tobytes() == whole.tobytes()


@pytest.mark.gpu
def test_rows_past_2_to_31_components_are_reached(gpu: Gpu) -> None:
    dim, piece = 4096, 8192
    count = (2**31 // dim // piece + 2) * piece
    if gpu.memory().free_bytes < 2 * 4 * count * dim:
        pytest.skip(f"{gpu.identity.name} has too little free memory for {count} rows of {dim}")
    block = np.random.default_rng(0).standard_normal((piece, dim), dtype=np.float32)
    source, rows = gpu.upload(block), gpu.empty((count, dim), np.float32)
    for start in range(0, count, piece):
        gpu.copy(rows[start : start + piece], source)
    assert count * dim > 2**31
    _, _, found = kernels.row_admit(gpu, rows, 1e-12)
    expected = row_hash(block)
    for start in (0, count - piece):
        assert np.array_equal(gpu.download(found[start : start + piece]), expected)
    indptr = gpu.upload(np.array([0, count - 100, count]))
    weight = gpu.upload(np.ones(count))
    total = kernels.csr_centroid(gpu, rows, weight, indptr)
    last = block[-100:].astype(np.float64)
    np.testing.assert_allclose(gpu.download(total)[1], last.sum(axis=0), rtol=1e-9, atol=1e-9)
    centre = gpu.upload(np.stack([np.zeros(dim), last.mean(axis=0)]))
    radius2 = gpu.download(kernels.csr_radius(gpu, rows, weight, indptr, centre))
    exact = ((last - last.mean(axis=0)) ** 2).sum(axis=1)
    np.testing.assert_allclose(radius2[-100:], exact, rtol=1e-12)


@pytest.mark.gpu
def test_a_fresh_process_compiles_nothing(gpu: Gpu, tmp_path: Path) -> None:
    program = (
        "import numpy as np\n"
        "from fabric_pipelines.analytics.health import measure\n"
        "rows = np.random.default_rng(0).standard_normal((100, 33), dtype=np.float32)\n"
        "found = measure(rows, np.array([0, 40, 100]), np.arange(100), metric='l2', backend='cuda')\n"
        "assert found.backend['P1'] == 'cuda'\n"
    )
    caches = {"CUPY_CACHE_DIR": str(tmp_path / "cupy"), "CUDA_CACHE_PATH": str(tmp_path / "cuda")}
    environ = {**os.environ, **caches, "CUDA_DISABLE_PTX_JIT": "1", "PYTHONPATH": os.pathsep.join(
        [str(ROOT), os.environ.get("PYTHONPATH", "")]
    )}  # fmt: skip
    subprocess.run([sys.executable, "-c", program], check=True, env=environ, cwd=tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
