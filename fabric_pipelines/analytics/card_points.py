"""P1, P2, P3 and P8 on a card in one go: what metrics need of a cluster comes back, and nothing of a row.

All arrays lie in one block that the card keeps between measurements, every launch with its arguments is worked out once for a
shape of store, and the host waits once, for one copy. What the passes make of one number a row on the host, the kernels of
point_score make here in the same float64, operation by operation; sums over the rows of a cluster are csr_reduce's.

Several columns are one launch of csr_reduce: a column is filled up to whole runs by a cluster that nobody reads, so that each keeps
the bits that it has alone.

Cases that are rare go the long way instead, row by row: a cluster whose rows are all bad, rows that float32 cannot tell from another
centre's, one dimension (whose mean numpy sums in another order).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics import card_plan
from fabric_pipelines.analytics import kernels_points as launches
from fabric_pipelines.analytics import kernels_rows as rows_of
from fabric_pipelines.analytics import kernels_tiles as tiles
from fabric_pipelines.analytics.card_tiles import ROUNDING
from fabric_pipelines.analytics.csr import I64, Csr, unknown
from fabric_pipelines.analytics.passes import MARGIN_NARROW, TOLD
from fabric_pipelines.analytics.sweeps import Cost, Summed
from fabric_pipelines.device.card import Card, DeviceArray, Lent
from fabric_pipelines.errors import DeviceRefused

ALIGN = 256  # bytes: a store's rows start where 16-byte loads may
ROWS_MAX = 1 << 31  # two counts share a word
LOW = np.uint64(0xFFFFFFFF)
SHARES = (0.10,)  # of the margins


class Shape(NamedTuple):
    """What arrays depend on; of `listed` clusters, those with rows. window: centred rows at once; width: dimensions summed at once."""

    rows: int
    dim: int
    listed: int
    clusters: int
    window: int
    width: int

    @classmethod
    def of(cls, csr: Csr) -> Shape:
        rows, clusters = len(csr.rows), int((csr.sizes > 0).sum())
        window = min(rows, card_plan.window_rows(csr.dim))
        width = card_plan.window_width(rows_of.centroid_slots(rows, clusters), csr.dim)
        return cls(rows, csr.dim, csr.clusters, clusters, window, width)

    @property
    def stride(self) -> int:
        """Rows of a column of several: whole runs of csr_reduce."""
        return -(-self.rows // card_plan.REDUCE_ROWS) * card_plan.REDUCE_ROWS

    @property
    def served(self) -> bool:
        return self.dim > 1 and self.clusters > 1 and self.rows < ROWS_MAX

    @property
    def cost(self) -> Cost:
        """Beyond the rows, their ids and borders, and on the host."""
        layout = _layout(self)
        return Cost(
            layout.total - sum(layout.places[name].held for name in OPENING),
            host_bytes=3 * (layout.total - layout.back) + 1000 * self.clusters,
        )


class _Place(NamedTuple):
    at: int
    size: int
    held: int
    sides: tuple[int, ...]
    kind: npt.DTypeLike

    def of(self, block: Any, start: int = 0) -> Any:
        """The array in a block that begins at byte `start`."""
        part = block[self.at - start : self.at - start + self.size]
        return part.view(self.kind).reshape(self.sides)


class _Layout(NamedTuple):
    """By name, in the order in which arrays lie; those from byte `back` on go to the host, in one copy."""

    places: Mapping[str, _Place]
    back: int
    total: int


OPENING = ("store", "ids", "borders", "indptr")
BACK = (
    "norms",
    "norms_whole",
    "radius",
    "radius_whole",
    "score",
    "score_whole",
    "words",
    "length2",
    "quantiles",
)


@lru_cache(maxsize=8)
def _layout(of: Shape) -> _Layout:
    rows, stride, clusters, dim = of.rows, of.stride, of.clusters, of.dim
    pitch, two, four = tiles.pitch_of(dim), 2 * (clusters + 1), 4 * (clusters + 1)
    slots, slots4 = rows_of.reduce_slots(2 * stride, two), rows_of.reduce_slots(4 * stride, four)
    partial = rows_of.centroid_slots(rows, clusters) * of.width
    f8, f4, i8, u8 = np.float64, np.float32, np.int64, np.uint64
    arrays: dict[str, tuple[tuple[int, ...], npt.DTypeLike]] = {
        "store": ((rows, dim), f4), "ids": ((2 * stride,), i8), "borders": ((four + 1,), i8),
        "indptr": ((of.listed + 1,), i8),
        "norm2": ((rows,), f8), "kept": ((2 * stride,), np.uint8), "hash": ((rows, 2), u8),
        "weight": ((rows,), f8), "scaled": ((rows,), f8), "own": ((rows,), i8), "place": ((rows,), i8),
        "mark": ((4 * stride,), u8), "column": ((2 * stride,), f8), "radii": ((2 * stride,), f8),
        "total": ((clusters, dim), f8), "mean": ((clusters, dim), f8), "partial": ((partial,), f8),
        "slots": ((slots, 4), f8), "whole_slots": ((slots, 2), i8), "word_slots": ((slots4, 2), u8),
        "origin": ((dim,), f8), "shifted": ((1, dim), f8), "far2": ((clusters,), f8), "unit": ((2,), f8),
        "spread": ((clusters,), f8), "size": ((clusters,), f8),
        "centres": ((clusters, pitch), f4), "centres2": ((clusters,), f4),
        "tile": ((of.window, pitch), f4), "tile2": ((of.window,), f4),
        "own2": ((rows,), f4), "near": ((rows,), u8), "a": ((of.window,), f8), "b": ((rows,), f8),
        "margins": ((rows,), f8), "shares": ((len(SHARES),), f8),
    }  # fmt: skip
    whole = {name: ((two, 2), i8) if name.endswith("_whole") else ((two, 4), f8) for name in BACK}
    words, quantiles = ((four, 2), u8), ((clusters, len(SHARES)), f8)
    arrays.update({**whole, "words": words, "length2": ((clusters,), f8), "quantiles": quantiles})
    places, at, back = {}, 0, 0
    for name, (sides, kind) in arrays.items():
        size = math.prod(sides) * np.dtype(kind).itemsize
        held = -(-size // ALIGN) * ALIGN
        places[name] = _Place(at, size, held, sides, kind)
        back = at if name == BACK[0] else back
        at += held
    return _Layout(places, back, at)


class _Steps:
    """A card that queues nothing: it writes down every launch with its arguments."""

    def __init__(self, card: Card) -> None:
        self._card = card
        self.blocks_for, self.offset_of = card.blocks_for, card.offset_of
        self.listed: list[tuple[str, str, int, tuple[Any, ...]]] = []

    def launch(self, family: str, symbol: str, blocks: int, arguments: Sequence[Any]) -> None:
        self.listed.append((family, symbol, blocks, tuple(map(_number, arguments))))


def _number(item: Any) -> Any:
    """As it will travel, made once."""
    if isinstance(item, int):
        return np.int64(item)
    return np.float64(item) if isinstance(item, float) else item


class _Made:
    """Arrays laid out in a block, and the launches over them for one (min_norm, cosine, margins)."""

    def __init__(self, shape: Shape, block: DeviceArray) -> None:
        layout = _layout(shape)
        self.shape, self.back = shape, block[layout.back : layout.total]
        self.arrays = {name: place.of(block) for name, place in layout.places.items()}
        self.key: tuple[float, bool, bool] | None = None
        self.steps: list[tuple[str, str, int, tuple[Any, ...]]] = []


class CardPoints:
    """The rows of `csr` on the card, and the passes over them. Close it when the card is done with all that was queued."""

    def __init__(self, card: Card, csr: Csr, lent: Lent, made: _Made) -> None:
        self._card, self._csr, self._lent, self._made = card, csr, lent, made

    @classmethod
    def open(cls, card: Card, csr: Csr, workspace_bytes: int) -> CardPoints | None:
        """Uploads. None where it does not serve or has no room."""
        shape = Shape.of(csr)
        if not shape.served or shape.cost.bytes > workspace_bytes:
            return None
        try:
            lent = card.lend(_layout(shape).total)
        except DeviceRefused:
            return None
        made = lent.made
        if not isinstance(made, _Made) or made.shape != shape:
            made = lent.made = _Made(shape, lent.block)
        card.store(made.arrays["store"], csr.rows)
        card.store(made.arrays["ids"][: shape.rows], csr.ids)
        card.store(made.arrays["borders"], _borders(csr, shape))
        card.store(made.arrays["indptr"], csr.indptr)
        return cls(card, csr, lent, made)

    @property
    def rows(self) -> DeviceArray:
        """f32 [N, d]."""
        return self._made.arrays["store"]

    @property
    def ids(self) -> DeviceArray:
        return self._made.arrays["ids"][: self._made.shape.rows]

    @property
    def indptr(self) -> DeviceArray:
        """Of all clusters."""
        return self._made.arrays["indptr"]

    @property
    def cost(self) -> Cost:
        """Of P8, with the passes before it."""
        return self._made.shape.cost

    def close(self) -> None:
        self._card.take_back(self._lent)

    def summed(self, min_norm: float, *, cosine: bool, margins: bool) -> Summed | None:
        """None where a row has to be looked at; otherwise one number a cluster."""
        made, key = self._made, (min_norm, cosine, margins)
        if key != made.key:
            written = _Steps(self._card)
            _write(written, made.arrays, made.shape, cosine, min_norm)
            if margins:
                _order(written, made.arrays, made.shape)
            made.key, made.steps = key, written.listed
        if margins:
            self._card.store(made.arrays["shares"], np.array(SHARES))
        for step in made.steps:
            self._card.launch(*step)
        found = _read(self._card.download(made.back), made.shape, self._csr)
        if found is None or margins:
            return found
        return found._replace(margin_p10=unknown(self._csr.clusters))  # whatever lay there


def _borders(csr: Csr, of: Shape) -> I64:
    """Of four columns, each the clusters that have rows and one that fills it up; the first part is that of one, or of two."""
    own = csr.indptr[1:][csr.sizes > 0]
    column = np.concatenate([own, [of.stride]])
    shifted = np.arange(4)[:, None] * of.stride + column
    return np.concatenate([[0], shifted.reshape(-1)]).astype(np.int64)


def _write(
    card: Any, has: dict[str, DeviceArray], of: Shape, cosine: bool, min_norm: float
) -> None:
    rows, stride, clusters = of.rows, of.stride, of.clusters
    indptr, indptr2 = has["borders"][: clusters + 1], has["borders"][: 2 * (clusters + 1) + 1]
    flag, again = has["kept"][:rows], has["kept"][stride : stride + rows]
    roots, radius2 = has["radii"][:rows], has["radii"][stride : stride + rows]

    def reduce(column: str, into: str) -> None:
        rows_of.csr_reduce_into(
            card, has[column], has["kept"], has["ids"], indptr2,
            (has["slots"], has["whole_slots"]), (has[into], has[f"{into}_whole"]),
        )  # fmt: skip

    rows_of.row_admit_into(card, has["store"], min_norm, (has["norm2"], flag, has["hash"]))
    out = (has["column"], again, has["weight"], has["own"], has["place"], has["mark"])
    launches.admit(card, has["norm2"], flag, indptr, stride, out, cosine=cosine)
    reduce("column", "norms")
    whole = has["norms_whole"][:clusters]
    rows_of.csr_centroid_into(
        card, has["store"], has["weight"], indptr, has["partial"], has["total"]
    )
    launches.means(card, has["total"], whole, has["mean"], has["length2"])
    rows_of.csr_radius_into(card, has["store"], has["weight"], indptr, has["mean"], radius2)
    launches.roots(card, radius2, roots)
    reduce("radii", "radius")
    within = has["radius"][clusters + 1 : 2 * clusters + 1]
    launches.origin(card, has["mean"], whole, has["origin"])
    launches.reach(card, has["mean"], has["origin"], has["far2"])
    launches.unit(card, has["far2"], within, whole, (has["unit"], has["spread"], has["size"]))
    launches.centres(
        card, has["mean"], has["origin"], has["unit"], has["weight"],
        (has["centres"], has["centres2"], has["scaled"], has["shifted"]),
    )  # fmt: skip
    centres = tiles.TileRows(has["centres"], has["centres2"], indptr, np.array([0, clusters]), of.dim)  # fmt: skip
    for low in range(0, rows, of.window):
        part = slice(low, min(low + of.window, rows))
        count = part.stop - low
        block = tiles.TileRows(
            has["tile"][:count], has["tile2"][:count], indptr[:2], np.array([0, count]), of.dim
        )  # one cluster, so that its borders are not looked at
        tiles.tile_rows_into(
            card, has["store"], has["scaled"], has["place"][part], has["shifted"], block
        )
        found = tiles.CentrePoints(
            has["own2"][part], has["near"][part], has["a"][:count], has["b"][part]
        )
        tiles.centre_points_into(
            card, block, centres, has["own"][part], has["spread"], has["size"], found
        )
    launches.rows(
        card, (radius2, has["own2"], has["near"], has["b"], flag, has["own"]), (within, whole),
        has["unit"], stride, (ROUNDING, TOLD, MARGIN_NARROW), (has["column"], has["margins"], has["mark"]),
    )  # fmt: skip
    reduce("column", "score")
    rows_of.csr_words_into(card, has["mark"], has["borders"], has["word_slots"], has["words"])


def _order(card: Any, has: dict[str, DeviceArray], of: Shape) -> None:
    """Quantiles of the margins."""
    indptr, flag = has["borders"][: of.clusters + 1], has["kept"][: of.rows]
    rows_of.csr_quantiles_into(card, has["margins"], flag, indptr, has["shares"], has["quantiles"])


def _read(back: npt.NDArray[np.uint8], of: Shape, csr: Csr) -> Summed | None:
    layout = _layout(of)
    found = {name: layout.places[name].of(back, layout.back) for name in BACK}
    one = slice(0, of.clusters)
    two = slice(of.clusters + 1, 2 * of.clusters + 1)
    words = found["words"][:, 0].reshape(4, of.clusters + 1)[:, :-1]
    low, high = (words & LOW).astype(np.int64), (words >> np.uint64(32)).astype(np.int64)
    size = found["norms_whole"][one, 0]
    if high[3].any() or not size.all():
        return None
    error = np.maximum(found["score"][two, 3], 0.0)
    # one flag a row, and sums that all count it
    for name in ("norms_whole", "radius_whole", "score_whole"):
        for column in (one, two):
            error[found[name][column, 0] != size] = np.inf
    filled = csr.sizes > 0

    def wide(values: npt.NDArray[Any], filler: float = 0) -> npt.NDArray[Any]:
        if len(values) == len(filled):
            return values.copy()
        out = np.full(len(filled), filler, values.dtype)
        out[filled] = values
        return out

    return Summed(
        size=wide(size),
        nan=wide(low[0]),
        inf=wide(high[0]),
        zero=wide(low[1]),
        norm=wide(found["norms"][one, 0]),
        norm2=wide(found["norms"][two, 0]),
        length2=wide(found["length2"]),
        radius=wide(found["radius"][one, 0]),
        within=wide(found["radius"][two, 0]),
        least=wide(found["radius"][one, 2], np.inf),
        least_id=wide(found["radius_whole"][one, 1], -1),
        silhouette=wide(found["score"][one, 0]),
        negative=wide(low[2]),
        narrow=wide(high[2]),
        misassigned=wide(low[3]),
        error=wide(error),
        margin_p10=wide(found["quantiles"][:, 0], np.nan),
    )
