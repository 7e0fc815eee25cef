"""The kinds of index that there are: what each is made with, what its searches may choose, and what it cannot have.

Exact, inverted and lattice are ours; faiss, cagra and ivf_pq are other libraries' candidates behind the same door. faiss has one kind
because it has one word for an index, its factory string; cuVS has none, and its graph and its codes are chosen by different
numbers, so each is a kind by the name that cuVS and the papers give it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from typing import Any

from fabric_pipelines.analytics.search import METRICS
from fabric_pipelines.errors import UsageError


@dataclass(frozen=True, slots=True)
class Exact:
    """Every row is looked at."""

    name: str = field(default="exact", init=False)


@dataclass(frozen=True, slots=True)
class Inverted:
    """Rows in lists around centroids, of which a query looks at the nprobe nearest.

    lists: how many (0: the square root of the rows at training; fewer where there are fewer rows). balance: no list
    takes more than this times the rows a list, when it is cut; there are more lists where that needs them. aim: recall@10 that the nprobe of a search which names none should have."""

    lists: int = 0
    balance: float = 3.0
    iterations: int = 10
    aim: float = 0.95
    name: str = field(default="inverted", init=False)


@dataclass(frozen=True, slots=True)
class Lattice:
    """The same lists, of E8 codes with `bits` a dimension; the `rerank` best by code are ranked by their rows."""

    bits: int = 4
    lists: int = 0
    balance: float = 3.0
    iterations: int = 10
    aim: float = 0.95
    name: str = field(default="lattice", init=False)


@dataclass(frozen=True, slots=True)
class Faiss:
    """An index of faiss-cpu, by its factory string; `nprobe` is an IVF's, `rerank` the efSearch of an HNSW."""

    factory: str = "HNSW32"
    aim: float = 0.95
    name: str = field(default="faiss", init=False)


@dataclass(frozen=True, slots=True)
class Cagra:
    """cuVS's graph on a card, `degree` edges a row; `rerank` is its itopk_size, the candidates that a search keeps."""

    degree: int = 64
    aim: float = 0.95
    name: str = field(default="cagra", init=False)


@dataclass(frozen=True, slots=True)
class IvfPq:
    """cuVS's lists of product-quantised rows on a card; the `rerank` best by code are ranked by their rows.

    lists: how many (0: the square root of the rows). bits: of a code, 4 to 8; parts: codes a row (0: cuVS chooses)."""

    lists: int = 0
    bits: int = 8
    parts: int = 0
    aim: float = 0.95
    name: str = field(default="ivf_pq", init=False)


Theirs = Faiss | Cagra | IvfPq  # another library's candidates
Kind = Exact | Inverted | Lattice | Theirs
KINDS: dict[str, type[Kind]] = {
    "exact": Exact,
    "inverted": Inverted,
    "lattice": Lattice,
    "faiss": Faiss,
    "cagra": Cagra,
    "ivf_pq": IvfPq,
}
# What to do where recall stays below the aim. Lists of rows reach 1 when all of them are asked.
REMEDIES = {
    "lattice": "take more bits, or kind inverted",
    "faiss": "take another factory, or kind inverted",
    "cagra": "its graph does not lead to all rows, as with tight clusters; take kind inverted or ivf_pq, or a greater degree",
    "ivf_pq": "take more parts or bits, or kind inverted",
}


def choices_of(kind: Kind) -> tuple[str, ...]:
    """What a search of this kind may choose."""
    if isinstance(kind, Faiss):
        upper = kind.factory.upper()
        return ("rerank",) if "HNSW" in upper else ("nprobe",) if "IVF" in upper else ()
    if isinstance(kind, Cagra):
        return ("rerank",)
    both = ("nprobe", "rerank")
    return {"exact": (), "inverted": ("nprobe",), "lattice": both, "ivf_pq": both}[kind.name]


def kind_of(fields: Mapping[str, Any]) -> Kind:
    """From `name` and the fields of that kind. UsageError naming the kinds for another name."""
    given = dict(fields)
    name = given.pop("name", "")
    if name not in KINDS:
        raise UsageError(f"kind {name!r} is unknown; use one of {', '.join(KINDS)}")
    known = {each.name for each in fields_of(KINDS[name])}
    foreign = sorted(set(given) - known)
    if foreign:
        raise UsageError(f"an index of kind {name!r} has no {foreign[0]}: leave it out")
    return KINDS[name](**given)


def check(dim: int, kind: Kind, metric: str) -> None:
    """UsageError naming what an index cannot have."""
    if dim < 1:
        raise UsageError(f"dimension is {dim}; it must be at least 1")
    if metric not in METRICS:
        raise UsageError(f"metric {metric!r} is unknown; use one of {', '.join(METRICS)}")
    if isinstance(kind, Exact):
        return
    if not 0 < kind.aim <= 1:
        raise UsageError(f"aim is {kind.aim}; recall lies above 0 and at most at 1")
    if isinstance(kind, Faiss):
        return
    if isinstance(kind, Cagra):
        if kind.degree < 2:
            raise UsageError(f"degree is {kind.degree}; a graph needs at least 2 edges a row")
        return
    if isinstance(kind, IvfPq):
        if not 4 <= kind.bits <= 8:
            raise UsageError(f"bits is {kind.bits}; codes of IVF-PQ have 4 to 8")
        if kind.lists < 0 or kind.parts < 0 or kind.parts * kind.bits % 8:
            raise UsageError(
                "lists and parts cannot be negative, and parts times bits is a multiple of 8"
            )
        return
    if isinstance(kind, Lattice) and kind.bits not in (2, 3, 4):
        raise UsageError(f"bits is {kind.bits}; E8 codes have 2, 3 or 4 a dimension")
    if kind.lists < 0 or kind.iterations < 0:
        raise UsageError("lists and iterations cannot be negative")
    if not kind.balance >= 1:
        raise UsageError(f"balance is {kind.balance}; the largest list cannot be below the mean, 1")
