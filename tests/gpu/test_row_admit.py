"""Kernel family row_admit against its twin on a real card."""

import numpy as np
import pytest

from fabric_pipelines.analytics import kernels
from fabric_pipelines.analytics.reference.row_admit import INF, NAN
from fabric_pipelines.analytics.sweeps import CpuSweeps
from fabric_pipelines.device.card import DeviceArray
from fabric_pipelines.device.gpu import Gpu
from tests.gpu.grid import DIMS, store

pytestmark = pytest.mark.gpu
MIN_NORM = 1e-12


def run(gpu: Gpu, rows: DeviceArray, blocks: int | None = None) -> tuple[np.ndarray, ...]:
    return tuple(
        gpu.download(part) for part in kernels.row_admit(gpu, rows, MIN_NORM, blocks=blocks)
    )


def same_bytes(left: tuple[np.ndarray, ...], right: tuple[np.ndarray, ...]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("dim", DIMS)
def test_hash_and_flags_are_bit_equal_and_norms_within_rounding(gpu: Gpu, dim: int) -> None:
    csr = store(dim)
    norm2, flag, row_hash = run(gpu, gpu.upload(csr.rows))
    twin = CpuSweeps(csr).admit(MIN_NORM, hashed=True)
    assert np.array_equal(row_hash, twin.hash)
    assert np.array_equal(flag, twin.flag)
    np.testing.assert_allclose(norm2, twin.norm2, rtol=2 * np.finfo(float).eps * max(1, dim) ** 0.5)


@pytest.mark.parametrize("count", [0, 1, 2, 31, 32, 33, 127, 128, 129, 4095, 4096, 4097])
@pytest.mark.parametrize("dim", [1, 5, 16, 20, 30, 52, 64, 384, 1028, 1030])
def test_every_count_of_rows_is_written_and_nothing_past_it(gpu: Gpu, count: int, dim: int) -> None:
    rows = np.random.default_rng(count).standard_normal((count, dim), dtype=np.float32)
    guard = 64
    out = (
        gpu.upload(np.full(count + guard, 7.0)),
        gpu.upload(np.full(count + guard, 7, np.uint8)),
        gpu.upload(np.full((count + guard, 2), 7, np.uint64)),
    )
    if count:
        kernels.row_admit_into(gpu, gpu.upload(rows), MIN_NORM, out)
    norm2, flag, row_hash = (gpu.download(part) for part in out)
    wide = rows.astype(np.float64)
    np.testing.assert_allclose(norm2[:count], (wide * wide).sum(axis=1), rtol=1e-13)
    assert (flag[:count] == 0).all()
    assert (norm2[count:] == 7).all()
    assert (flag[count:] == 7).all()
    assert (row_hash[count:] == 7).all()


@pytest.mark.parametrize("dim", DIMS)
def test_a_signal_in_the_last_dimension_alone_is_seen(gpu: Gpu, dim: int) -> None:
    rows = np.zeros((4, dim), dtype=np.float32)
    rows[:, -1] = [3.0, np.nan, np.inf, 0.0]
    norm2, flag, row_hash = run(gpu, gpu.upload(rows))
    assert norm2[0] == 9.0
    assert flag.tolist() == [0, NAN, INF, 4]
    assert len(np.unique(row_hash[:, 0])) == 4


@pytest.mark.parametrize("dim", [3, 128, 768, 1025])
def test_ten_runs_and_any_grid_give_the_same_bytes(gpu: Gpu, dim: int) -> None:
    rows = gpu.upload(store(dim).rows)
    first = run(gpu, rows)
    assert all(same_bytes(run(gpu, rows), first) for _ in range(9))
    assert all(same_bytes(run(gpu, rows, blocks), first) for blocks in (1, 7, 1000))


@pytest.mark.parametrize("dim", [8, 128, 2048])
def test_rows_off_a_16_byte_border_give_the_same_bytes(gpu: Gpu, dim: int) -> None:
    rows = store(dim).rows
    flat = gpu.upload(np.concatenate([[np.float32(0)], rows.ravel()]))
    before = gpu.launches.total()
    shifted = run(gpu, flat[1:].reshape(rows.shape))
    assert gpu.launches[f"row_admit_any_{kernels.lanes_for(dim)}"] > 0
    assert gpu.launches.total() == before + 1
    aligned = run(gpu, gpu.upload(rows))
    assert np.array_equal(shifted[2], aligned[2])
    np.testing.assert_allclose(shifted[0], aligned[0], rtol=1e-12)
