"""Codes of eight dimensions on the lattice E8, clipped to a box: b bytes a block of eight, b = 2, 3 or 4.

E8 is D8 (integers with an even sum) and D8 moved by one half in every coordinate (Conway & Sloane 1982). Coordinates
are k - (2^(b+1) - 1) / 4 + coset / 2 with k in 0 .. 2^b - 1, so that both cosets lie evenly around zero. The nearest
point of the box is found as theirs in the whole lattice: round each coordinate; where the sum is odd move the one
whose step costs least and stays in the box; do that in both cosets and keep the nearer. (Costs are convex and
add up, so an odd number of steps is cheapest with one.)

A code is b bytes of bit planes: bit j of byte p is bit p of coordinate j. An even sum makes the lowest bit of the last
coordinate follow from the other seven, so its place holds the coset. Every byte, and every pair of bytes, then decodes
by one look into a table, and decoded values are four times the coordinates: odd integers within +-(2^(b+1) - 1).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics.search import Ids
from fabric_pipelines.ledger import hash64

F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]
I8 = npt.NDArray[np.int8]
BLOCK = 8
# Rows of mean square 1 times 1 / SCALE lose least, on Gaussian coordinates, to rounding and clipping together.
SCALES = {2: 1.013, 3: 0.58, 4: 0.332}


def top_value(bits: int) -> int:
    """The largest decoded value."""
    return int(2 ** (bits + 1) - 1)


def encode(points: F64, bits: int) -> U8:
    """Codes uint8 [n, d / 8 * bits] of points [n, d] in lattice units, d a multiple of 8."""
    blocks = points.reshape(len(points), -1, BLOCK)
    k, coset = nearest(blocks, bits)
    planes = np.empty((*coset.shape, bits), np.uint8)
    for plane in range(bits):
        planes[..., plane] = np.packbits((k >> plane) & 1, axis=-1, bitorder="little")[..., 0]
    planes[..., 0] = (planes[..., 0] & 0x7F) | (coset << 7)
    return planes.reshape(len(points), -1)


def nearest(blocks: F64, bits: int) -> tuple[U8, U8]:
    """k uint8 [n, m, 8] and coset uint8 [n, m] of the point nearest to each block; ties to coset 0 and low places."""
    k, apart = _in_coset(blocks, bits, 0)
    other, farther = _in_coset(blocks, bits, 1)
    coset = farther < apart
    k[coset] = other[coset]
    return k, coset.astype(np.uint8)


def decode(codes: U8, bits: int) -> I8:
    """Four times the coordinates, int8 [n, d]."""
    count = len(codes)
    if bits == 2:
        values = _pair_table(2, 0).take(codes.view("<u2"))
    else:
        if bits == 4:
            pairs = codes.view("<u2").reshape(count, -1, 2)
            low, rest = pairs[..., 0], _pair_table(4, 2).take(pairs[..., 1])
        else:
            planes = codes.reshape(count, -1, 3)
            low = planes[..., 0] | (planes[..., 1].astype("<u2") << 8)
            rest = _pair_table(3, 2).take(planes[..., 2])  # a byte is a pair whose other one is 0
        values = _pair_table(bits, 0).take(low)
        both = values.view(np.int8)
        both += rest.view(np.int8)
    return np.ascontiguousarray(values).view(np.int8).reshape(count, -1)


@functools.cache
def _pair_table(bits: int, plane: int) -> npt.NDArray[np.uint64]:
    """Eight int8 as one word for each value of bytes `plane` and `plane` + 1: what they add to the coordinates."""
    byte = np.arange(1 << 16)
    total = np.zeros((len(byte), BLOCK), np.int64)
    for number in range(plane, min(plane + 2, bits)):
        own = ((byte >> (8 * (number - plane)))[:, None] >> np.arange(BLOCK)) & 1
        if number == 0:
            coset = own[:, 7].copy()
            own[:, 7] = own[:, :7].sum(axis=1) & 1
            total += 2 * coset[:, None] - top_value(bits)
        total += own * 4 * 2**number
    return np.ascontiguousarray(total.astype(np.int8)).view(np.uint64)[:, 0]


def _in_coset(blocks: F64, bits: int, coset: int) -> tuple[U8, F64]:
    wanted = blocks - (coset / 2 - top_value(bits) / 4)
    last = 2**bits - 1
    k = np.clip(np.rint(wanted), 0, last)
    off = wanted - k
    step = np.where(off >= 0, 1.0, -1.0)
    step[(k + step < 0) | (k + step > last)] *= -1
    odd = np.flatnonzero(k.sum(axis=-1).ravel() % 2)
    flat_k, flat_step = k.reshape(-1, BLOCK), step.reshape(-1, BLOCK)
    flat_off = off.reshape(-1, BLOCK)
    # a step s changes the square of an error e by 1 - 2 s e
    cheapest = np.argmax(flat_step[odd] * flat_off[odd], axis=1)
    flat_k[odd, cheapest] += flat_step[odd, cheapest]
    flat_off[odd, cheapest] -= flat_step[odd, cheapest]
    return k.astype(np.uint8), (off * off).sum(axis=-1)


class Rotation:
    """A fixed orthogonal map of [.., d] onto [.., padded]: signs, Hadamard, a permutation, signs, Hadamard.

    Spreads a row evenly over all coordinates, which is what one scale for a whole row asks for. `padded` is d up to
    a multiple of 8; it is cut into blocks that are powers of two, 256 at most. Only additions in a fixed order: the
    same bytes on any machine."""

    def __init__(self, dim: int, seed: int) -> None:
        self.dim, self.padded = dim, -(-dim // BLOCK) * BLOCK
        self._cuts = [0]
        while self._cuts[-1] < self.padded:
            left = self.padded - self._cuts[-1]
            self._cuts.append(self._cuts[-1] + min(256, 1 << (left.bit_length() - 1)))
        drawn = hash64(np.arange(3 * self.padded, dtype=np.int64) + (np.int64(seed) << 20))
        first, second, third = drawn.reshape(3, -1)
        self._signs = [np.where(word >> np.uint64(63), 1.0, -1.0) for word in (first, second)]
        self._order: Ids = np.argsort(third, kind="stable")

    def __call__(self, rows: npt.NDArray[Any]) -> F64:
        out = np.zeros((len(rows), self.padded))
        out[:, : self.dim] = rows
        out *= self._signs[0]
        self._hadamard(out)
        out = out[:, self._order]
        out *= self._signs[1]
        self._hadamard(out)
        return out

    def _hadamard(self, rows: F64) -> None:
        for start, stop in zip(self._cuts, self._cuts[1:], strict=False):
            block, width = np.ascontiguousarray(rows[:, start:stop]), 1
            while width < stop - start:
                pairs = block.reshape(len(rows), -1, 2, width)
                block = np.stack(
                    (pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), axis=2
                )
                width *= 2
            rows[:, start:stop] = block.reshape(len(rows), -1) / np.sqrt(stop - start)
