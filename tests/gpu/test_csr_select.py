"""Kernel family csr_select against its twin: the source on the CPU, and the cubin on a real card."""

import numpy as np
import pytest

from fabric_pipelines.analytics import kernels
from fabric_pipelines.analytics.csr import segment_quantiles
from fabric_pipelines.analytics.reference import csr_select as twin
from fabric_pipelines.device.card import Card
from tests.gpu.grid import SIZES

SHARES = np.array([0.5, 0.95, 0.99])


def borders(sizes: list[int]) -> np.ndarray:
    shuffled = np.random.default_rng(len(sizes)).permutation(sizes)
    return np.concatenate([[0], np.cumsum(shuffled)]).astype(np.int64)


def values(kind: str, count: int) -> np.ndarray:
    rng = np.random.default_rng([count, len(kind)])
    drawn = {
        "radii": lambda: np.sqrt(rng.chisquare(100, count)),
        "signed": lambda: rng.standard_normal(count) * 10.0 ** rng.integers(-300, 300, count),
        "few": lambda: rng.integers(-1, 2, count) * 1.0,
        "one": lambda: np.full(count, -2.5),
        "last bits": lambda: 1.0 + rng.integers(0, 40, count) * np.finfo(float).eps,
        "outlier": lambda: np.where(rng.random(count) < 0.01, 1e300, rng.random(count)),
    }
    found: np.ndarray = drawn[kind]()
    return found


def run(
    card: Card, host: tuple[np.ndarray, ...], shares: np.ndarray = SHARES, **rest: int
) -> np.ndarray:
    there = [card.upload(part) for part in (*host, shares)]
    return card.download(kernels.csr_quantiles(card, *there, **rest))


@pytest.mark.parametrize("kind", ["radii", "signed", "few", "one", "last bits", "outlier"])
def test_quantiles_equal_the_twin_and_the_cpu_pass_to_the_last_bit(card: Card, kind: str) -> None:
    indptr = borders([*SIZES, 0, 3, 10, 257])
    count = int(indptr[-1])
    value, flag = values(kind, count), np.zeros(count, np.uint8)
    flag[np.random.default_rng(1).random(count) < 0.1] = 1
    for size in (33, 129, 4096):  # clusters of which nothing counts
        nothing = int(np.flatnonzero(np.diff(indptr) == size)[0])
        flag[indptr[nothing] : indptr[nothing + 1]] = 2
    value[flag != 0] = np.nan
    found = run(card, (value, flag, indptr))
    assert found.tobytes() == twin.csr_quantiles(value, flag, indptr, SHARES).tobytes()
    few_blocks = run(card, (value, flag, indptr), blocks=2)  # each has several clusters to do
    assert few_blocks.tobytes() == found.tobytes()
    owner = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    of_pass = segment_quantiles(value, flag == 0, owner, len(indptr) - 1, SHARES.tolist())
    assert np.array_equal(found, np.stack(of_pass, axis=1), equal_nan=True)


@pytest.mark.parametrize("shares", [[0.1], [0.0, 1.0], [1 / 3, 0.25, 0.75, 1.0]])
def test_any_shares_up_to_four(card: Card, shares: list[float]) -> None:
    indptr = borders([1, 2, 3, 32, 33, 500] * 5)
    value, flag = values("radii", int(indptr[-1])), np.zeros(indptr[-1], np.uint8)
    found = run(card, (value, flag, indptr), np.array(shares))
    assert np.array_equal(found, twin.csr_quantiles(value, flag, indptr, np.array(shares)))


def test_any_grid_gives_the_same_bytes(card: Card) -> None:
    indptr = borders([*SIZES, 40, 40, 40])
    host = (values("radii", int(indptr[-1])), np.zeros(indptr[-1], np.uint8), indptr)
    first = run(card, host).tobytes()
    assert all(run(card, host, blocks=blocks).tobytes() == first for blocks in (1, 3, 100))


@pytest.mark.parametrize("sizes", [[*SIZES, 0, 0], [2] * 1500, [0, 0], [7000]])
def test_copies_name_the_first_of_all_equal_rows_of_their_cluster(
    card: Card, sizes: list[int]
) -> None:
    indptr = borders(sizes)
    rng = np.random.default_rng(7)
    row_hash = rng.integers(0, 1 << 64, (max(1, int(indptr[-1]) // 2), 2), np.uint64)
    row_hash = row_hash[rng.integers(0, len(row_hash), indptr[-1])]
    row_hash[: len(row_hash) // 4, 0] = 5  # equal in one half: they collide, and are not copies
    expected = twin.csr_copies(row_hash, indptr)
    for blocks in (None, 1, 7):
        copy_of, counts = kernels.csr_copies(
            card, card.upload(row_hash), card.upload(indptr), blocks=blocks
        )
        assert np.array_equal(card.download(copy_of), expected[0])
        assert np.array_equal(card.download(counts)[:, 0], expected[1])
