"""Prefix keys: one number per prompt whose order is a depth-first walk of the radix tree of all prompts.

The prefix of a prompt at each depth of a layout, in blocks of 16 tokens, is hashed; the leading bits of those
hashes, shallow to deep, make a 64-bit key. Prompts that share a prefix share leading bits, so sorting the
*whole* backlog of a lane by key puts them side by side, whatever the arrival order. Any depth-first order is
optimal once a cache holds one path (SGLang, arXiv 2312.07104).

The hash of a prefix is a polynomial over its tokens modulo 2^64 with an odd base: terms are made for a stripe of
whole rows at a time, which stays in the cache with its powers, and summed from depth to depth. The stripes share one
piece of memory: fresh pages for each cost more than the arithmetic. One cumulative sum
over the batch takes twice as long; a chain of hashes per block would need a ragged gather, which numpy does at
3-39 Mtok/s.

Depths must be dense: prompts that part and end between two depths are not told apart. Layout 1 (doubling
depths) falls 0.01 short of the bound on long prompts in `fabric bench supply`, and more with smaller caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
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
    differs: Keys = field(
        init=False
    )  # two keys that agree in all but i depths differ by less than differs[i]

    def __post_init__(self) -> None:
        sums = list(accumulate(self.bits))
        assert sums[-1] == 64
        assert len(self.bits) == len(self.depths)
        made = {
            "shifts": tuple(64 - total for total in sums),
            "reached": np.array([0, *(depth * BLOCK for depth in self.depths)], np.int64),
            "evidence": np.array([0, *sums], np.int64),
            "differs": np.array([1 << 64 - total for total in reversed(sums)], np.uint64),
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
_STRIPE = (
    1 << 16
)  # tokens (at least one row): terms and powers fit 1 MiB of cache; half of it takes a seventh longer
_MIX_1, _MIX_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


def prefix_keys(tokens: npt.NDArray[np.uint32], lengths: Counts, *, layout: int = CURRENT) -> Keys:
    """Key of each prompt, uint64 [rows]; `tokens` are all prompts end to end, `lengths` theirs. A depth that
    a prompt does not reach contributes zeros, so it sorts before those that go on."""
    rows, by = len(lengths), LAYOUTS[layout]
    starts = np.zeros(rows + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    keys = np.zeros(rows, np.uint64)
    levels = int(np.searchsorted(by.reached, lengths.max(initial=0), side="right")) - 1
    if not levels:
        return keys
    sums = np.empty((rows, levels), np.uint64)
    room = min(int(starts[-1]), _STRIPE + int(lengths.max()))
    scratch = np.empty((2, room + 1), np.uint64)
    with np.errstate(over="ignore"):
        first = 0
        while first < rows:
            last = int(np.searchsorted(starts, starts[first] + _STRIPE, side="right")) - 1
            last = max(last, first + 1)
            mine = starts[first : last + 1]
            stripe = tokens[mine[0] : mine[-1]]
            sums[first:last] = _depth_sums(
                stripe, mine - mine[0], by.reached[: levels + 1], scratch
            )
            first = last
        for level, (bits, shift) in enumerate(zip(by.bits, by.shifts, strict=True)):
            if level == levels:
                break
            marks = _finish(sums[:, level]) >> np.uint64(64 - bits)
            whole = lengths >= by.reached[level + 1]
            keys |= np.where(whole, marks << np.uint64(shift), np.uint64(0))
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
    equal = len(by.depths) - by.differs.searchsorted(keys[1:] ^ keys[:-1], side="right")
    reach = by.reached.searchsorted(np.minimum(lengths[1:], lengths[:-1]), side="right") - 1
    needed = max(among or len(keys), 1).bit_length() + SPARE_BITS
    shared[1:] = _vouched(needed)[np.minimum(equal, reach)]
    return shared


@lru_cache
def _vouched(needed: int) -> Counts:
    """Tokens down to each depth if so many bits vouch for it, else 0."""
    by = LAYOUTS[CURRENT]
    return np.where(by.evidence >= needed, by.reached, 0)


def leaders(shared: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """First prompt of each group that shares a prefix: a prefix is reusable only once its first request ran."""
    first: npt.NDArray[np.bool_] = shared == 0
    return first


def _depth_sums(
    tokens: npt.NDArray[np.uint32], bounds: Counts, reached: Counts, scratch: Keys
) -> Keys:
    """Polynomial of the first reached[i + 1] tokens of each row, uint64 [rows, len(reached) - 1]; what a row does
    not reach holds nothing of use. `bounds` are the rows' starts and the end of the last one; `scratch`
    [2, more than tokens] is overwritten.

    Every token is mixed first, since small ids would leave the low bits of the sum nearly constant.
    """
    count = len(tokens)
    terms, spare = scratch[0, : count + 1], scratch[1, :count]
    terms[count] = 0  # so that the end of the last row is a place, too
    live = terms[:count]
    live[:] = tokens
    live += np.uint64(1)
    live *= _MIX_1
    np.right_shift(live, np.uint64(29), out=spare)
    live ^= spare
    live *= _powers(_BASE, count)
    starts = bounds[:-1]
    edges = np.minimum(starts[:, None] + reached, bounds[1:, None])
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
