"""The twin of row_admit against a plain loop over Python integers."""

import numpy as np
import pytest

from fabric_pipelines.analytics.reference import row_admit as twin

MASK = (1 << 64) - 1
DIMS = [1, 2, 3, 7, 8, 31, 33, 64, 127, 128, 129, 257, 1000]


def mixed(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def plain_hash(row: np.ndarray) -> tuple[int, int]:
    words = [int(word) for word in row.view(np.uint32)] + [0] * (len(row) % 2)
    out = []
    for key in (twin.KEY_1, twin.KEY_2):
        total = 0
        for pair in range(len(words) // 2):
            value = words[2 * pair] | words[2 * pair + 1] << 32
            white = value ^ ((pair + 1) * key & MASK)
            total += (white & 0xFFFFFFFF) * (white >> 32) + value
        out.append(mixed((total ^ (len(row) * key)) & MASK))
    return out[0], out[1]


@pytest.mark.parametrize("dim", DIMS)
def test_the_vectorised_hash_is_the_plain_loop(dim: int) -> None:
    rows = np.random.default_rng(dim).standard_normal((5, dim)).astype(np.float32)
    assert [tuple(map(int, pair)) for pair in twin.row_hash(rows)] == [
        plain_hash(row) for row in rows
    ]


@pytest.mark.parametrize("dim", [2, 129, 384, 1025])
def test_one_flipped_bit_in_the_last_dimension_changes_both_hashes(dim: int) -> None:
    rows = np.random.default_rng(0).standard_normal((32, dim)).astype(np.float32)
    flipped = rows.copy()
    flipped.view(np.uint32)[:, -1] ^= np.uint32(1) << np.arange(32, dtype=np.uint32)
    assert (twin.row_hash(rows) != twin.row_hash(flipped)).all()


def test_swapped_components_padding_and_signed_zero_change_the_hash() -> None:
    base = np.array([[1.0, 2.0, 3.0, 0.0]], dtype=np.float32)
    others = [base[:, [1, 0, 2, 3]], base[:, [2, 1, 0, 3]], base[:, :3], -base * [-1, -1, -1, 1]]
    marks = {bytes(twin.row_hash(np.ascontiguousarray(o, dtype=np.float32))) for o in others}
    assert len(marks | {bytes(twin.row_hash(base))}) == 5


def test_a_hundred_thousand_distinct_rows_have_distinct_hashes() -> None:
    rows = np.arange(200_000, dtype=np.float32).reshape(-1, 2)
    assert len(np.unique(twin.row_hash(rows)[:, 0])) == len(rows)
    assert len(np.unique(twin.row_hash(rows)[:, 1])) == len(rows)


def test_flags_name_nan_inf_and_zero_rows_and_finite_norms_are_exact() -> None:
    rows = np.zeros((6, 5), dtype=np.float32)
    rows[0, 4], rows[1, 2], rows[2, 0], rows[2, 1] = np.nan, -np.inf, np.nan, np.inf
    rows[4, 3], rows[5, :] = 1e-13, 3e38
    norm2, flag, _ = twin.row_admit(rows, 1e-12)
    assert flag.tolist() == [twin.NAN, twin.INF, twin.NAN | twin.INF, twin.ZERO, twin.ZERO, 0]
    assert norm2[5] == pytest.approx(5 * float(np.float32(3e38)) ** 2, rel=1e-15)
