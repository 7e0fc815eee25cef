"""Prefix keys: one number per prompt whose order is a depth-first walk of the radix tree of all prompts.

The prefix of a prompt at each depth of a layout, in blocks of 16 tokens, is hashed; the leading bits of those
hashes, shallow to deep, make a 64-bit key. Prompts that share a prefix share leading bits, so sorting the
*whole* backlog of a lane by key puts them side by side, whatever the arrival order. Any depth-first order is
optimal once a cache holds one path (SGLang, arXiv 2312.07104).

The hash of a prefix is a polynomial over its tokens modulo 2^64 with an odd base: the whole batch takes one
cumulative sum, and a depth costs one subtraction per row. A chain of hashes per block would need a ragged
gather, which numpy does at 3-39 Mtok/s.

Depths must be dense: prompts that part and end between two depths are not told apart. Layout 1 (doubling
depths) falls 0.01 short of the bound on long prompts in `fabric bench supply`, and more with smaller caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import numpy.typing as npt

BLOCK = 16

Keys = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Layout:
    """depths: in blocks; bits: of the hash at each of them, 64 in all."""

    depths: tuple[int, ...]
    bits: tuple[int, ...]
    shifts: tuple[int, ...] = field(init=False)
    reached: Counts = field(init=False)  # tokens at each depth, from 0
    evidence: Counts = field(init=False)  # key bits down to each depth, from 0
    level_of_bits: Counts = field(init=False)  # depths covered by so many equal leading bits, 0..64

    def __post_init__(self) -> None:
        sums = list(accumulate(self.bits))
        assert sums[-1] == 64
        assert len(self.bits) == len(self.depths)
        made = {
            "shifts": tuple(64 - total for total in sums),
            "reached": np.array([0, *(depth * BLOCK for depth in self.depths)], np.int64),
            "evidence": np.array([0, *sums], np.int64),
            "level_of_bits": np.searchsorted(sums, np.arange(65), side="right"),
        }
        for name, value in made.items():
            object.__setattr__(self, name, value)


CURRENT = 2
LAYOUTS: Mapping[int, Layout] = {
    1: Layout((1, 2, 4, 8, 16, 32), (14, 12, 10, 10, 9, 9)),
    CURRENT: Layout(
        (1, 2, 4, 6, 8, 10, 12, 15, 18, 22, 26, 32, 40, 48, 60, 76, 100),
        (8, 6, 4, 4, 4, 4, 4, *(3,) * 10),
    ),
}
SPARE_BITS = 4  # of evidence beyond log2 of the backlog: one neighbour in 16 may be taken for a sharer by chance

_BASE = 0xD1342543DE82EF95  # odd, hence invertible modulo 2^64
_BASE_INVERSE = pow(_BASE, -1, 1 << 64)
_STRIPE = 1 << 14  # tokens whose terms stay in the cache between passes
_MIX_1, _MIX_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


def prefix_keys(tokens: npt.NDArray[np.uint32], lengths: Counts, *, layout: int = CURRENT) -> Keys:
    """Key of each prompt, uint64 [rows]; `tokens` are all prompts end to end, `lengths` theirs. A depth that
    a prompt does not reach contributes zeros, so it sorts before those that go on."""
    rows, by = len(lengths), LAYOUTS[layout]
    starts = np.zeros(rows, np.int64)
    np.cumsum(lengths[:-1], out=starts[1:])
    with np.errstate(over="ignore"):
        sums = _prefix_sums(tokens)
        undo = _powers(_BASE_INVERSE, len(tokens) + 1)[starts]
        before = sums[starts]
        keys = np.zeros(rows, np.uint64)
        for depth, bits, shift in zip(by.depths, by.bits, by.shifts, strict=True):
            whole = np.flatnonzero(lengths >= depth * BLOCK)
            if not len(whole):
                break
            ends = starts[whole] + depth * BLOCK
            marks = _finish((sums[ends] - before[whole]) * undo[whole]) >> np.uint64(64 - bits)
            keys[whole] |= marks << np.uint64(shift)
    return keys


def shared_tokens(keys: Keys, lengths: Counts, *, among: int | None = None) -> Counts:
    """Tokens of each prompt that the one before it in this order has already brought into a cache, to the
    resolution of the layout; the first gets 0. int64 [rows].

    `among` prompts the order was made (default: these). Neighbours of a long order have equal leading bits by
    chance, so a depth counts only if more bits vouch for it than chance explains.
    """
    shared = np.zeros(len(keys), np.int64)
    if len(keys) < 2:
        return shared
    by = LAYOUTS[CURRENT]
    equal = by.level_of_bits[64 - _bit_lengths(keys[1:] ^ keys[:-1])]
    reach = np.searchsorted(by.reached, np.minimum(lengths[1:], lengths[:-1]), side="right") - 1
    level = np.minimum(equal, reach)
    needed = max(among or len(keys), 1).bit_length() + SPARE_BITS
    shared[1:] = np.where(by.evidence[level] >= needed, by.reached[level], 0)
    return shared


def _bit_lengths(values: Keys) -> npt.NDArray[np.int32]:
    """Bits up to the highest one set, 0 of 0. float64 is exact up to 53 bits, hence the two halves."""
    high = np.frexp((values >> np.uint64(32)).astype(np.float64))[1]
    low = np.frexp((values & np.uint64(0xFFFFFFFF)).astype(np.float64))[1]
    found: npt.NDArray[np.int32] = np.where(high > 0, high + 32, low)
    return found


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
