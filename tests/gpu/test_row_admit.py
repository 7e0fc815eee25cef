"""Kernel family row_admit against its twin: the source on the CPU, and the cubin on a real card."""

import numpy as np
import pytest

from fabric_pipelines.analytics import kernels
from fabric_pipelines.analytics.reference.row_admit import INF, NAN
from fabric_pipelines.analytics.sweeps import CpuSweeps
from fabric_pipelines.device.card import Card, DeviceArray
from tests.gpu.grid import both, every_dim, store

MIN_NORM = 1e-12


def run(card: Card, rows: DeviceArray, blocks: int | None = None) -> tuple[np.ndarray, ...]:
    return tuple(
        card.download(part) for part in kernels.row_admit(card, rows, MIN_NORM, blocks=blocks)
    )


def same_bytes(left: tuple[np.ndarray, ...], right: tuple[np.ndarray, ...]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(left, right, strict=True))


@every_dim
def test_hash_and_flags_are_bit_equal_and_norms_within_rounding(card: Card, dim: int) -> None:
    csr = store(dim)
    norm2, flag, row_hash = run(card, card.upload(csr.rows))
    twin = CpuSweeps(csr).admit(MIN_NORM, hashed=True)
    assert np.array_equal(row_hash, twin.hash)
    assert np.array_equal(flag, twin.flag)
    np.testing.assert_allclose(norm2, twin.norm2, rtol=2 * np.finfo(float).eps * max(1, dim) ** 0.5)


@pytest.mark.parametrize("count", [0, 1, 2, 31, 32, 33, 127, 128, 129, 4095, 4096, 4097])
@both("dim", [1, 5, 16, 20, 30, 52, 64, 384, 1028, 1030], [1, 20, 30, 1030])
def test_every_count_of_rows_is_written_and_nothing_past_it(
    card: Card, count: int, dim: int
) -> None:
    rows = np.random.default_rng(count).standard_normal((count, dim), dtype=np.float32)
    guard = 64
    out = (
        card.upload(np.full(count + guard, 7.0)),
        card.upload(np.full(count + guard, 7, np.uint8)),
        card.upload(np.full((count + guard, 2), 7, np.uint64)),
    )
    if count:
        kernels.row_admit_into(card, card.upload(rows), MIN_NORM, out)
    norm2, flag, row_hash = (card.download(part) for part in out)
    wide = rows.astype(np.float64)
    np.testing.assert_allclose(norm2[:count], (wide * wide).sum(axis=1), rtol=1e-13)
    assert (flag[:count] == 0).all()
    assert (norm2[count:] == 7).all()
    assert (flag[count:] == 7).all()
    assert (row_hash[count:] == 7).all()


@every_dim
def test_a_signal_in_the_last_dimension_alone_is_seen(card: Card, dim: int) -> None:
    rows = np.zeros((4, dim), dtype=np.float32)
    rows[:, -1] = [3.0, np.nan, np.inf, 0.0]
    norm2, flag, row_hash = run(card, card.upload(rows))
    assert norm2[0] == 9.0
    assert flag.tolist() == [0, NAN, INF, 4]
    assert len(np.unique(row_hash[:, 0])) == 4


@both("dim", [3, 128, 768, 1025], [3, 64])
def test_ten_runs_and_any_grid_give_the_same_bytes(card: Card, dim: int) -> None:
    rows = card.upload(store(dim).rows)
    first = run(card, rows)
    assert all(same_bytes(run(card, rows), first) for _ in range(9))
    assert all(same_bytes(run(card, rows, blocks), first) for blocks in (1, 7, 1000))


@both("dim", [8, 128, 2048], [8, 128])
def test_rows_off_a_16_byte_border_give_the_same_bytes(card: Card, dim: int) -> None:
    rows = store(dim).rows
    flat = card.upload(np.concatenate([[np.float32(0)], rows.ravel(), np.zeros(3, np.float32)]))
    before = card.launches.total()
    shifted = run(card, flat[1 : 1 + rows.size].reshape(rows.shape))
    assert card.launches[f"row_admit_any_{kernels.lanes_for(dim)}"] > 0
    assert card.launches.total() == before + 1
    aligned = run(card, card.upload(rows))
    assert np.array_equal(shifted[2], aligned[2])
    np.testing.assert_allclose(shifted[0], aligned[0], rtol=1e-12)
