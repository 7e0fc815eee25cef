"""P11, Gaussian kernel sums: each cluster as a gas of pairs of energy E = d^2 / 2 at temperature T.

exp(-E / T) is summed over all ordered pairs. P9 has left the least energy of every row, so a row's sum is taken
relative to it in one sweep and an outlier keeps its density where a plain sum would be 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fabric_pipelines.analytics.csr import (
    F64,
    I64,
    Bool,
    Csr,
    segment_max,
    segment_sum,
    unknown,
)
from fabric_pipelines.analytics.neighbours import NEIGHBOURS, Neighbours
from fabric_pipelines.analytics.pair_tiles import tile_values, tiles
from fabric_pipelines.analytics.stacks import Members, Stack
from fabric_pipelines.analytics.threads import over_rows
from fabric_pipelines.analytics.tiles import Tiles

TIE = 1e-10  # log densities closer than this are equal: the lower id is the mode


@dataclass(frozen=True, slots=True)
class Gauss:
    """P11. Per cluster, NaN where none was asked: ln of the mean weight Z, mean energy under the weights, heat
    capacity Var(E) / T^2; and the rows that are densest among their neighbours."""

    log_partition: F64
    energy: F64
    heat_capacity: F64
    modes: I64


def gauss(
    csr: Csr,
    members: Members,
    found: Neighbours,
    radius2: F64,
    copy_of: I64,
    temperature: F64,
    tiles: Tiles | None = None,
) -> Gauss:
    """temperature f64 [K]; clusters where it is not above 0 are left out."""
    out = Gauss(
        log_partition=unknown(csr.clusters),
        energy=unknown(csr.clusters),
        heat_capacity=unknown(csr.clusters),
        modes=np.zeros(csr.clusters, dtype=np.int64),
    )
    density = np.full(len(csr.rows), np.nan)

    def measure(stack: Stack) -> None:
        heat = temperature[stack.clusters]
        if (heat > 0).any():
            least = found.distance[stack.places, 0] ** 2
            _sum(stack, radius2, copy_of, least, np.where(heat > 0, heat, np.nan), out, density)

    if tiles is None:
        members.sweep(2, lambda count: tile_values(count, csr.dim), measure)
    else:
        _by_tiles(members, radius2, copy_of, temperature, tiles, out, density)
    peaks = _densest(csr, found, density, TIE if tiles is None else tiles.rounding)
    out.modes[:] = segment_sum(peaks.astype(np.int64), csr.indptr)
    return out


def flop(size: F64, dim: int) -> float:
    return float(((2 * dim + 30) * size**2).sum())


def _sum(
    stack: Stack, radius2: F64, copy_of: I64, least: F64, heat: F64, out: Gauss, density: F64
) -> None:
    """least f64 [g, n]: squared distance of each row to its nearest; heat f64 [g]: T."""
    weight, first, second = np.zeros((3, *least.shape))
    for tile in tiles(stack, radius2, copy_of):
        excess = tile.distance2 - least[:, tile.rows, None]
        excess *= (-0.5 / heat)[:, None, None]
        here, there = tile.diagonal
        excess[:, here, there] = -np.inf
        np.exp(excess, out=excess)
        weight[:, tile.rows] += excess.sum(axis=2)
        excess *= tile.distance2
        first[:, tile.rows] += excess.sum(axis=2)
        second[:, tile.rows] += np.einsum("grc,grc->gr", excess, tile.distance2)
    log_row = np.log(weight) - 0.5 * least / heat[:, None]
    density[stack.places] = log_row
    top = log_row.max(axis=1, keepdims=True)
    share = np.exp(log_row - top)
    total = share.sum(axis=1)
    pairs = stack.count * (stack.count - 1)
    out.log_partition[stack.clusters] = np.log(total / pairs) + top[:, 0]
    energy = 0.5 * (share * first / weight).sum(axis=1) / total
    square = 0.25 * (share * second / weight).sum(axis=1) / total
    out.energy[stack.clusters] = energy
    out.heat_capacity[stack.clusters] = np.maximum(square - energy**2, 0.0) / heat**2


def _by_tiles(
    members: Members, radius2: F64, copy_of: I64, temperature: F64, tiles: Tiles, out: Gauss,
    density: F64,
) -> None:  # fmt: skip
    log_row, mean2, mean4 = np.full((3, len(members.places)), np.nan)
    for part, found in tiles.weighed(members, radius2, copy_of, temperature):
        log_row[part], mean2[part], mean4[part] = found
    density[members.places] = log_row
    bounds, size = np.append(members.first, len(members.places)), members.size
    top = segment_max(log_row, bounds)
    share = np.exp(log_row - np.repeat(top, size))
    known = (size > 1) & (temperature > 0)
    total = np.where(known, segment_sum(share, bounds), np.nan)
    energy = 0.5 * segment_sum(share * mean2, bounds) / total
    square = 0.25 * segment_sum(share * mean4, bounds) / total
    out.energy[:] = energy
    with np.errstate(divide="ignore", invalid="ignore"):
        out.log_partition[:] = np.log(total / (size * (size - 1.0))) + np.where(known, top, np.nan)
        out.heat_capacity[:] = np.maximum(square - energy**2, 0.0) / temperature**2


def _densest(csr: Csr, found: Neighbours, density: F64, tie: float) -> Bool:
    """Rows denser than all their neighbours; equals go to the lower id."""
    peak = np.isfinite(density)
    ranks = range(min(NEIGHBOURS, found.row.shape[1]))

    def judge(rows: slice) -> None:
        for rank in ranks:
            there = found.row[rows, rank]
            other = np.where(there >= 0, density[there], -np.inf)
            lower = csr.ids[rows] < csr.ids[there]
            ahead = density[rows] - other
            peak[rows] &= (ahead > tie) | ((np.abs(ahead) <= tie) & lower) | (there < 0)

    over_rows(judge, len(peak), len(ranks))
    return peak
