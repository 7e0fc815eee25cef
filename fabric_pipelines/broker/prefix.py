"""Prefix keys: one number per prompt whose order is a depth-first walk of the radix tree of all prompts.

The prefix of a prompt at a depth of 1, 2, 4, 8, 16 and 32 blocks of 16 tokens is hashed; the leading bits of
the six hashes, shallow to deep, make a 64-bit key. Prompts that share a prefix share leading bits, so sorting
the *whole* backlog of a lane by key puts them side by side, whatever the arrival order. Any depth-first order
is optimal once a cache holds one path (SGLang, arXiv 2312.07104).

The hash of a prefix is a polynomial over its tokens modulo 2^64 with an odd base: terms are made for a stripe of
whole rows at a time, which stays in the cache with its powers, and summed from depth to depth. One cumulative sum
over the batch takes twice as long; a chain of hashes per block would need a ragged gather, which numpy does at
3-39 Mtok/s.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BLOCK = 16
DEPTHS = (1, 2, 4, 8, 16, 32)
BITS = (14, 12, 10, 10, 9, 9)  # of the hash at each depth; 64 in all
_SHIFTS = tuple(64 - sum(BITS[: level + 1]) for level in range(len(BITS)))

# What two keys differ by is below _DIFFERS[i] exactly if they agree in all but the last i depths.
_DIFFERS = np.array([1 << shift for shift in reversed(_SHIFTS)], np.uint64)
_DEPTH_TOKENS = np.array([0, *(depth * BLOCK for depth in DEPTHS)], np.int64)

_BASE = 0xD1342543DE82EF95  # odd, hence invertible modulo 2^64
_BASE_INVERSE = pow(_BASE, -1, 1 << 64)
_STRIPE = 1 << 14  # tokens (at least one row) whose terms stay in the cache between passes
_MIX_1, _MIX_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)

Keys = npt.NDArray[np.uint64]


def prefix_keys(tokens: npt.NDArray[np.uint32], lengths: npt.NDArray[np.int64]) -> Keys:
    """Key of each prompt, uint64 [rows]; `tokens` are all prompts end to end, `lengths` theirs. A depth that
    a prompt does not reach contributes zeros, so it sorts before those that go on."""
    rows = len(lengths)
    starts = np.zeros(rows + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    keys = np.zeros(rows, np.uint64)
    with np.errstate(over="ignore"):
        sums = np.empty((rows, len(DEPTHS)), np.uint64)
        first = 0
        while first < rows:
            last = int(np.searchsorted(starts, starts[first] + _STRIPE, side="right")) - 1
            last = max(last, first + 1)
            mine = starts[first : last + 1]
            sums[first:last] = _depth_sums(tokens[mine[0] : mine[-1]], mine - mine[0])
            first = last
        for level, (depth, bits, shift) in enumerate(zip(DEPTHS, BITS, _SHIFTS, strict=True)):
            whole = lengths >= depth * BLOCK
            if not whole.any():
                break
            marks = _finish(sums[:, level]) >> np.uint64(64 - bits)
            keys |= np.where(whole, marks << np.uint64(shift), np.uint64(0))
    return keys


def shared_tokens(keys: Keys, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Tokens of each prompt that the one before it in this order has already brought into a cache, to the
    resolution of DEPTHS; the first gets 0. int64 [rows]."""
    shared = np.zeros(len(keys), np.int64)
    if len(keys) < 2:
        return shared
    agreed = len(DEPTHS) - np.searchsorted(_DIFFERS, keys[1:] ^ keys[:-1], side="right")
    reach = np.minimum(lengths[1:], lengths[:-1])
    reached = np.searchsorted(_DEPTH_TOKENS[1:], reach, side="right")
    shared[1:] = _DEPTH_TOKENS[np.minimum(agreed, reached)]
    return shared


def leaders(shared: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """First prompt of each group that shares a prefix: a prefix is reusable only once its first request ran."""
    first: npt.NDArray[np.bool_] = shared == 0
    return first


def _depth_sums(tokens: npt.NDArray[np.uint32], bounds: npt.NDArray[np.int64]) -> Keys:
    """Polynomial of the first DEPTHS[i] blocks of each row, uint64 [rows, depths]; a depth that a row does not
    reach holds nothing of use. `bounds` are the rows' starts and the end of the last one.

    Every token is mixed first, since small ids would leave the low bits of the sum nearly constant.
    """
    count = len(tokens)
    terms = np.empty(count + 1, np.uint64)
    terms[count] = 0  # so that the end of the last row is a place, too
    live = terms[:count]
    live[:] = tokens
    live += np.uint64(1)
    live *= _MIX_1
    live ^= live >> np.uint64(29)
    live *= _powers(_BASE, count)
    starts = bounds[:-1]
    edges = np.minimum(starts[:, None] + _DEPTH_TOKENS, bounds[1:, None])
    pieces = np.add.reduceat(terms, edges.reshape(-1)).reshape(edges.shape)[:, :-1]
    sums: Keys = np.cumsum(pieces, axis=1)
    sums *= _powers(_BASE_INVERSE, count + 1)[starts][:, None]
    return sums


def _finish(values: Keys) -> Keys:
    values = (values ^ (values >> np.uint64(32))) * _MIX_2
    return values ^ (values >> np.uint64(29))


_power_tables: dict[int, Keys] = {}


def _powers(base: int, count: int) -> Keys:
    """base^0 .. base^(count-1) modulo 2^64; tables grow by doubling and are kept (16 B a token of a stripe)."""
    table = _power_tables.get(base, np.ones(1, np.uint64))
    with np.errstate(over="ignore"):
        while len(table) < count:
            step = np.uint64(pow(base, len(table), 1 << 64))
            table = np.concatenate([table, table * step])
    _power_tables[base] = table
    return table[:count]
