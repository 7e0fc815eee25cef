"""A stand-in for cuVS's Python API as a contract states it, and for the little of CuPy that goes with it; no card, no cuVS.

Every call is bound to the contract's signature, an index has the contract's attributes and no others, and what cuVS punishes
with wrong memory is an AssertionError here: rows that an index only borrows and that are gone, candidates beyond the rows. In
place of a graph and of codes it searches exactly, so recall and speed here say nothing about cuVS; `Faults.lost` makes rows
unreachable, as they become in a graph that falls apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from fabric_pipelines.testing.contract import Contract

NONE = {"cagra": np.iinfo(np.uint32).max, "ivf_pq": np.iinfo(np.int64).max}
NONE["brute_force"] = NONE["ivf_pq"]


class OnCard(np.ndarray):
    """An array that counts as memory of a card."""


class CuvsException(Exception):
    """What the real one raises for whatever the library refuses."""


@dataclass
class Faults:
    """lost: share of the rows that no search of a graph reaches; cards: how many answer; version: what it says of
    itself instead; refuses: a call -> what it says; calls: every one, with its arguments by name."""

    lost: float = 0.0
    cards: int = 1
    version: str = ""
    refuses: dict[str, str] = field(default_factory=dict)
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


def modules(facts: Mapping[str, Any], faults: Faults | None = None) -> dict[str, ModuleType]:
    """Names and modules for sys.modules: cupy, cuvs and what is imported of it."""
    faults = faults or Faults()
    cuvs, neighbors, common = map(_module, ("cuvs", "cuvs.neighbors", "cuvs.common.exceptions"))
    cuvs.__dict__["__version__"] = faults.version or facts["source"]["module_version"]
    common.__dict__["CuvsException"] = CuvsException
    for name, offered in _Cuvs(facts, faults).offered().items():
        where, _, what = name.rpartition(".")
        if not where:
            neighbors.__dict__[what] = offered
        else:
            neighbors.__dict__.setdefault(where, _module(f"cuvs.neighbors.{where}"))
            neighbors.__dict__[where].__dict__[what] = offered
    return {module.__name__: module for module in (_cupy(faults), cuvs, neighbors, common)}


def _module(name: str) -> ModuleType:
    return ModuleType(name, "A stand-in.")


def _cupy(faults: Faults) -> ModuleType:
    class CUDARuntimeError(RuntimeError):
        pass

    def asarray(host: Any, dtype: Any = None) -> OnCard:
        there = isinstance(host, OnCard) and (dtype is None or host.dtype == dtype)
        return host if there else np.array(host, dtype).view(OnCard)

    def asnumpy(there: OnCard) -> Any:
        assert isinstance(there, OnCard), "an array of the host is fetched from the card"
        return np.array(there).view(np.ndarray)

    cupy = _module("cupy")
    runtime = SimpleNamespace(
        getDeviceCount=lambda: faults.cards,
        getDeviceProperties=lambda number: {"name": b"a stand-in's card"},
        CUDARuntimeError=CUDARuntimeError,
    )
    cupy.__dict__.update(
        asarray=asarray, asnumpy=asnumpy, minimum=np.minimum, cuda=SimpleNamespace(runtime=runtime)
    )
    return cupy


class _Index:
    """Rows [n, d], borrowed or held, their ids, and for IVF-PQ the rows that lists are around."""

    def __init__(self, names: list[str], **known: Any) -> None:
        self._names, self._known = set(names) | {"trained"}, {"trained": True} | known
        self.borrowed: Any = None
        self.held: Any = None
        self.ids: Any = None
        self.centres: Any = None

    def __getattr__(self, name: str) -> Any:
        known = self.__dict__.get("_known", {})
        if name in known and name in self._names:
            return known[name]
        raise AttributeError(f"cuVS's index has no {name} here")

    def take(self, rows: OnCard, *, borrow: bool) -> None:
        self.held = None if borrow else np.array(rows)
        self.borrowed = weakref.ref(rows) if borrow else None

    def count_lists(self) -> None:
        """Of each list as it is now, for list_sizes."""
        apart = ((self.rows[:, None] - self.centres[None]) ** 2).sum(axis=2)
        sizes = np.bincount(apart.argmin(axis=1), minlength=len(self.centres)).astype(np.uint32)
        self._known["list_sizes"] = SimpleNamespace(copy_to_host=lambda: sizes)

    @property
    def rows(self) -> Any:
        if self.borrowed is None:
            return self.held
        there = self.borrowed()
        assert there is not None, "the rows that this index borrows are gone"
        return np.asarray(there)


class _Cuvs:
    def __init__(self, facts: Mapping[str, Any], faults: Faults) -> None:
        self._facts, self._contract, self._faults = facts, Contract(facts), faults

    def offered(self) -> dict[str, Callable[..., Any]]:
        """Whatever the contract lists; a call that nothing here does is an AssertionError when it is made."""
        return {name: self._bound(name) for name in self._facts["calls"]}

    def _bound(self, name: str) -> Callable[..., Any]:
        where, _, what = name.rpartition(".")

        def call(*args: Any, **kwargs: Any) -> Any:
            given = self._facts["calls"][name]["defaults"] | self._contract.bind(name, args, kwargs)
            self._faults.calls.append((name, given))
            if name in self._faults.refuses:
                raise CuvsException(self._faults.refuses[name])
            if what.endswith("Params"):
                return SimpleNamespace(made_of=name, **given)
            does = getattr(self, f"_{what}", None)
            assert does is not None, f"the stand-in does not do {name}"
            for argument, made in (("index_params", "IndexParams"), ("search_params", "SearchParams"), ("params", "ExtendParams")):  # fmt: skip
                if argument in given and given[argument].made_of != f"{where}.{made}":
                    raise TypeError(f"Argument '{argument}' has incorrect type")
            return does(where, **given)

        return call

    def _fields(self, where: str) -> list[str]:
        return self._contract.names(f"{where}.Index")

    def _build(self, where: str, dataset: Any, index_params: Any = None, **given: Any) -> _Index:
        rows = _matrix(dataset)
        metric = given["metric"] if index_params is None else index_params.metric
        assert metric == "sqeuclidean", f"the stand-in knows no metric {metric}"
        if where == "ivf_pq":
            if len(rows) < index_params.n_lists:
                raise CuvsException("number of rows can't be less than n_lists")
            dim = index_params.pq_dim or -(-rows.shape[1] // 2)
            index = _Index(
                self._fields(where), n_lists=index_params.n_lists, pq_dim=dim, pq_bits=index_params.pq_bits
            )  # fmt: skip
            index.take(rows, borrow=False)
            index.centres = np.array(rows[: index_params.n_lists])
            index.count_lists()
        else:
            degree = {} if index_params is None else {"graph_degree": index_params.graph_degree}
            index = _Index(self._fields(where), **degree)
            index.take(rows, borrow=where == "brute_force" or rows.shape[1] * 4 % 16 == 0)
        index.ids = np.arange(len(rows))
        return index

    def _search(
        self, where: str, index: _Index, queries: Any, k: int, search_params: Any = None, **given: Any
    ) -> tuple[OnCard, OnCard]:  # fmt: skip
        asked, rows = np.asarray(_matrix(queries), np.float64), index.rows
        near = ((asked[:, None, :] - rows[None].astype(np.float64)) ** 2).sum(axis=2)
        if where == "cagra":
            if k > -(-search_params.itopk_size // 32) * 32:
                raise CuvsException(f"topk = {k} must be smaller than itopk_size")
            near[:, : round(self._faults.lost * len(rows))] = np.inf
        if where == "ivf_pq":
            if k > len(rows):
                raise CuvsException("parameter `k` in top-k must not be larger than the index")
            near[~self._probed(index, asked, search_params.n_probes)] = np.inf
        chosen = given.get("filter", given.get("prefilter"))
        if chosen is not None:
            bits = np.unpackbits(chosen.view(np.uint8), bitorder="little")
            assert len(bits) >= len(rows), "the bitset is shorter than the rows"
            near[:, bits[: len(rows)] == 0] = np.inf
        order = np.argsort(near, axis=1, kind="stable")[:, :k]
        distances = np.full((len(asked), k), np.finfo(np.float32).max, np.float32)
        found = np.full((len(asked), k), NONE[where])
        reached = np.take_along_axis(near, order, axis=1)
        at = np.nonzero(np.isfinite(reached))
        distances[at], found[at] = reached[at], index.ids[order[at]]
        kind = self._facts["behaviour"]["ids"][where]
        return distances.view(OnCard), found.astype(kind).view(OnCard)

    def _probed(self, index: _Index, asked: Any, probes: int) -> Any:
        """Whether row n lies in one of the lists that query q looks at."""

        def apart(x: Any) -> Any:
            return ((x[:, None] - index.centres[None]) ** 2).sum(axis=2)

        label = apart(np.asarray(index.rows)).argmin(axis=1)
        looked = np.zeros((len(asked), len(index.centres)), bool)
        lists = np.argsort(apart(asked), axis=1, kind="stable")[:, :probes]
        np.put_along_axis(looked, lists, True, axis=1)
        return looked[:, label]

    def _from_bitset(self, where: str, bitset: Any) -> OnCard:
        if bitset.dtype != np.uint32:
            raise TypeError(f"dtype {bitset.dtype} not supported")
        assert isinstance(bitset, OnCard), "a bitset lies on the card"
        return bitset

    def _refine(
        self, where: str, dataset: Any, queries: Any, candidates: Any, k: int, **given: Any
    ) -> tuple[OnCard, OnCard]:
        rows, asked = np.asarray(_matrix(dataset)), np.asarray(_matrix(queries))
        near = np.asarray(candidates)
        assert near.dtype == np.int64, "candidates are int64"
        assert ((near >= 0) & (near < len(rows))).all(), "memory beyond the rows is read"
        apart = ((rows[near] - asked[:, None]) ** 2).sum(axis=2)
        order = np.argsort(apart, axis=1, kind="stable")[:, :k]
        best = [np.take_along_axis(part, order, axis=1) for part in (apart, near)]
        return best[0].astype(np.float32).view(OnCard), best[1].view(OnCard)

    def _extend(self, where: str, index: _Index, **given: Any) -> _Index:
        more = _matrix(given["additional_dataset" if where == "cagra" else "new_vectors"])
        first = len(index.ids)
        new = np.asarray(given.get("new_indices", np.arange(first, first + len(more))))
        assert new.dtype == np.int64
        index.take(np.concatenate((index.rows, more)).view(OnCard), borrow=False)
        index.ids = np.concatenate((index.ids, new))
        if where == "ivf_pq":
            index.count_lists()
        return index

    def _save(self, where: str, filename: str, index: _Index, **given: Any) -> None:
        centres = np.empty((0, 0)) if index.centres is None else index.centres
        with Path(filename.encode().decode()).open("wb") as file:
            np.savez(file, where=where, rows=index.rows, ids=index.ids, centres=centres,
                     known=np.array([[a, b] for a, b in index._known.items() if isinstance(b, int) and a != "trained"]))  # fmt: skip

    def _load(self, where: str, filename: str, **given: Any) -> _Index:
        with np.load(filename.encode().decode()) as kept:
            if str(kept["where"]) != where:
                raise CuvsException("serialization of another index")
            known = {str(name): int(value) for name, value in kept["known"]}
            index = _Index(self._fields(where), **known)
            index.take(kept["rows"].view(OnCard), borrow=False)
            index.ids = kept["ids"]
            if kept["centres"].size:
                index.centres = kept["centres"]
                index.count_lists()
        return index


def _matrix(given: Any) -> OnCard:
    assert isinstance(given, OnCard), "an array of the host is given where one of the card is meant"
    if given.dtype != np.float32:
        raise TypeError(f"dtype {given.dtype} not supported")
    if not given.flags.c_contiguous:
        raise ValueError("Row major input is expected")
    return given
