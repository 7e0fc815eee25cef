"""Prefix keys: one number per prompt whose order is a depth-first walk of the radix tree of all prompts.

The prefix of a prompt at a depth of 1, 2, 4, 8, 16 and 32 blocks of 16 tokens is hashed; the leading bits of
the six hashes, shallow to deep, make a 64-bit key. Prompts that share a prefix share leading bits, so sorting
the *whole* backlog of a lane by key puts them side by side, whatever the arrival order. Any depth-first order
is optimal once a cache holds one path (SGLang, arXiv 2312.07104).

The hash of a prefix is a polynomial over its tokens modulo 2^64 with an odd base: the whole batch takes one
cumulative sum, and a depth costs one subtraction per row. A chain of hashes per block would need a ragged
gather, which numpy does at 3-39 Mtok/s.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BLOCK = 16
DEPTHS = (1, 2, 4, 8, 16, 32)
BITS = (14, 12, 10, 10, 9, 9)  # of the hash at each depth; 64 in all
_SHIFTS = tuple(64 - sum(BITS[: level + 1]) for level in range(len(BITS)))

_BASE = 0xD1342543DE82EF95  # odd, hence invertible modulo 2^64
_BASE_INVERSE = pow(_BASE, -1, 1 << 64)
_STRIPE = 1 << 14  # tokens whose terms stay in the cache between passes
_MIX_1, _MIX_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)

Keys = npt.NDArray[np.uint64]


def prefix_keys(tokens: npt.NDArray[np.uint32], lengths: npt.NDArray[np.int64]) -> Keys:
    """Key of each prompt, uint64 [rows]; `tokens` are all prompts end to end, `lengths` theirs. A depth that
    a prompt does not reach contributes zeros, so it sorts before those that go on."""
    rows = len(lengths)
    starts = np.zeros(rows, np.int64)
    np.cumsum(lengths[:-1], out=starts[1:])
    with np.errstate(over="ignore"):
        sums = _prefix_sums(tokens)
        undo = _powers(_BASE_INVERSE, len(tokens) + 1)[starts]
        before = sums[starts]
        keys = np.zeros(rows, np.uint64)
        for depth, bits, shift in zip(DEPTHS, BITS, _SHIFTS, strict=True):
            whole = lengths >= depth * BLOCK
            if not whole.any():
                break
            ends = np.where(whole, starts + depth * BLOCK, starts)
            marks = _finish((sums[ends] - before) * undo) >> np.uint64(64 - bits)
            keys |= np.where(whole, marks << np.uint64(shift), np.uint64(0))
    return keys


def shared_tokens(keys: Keys, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Tokens of each prompt that the one before it in this order has already brought into a cache, to the
    resolution of DEPTHS; the first gets 0. int64 [rows]."""
    shared = np.zeros(len(keys), np.int64)
    if len(keys) < 2:
        return shared
    differing = keys[1:] ^ keys[:-1]
    reach = np.minimum(lengths[1:], lengths[:-1])
    for depth, shift in zip(DEPTHS, _SHIFTS, strict=True):
        same = (differing >> np.uint64(shift)) == 0
        shared[1:] = np.where(same & (reach >= depth * BLOCK), depth * BLOCK, shared[1:])
    return shared


def leaders(shared: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """First prompt of each group that shares a prefix: a prefix is reusable only once its first request ran."""
    first: npt.NDArray[np.bool_] = shared == 0
    return first


def _prefix_sums(tokens: npt.NDArray[np.uint32]) -> Keys:
    """sums[i] = polynomial of tokens[:i]; every token is mixed first, since small ids would leave the low bits
    of the sum nearly constant."""
    sums = np.zeros(len(tokens) + 1, np.uint64)
    powers = _powers(_BASE, len(tokens))
    for start in range(0, len(tokens), _STRIPE):
        terms = tokens[start : start + _STRIPE].astype(np.uint64)
        end = start + len(terms)
        terms += np.uint64(1)
        terms *= _MIX_1
        terms ^= terms >> np.uint64(29)
        terms *= powers[start:end]
        terms[0] += sums[start]
        np.cumsum(terms, out=sums[start + 1 : end + 1])
    return sums


def _finish(values: Keys) -> Keys:
    values = (values ^ (values >> np.uint64(32))) * _MIX_2
    return values ^ (values >> np.uint64(29))


_power_tables: dict[int, Keys] = {}


def _powers(base: int, count: int) -> Keys:
    """base^0 .. base^(count-1) modulo 2^64; tables grow by doubling and are kept (16 B a token of a batch)."""
    table = _power_tables.get(base, np.ones(1, np.uint64))
    with np.errstate(over="ignore"):
        while len(table) < count:
            step = np.uint64(pow(base, len(table), 1 << 64))
            table = np.concatenate([table, table * step])
    _power_tables[base] = table
    return table[:count]
