"""What a device may take over of P7, P8, P9 and P11: tiles of distances between two sets of rows, folded per row.

A CPU has none: its passes work in float64 and by stacks. analytics.card_tiles has them on a GPU in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from fabric_pipelines.analytics.csr import F64, I64, Bool
from fabric_pipelines.analytics.stacks import Members


class NearCentres(NamedTuple):
    """Per row f64 [N], over clusters other than its own: near2, squared distance to the nearest centre; mean2, least mean squared
    distance to the members; own2, squared distance to the own centre; reach2: the scale that their rounding is relative to."""

    own2: F64
    near2: F64
    mean2: F64
    reach2: float


class PairRows(NamedTuple):
    """Per row over the others of its cluster: sums of distances and of their squares, greatest squared distance; place int64 [n, k]
    of the nearest in the cluster (-1 beyond the last) and their distances f64 (NaN there)."""

    total: F64
    total2: F64
    greatest2: F64
    place: I64
    distance: F64


class WeighedRows(NamedTuple):
    """Per row over the others, by weights exp(-d^2 / 2T): ln of their sum, mean d^2, mean d^4. NaN where T is not above 0."""

    log_density: F64
    mean2: F64
    mean4: F64


class Tiles(Protocol):
    """What a device takes over of P7, P8, P9 and P11. `rounding`: relative, of what it finds."""

    rounding: float

    def partners(self, centres: F64, radius: F64) -> tuple[I64, Bool]:
        """centres f64 [m, d], radius f64 [m] = S -> j of the greatest (S_c + S_j) / |c - j| (-1: none), and whether
        others seem to be at the same place: those are to be looked at again."""

    def nearest_other(
        self, weight: F64, centres: F64, origin: F64, own: I64, size: F64, within: F64
    ) -> NearCentres:
        """weight f64 [N]; centres f64 [m, d]; origin f64 [d], a point among them; own int64 [N]: number of a row's centre, or
        any one of a row left out; size and within = W, f64 [m]."""

    def pairs(
        self, members: Members, radius2: F64, copy_of: I64, k: int
    ) -> Iterator[tuple[slice, PairRows]]:
        """Ranges of members.places, whole clusters, with what was found of their rows."""

    def weighed(
        self, members: Members, radius2: F64, copy_of: I64, temperature: F64
    ) -> Iterator[tuple[slice, WeighedRows]]:
        """temperature f64 [K]. Ranges of members.places, whole clusters."""
