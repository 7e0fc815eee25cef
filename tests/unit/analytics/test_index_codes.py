"""E8 codes are the nearest points of their box, and their bytes say exactly which."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fabric_pipelines.analytics.index import e8
from fabric_pipelines.analytics.reference import e8_codec


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_block_is_coded_as_the_nearest_point_of_the_box(bits):
    rng = np.random.default_rng(bits)
    blocks = rng.standard_normal((40, 8)) * (rng.choice([0.3, 1.0, 3.0], (40, 1)) * 2**bits / 4)
    k, coset = e8.nearest(blocks[:, None], bits)
    for row, block in enumerate(blocks):
        true_k, true_coset, apart = e8_codec.nearest(block, bits)
        point = np.array(e8_codec.values(k[row, 0].tolist(), int(coset[row, 0]), bits)) / 4
        assert k[row].sum() % 2 == 0
        assert ((block - point) ** 2).sum() == pytest.approx(apart, abs=1e-12)
        assert (k[row, 0].tolist(), coset[row, 0]) == (true_k, true_coset)


def test_at_two_bits_it_is_the_nearest_of_all_points_there_are():
    every = np.array([k for k in itertools.product(range(4), repeat=8) if sum(k) % 2 == 0])
    points = np.concatenate([every - 7 / 4, every - 7 / 4 + 0.5])
    rng = np.random.default_rng(2)
    for block in rng.standard_normal((30, 8)):
        decoded = e8.decode(e8.encode(block[None], 2), 2)[0] / 4
        assert ((block - decoded) ** 2).sum() == pytest.approx(
            ((points - block) ** 2).sum(axis=1).min()
        )


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_code_has_b_bytes_a_block_and_every_byte_decodes_to_a_point(bits):
    rng = np.random.default_rng(7)
    codes = rng.integers(0, 256, (50, 3 * bits), dtype=np.uint8)
    values = e8.decode(codes, bits)
    assert values.shape == (50, 24)
    assert (values % 2 != 0).all()
    assert np.abs(values.astype(int)).max() <= e8.top_value(bits)
    assert (e8.encode(values / 4.0, bits) == codes).all()


def test_the_lattice_loses_what_conway_and_sloane_say():
    rng = np.random.default_rng(11)
    points = rng.uniform(-2, 2, (20_000, 8))  # well inside the box of four bits
    off = points - e8.decode(e8.encode(points, 4), 4) / 4.0
    # the second moment a dimension of E8, whose cell has volume 1
    assert (off**2).mean() == pytest.approx(929 / 12960, rel=0.01)


@pytest.mark.parametrize("dim", [1, 7, 8, 12, 100, 384])
def test_the_rotation_keeps_products_and_spreads_a_spike(dim):
    rotation = e8.Rotation(dim, seed=3)
    rng = np.random.default_rng(dim)
    rows = rng.standard_normal((5, dim))
    turned = rotation(rows)
    assert turned.shape == (5, -(-dim // 8) * 8)
    np.testing.assert_allclose(turned @ turned.T, rows @ rows.T, atol=1e-12)
    spike = rotation(np.eye(dim)[:1])[0]
    assert (spike**2).max() <= (1.001 if dim < 100 else 0.51)
