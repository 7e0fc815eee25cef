"""Kernel family csr_reduce against its twin: the source on the CPU, and the cubin on a real card."""

import numpy as np
import pytest

from fabric_pipelines.analytics import kernels
from fabric_pipelines.analytics.reference import csr_reduce as twin
from fabric_pipelines.device.card import Card
from tests.gpu.grid import SIZES

Given = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def given(seed: int, sizes: list[int]) -> Given:
    """Values far from the origin, some equal, a tenth left out and NaN; sizes shuffled."""
    rng = np.random.default_rng([seed, len(sizes)])
    indptr = np.concatenate([[0], np.cumsum(rng.permutation(sizes))]).astype(np.int64)
    count = int(indptr[-1])
    value = 1000 + np.round(rng.standard_normal(count), 2)
    flag = (rng.random(count) < 0.1).astype(np.uint8) * np.uint8(4)
    value[flag != 0] = np.nan
    return value, flag, rng.permutation(count).astype(np.int64) + (5 << 40), indptr


def run(card: Card, host: Given, blocks: int | None = None) -> twin.Reduced:
    found = kernels.csr_reduce(card, *(card.upload(part) for part in host), blocks=blocks)
    return twin.Reduced(*(card.download(part) for part in found))


@pytest.mark.parametrize(
    "sizes",
    [
        [*SIZES, 0, 0, 1023, 1024, 1025, 2047, 2049],
        [9000],
        [0, 0, 0],
        [1] * 3000,
        [3, 0] * 700,
        [40_000, 7],
    ],
)
def test_moments_extremes_and_ids_equal_the_twin(card: Card, sizes: list[int]) -> None:
    host = given(0, sizes)
    found, expected = run(card, host), twin.csr_reduce(*host)
    assert np.array_equal(found.whole, expected.whole)
    assert np.array_equal(found.real[:, 2:], expected.real[:, 2:])
    eps = 4 * np.finfo(float).eps * max(1, max(sizes)) ** 0.5
    np.testing.assert_allclose(found.real[:, :2], expected.real[:, :2], rtol=eps, atol=1e-9)


def test_a_variance_far_from_the_origin_keeps_its_digits(card: Card) -> None:
    """The means of the runs are known to 1.5e-8 here; the sum of squares less n mean^2 has no digit left."""
    value = 1e8 + np.random.default_rng(0).standard_normal(5000)
    host = (value, np.zeros(5000, np.uint8), np.arange(5000), np.array([0, 5000]))
    np.testing.assert_allclose(run(card, host).real[0, 1], 5000 * value.var(), rtol=1e-8)


@pytest.mark.parametrize("sizes", [[*SIZES, 1025], [3] * 2000])
def test_sums_modulo_2_to_64_and_xors_equal_the_twin(card: Card, sizes: list[int]) -> None:
    indptr = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    word = np.random.default_rng(1).integers(0, 1 << 64, indptr[-1], np.uint64)
    there = (card.upload(word), card.upload(indptr))
    found = card.download(kernels.csr_words(card, *there))
    assert np.array_equal(found, twin.csr_words(word, indptr))
    again = card.download(kernels.csr_words(card, *there, blocks=3))
    assert again.tobytes() == found.tobytes()


def test_ten_runs_and_any_grid_give_the_same_bytes(card: Card) -> None:
    host = given(3, [*SIZES, 1025])
    first = run(card, host)
    for blocks in (None, None, None, None, None, None, 1, 7, 100):
        again = run(card, host, blocks)
        assert again.real.tobytes() == first.real.tobytes()
        assert again.whole.tobytes() == first.whole.tobytes()
