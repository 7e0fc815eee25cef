"""Twin of cuda/row_admit.cu: squared norm, flags and 128-bit hash of each row.

The hash is over the stored bytes (so -0.0 and 0.0 differ). A row is cut into pairs of 32-bit words, padded
with one zero word when d is odd; pair p, read as one 64-bit number v, is whitened with its own key and folded
by a 32 x 32 -> 64 product, which costs a GPU one multiply-add where a splitmix step a word costs eight. v
itself is added so that a product by zero cannot hide a change. Sums are modulo 2^64, so any order of lanes
gives the same bits. Not a cryptographic hash: it finds duplicates and damage, not an adversary.
"""

from __future__ import annotations

import numpy as np

from fabric_pipelines.analytics.csr import F32, F64, U64

NAN, INF, ZERO = 1, 2, 4  # bits of a row's flag
MASK64 = (1 << 64) - 1
KEY_1 = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd
KEY_2 = 0xD1B54A32D192ED03  # 2^64 / plastic-number constant of Roberts' R2 sequence, odd


def mix64(x: U64) -> U64:
    """Finaliser of splitmix64 without its increment (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def row_hash(rows: F32) -> U64:
    """[n, d] f32 -> [n, 2] u64."""
    count, dim = rows.shape
    words = np.zeros((count, dim + dim % 2), dtype="<u4")
    words[:, :dim] = rows.view("<u4")
    pairs = words.view("<u8")
    position = np.arange(1, pairs.shape[1] + 1, dtype=np.uint64)
    low = np.uint64(0xFFFFFFFF)
    out = np.empty((count, 2), dtype=np.uint64)
    for column, key in enumerate((KEY_1, KEY_2)):
        white = pairs ^ (position * np.uint64(key))
        folded = (white & low) * (white >> np.uint64(32)) + pairs
        total = folded.sum(axis=1, dtype=np.uint64)
        out[:, column] = mix64(total ^ np.uint64(dim * key & MASK64))
    return out


def row_admit(
    rows: F32, min_norm: float
) -> tuple[F64, np.ndarray[tuple[int], np.dtype[np.uint8]], U64]:
    """[n, d] f32 -> norm2 f64 [n], flag u8 [n], hash 2 x u64 [n, 2]."""
    return *row_flags(rows, min_norm), row_hash(rows)


def row_flags(
    rows: F32, min_norm: float, into: F64 | None = None
) -> tuple[F64, np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    """[n, d] f32 -> norm2 f64 [n], flag u8 [n]. into f64 [n, d]: overwritten on the way.

    A row with a NaN or Inf component keeps whatever its sum gives; its flag says not to use it. `ZERO` is set
    for finite rows whose norm is below `min_norm`, for which a direction is undefined.
    """
    wide = np.empty(rows.shape) if into is None else into
    np.copyto(wide, rows)
    with np.errstate(invalid="ignore"):  # flagged below
        norm2 = np.vecdot(wide, wide)
    nan, inf = np.zeros((2, len(rows)), dtype=np.bool_)
    broken = np.flatnonzero(~np.isfinite(norm2))  # squares of finite float32 stay finite in float64
    nan[broken] = np.isnan(rows[broken]).any(axis=1)
    inf[broken] = np.isinf(rows[broken]).any(axis=1)
    zero = ~nan & ~inf & (norm2 < min_norm * min_norm)
    flag = nan * np.uint8(NAN) | inf * np.uint8(INF) | zero * np.uint8(ZERO)
    return norm2, flag.astype(np.uint8)
