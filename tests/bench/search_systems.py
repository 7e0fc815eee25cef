"""What tests/bench/search.py compares: ours on the CPU and on a card, torch, faiss-cpu, cuVS; or why one of them is not there.

Every system takes queries as numpy rows and answers with places of rows as numpy, so what a card needs to get them and to
give the answer back is in the time. l2 throughout.
"""

from __future__ import annotations

import copy
import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fabric_pipelines.analytics.index import Exact, Inverted, Lattice, VectorIndex
from fabric_pipelines.analytics.index.cuvs_library import library
from fabric_pipelines.errors import FabricError

K = 10
RERANKS = (10, 20, 40, 80, 160)
Ask = Callable[[np.ndarray, Any], np.ndarray]


@dataclass(frozen=True)
class System:
    """ask(xq, effort) -> I. efforts: in rising order; empty: there is no choice. where: "cpu" or the card."""

    name: str
    build_s: float
    build_cpu_s: float
    scan_bytes: float
    efforts: list[Any]
    ask: Ask
    where: str = "cpu"
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Absent:
    """A system that was not measured, and why."""

    name: str
    why: str


def steps(last: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 11, 16 ... last: half an octave each."""
    found = sorted({round(2 ** (half / 2)) for half in range(2 * last.bit_length())})
    return [step for step in found if step < last] + [last]


def every(xb: np.ndarray, skip: list[str]) -> Iterator[System | Absent]:
    """The first is our exact search. What fails to build or is not installed is an Absent with the reason."""
    yield from ours(xb, skip)
    for name, make in (*torches(xb), *faisses(xb), *cuvses(xb)):
        if name in skip:
            yield Absent(name, "left out by --skip")
            continue
        begin, cpu = time.perf_counter(), time.process_time()
        try:
            made = make()
        except ImportError as fault:
            yield Absent(name, f"not installed ({fault})")
        except Exception as fault:  # noqa: BLE001 (whatever a library says: it goes into the table)
            yield Absent(name, f"{type(fault).__name__}: {str(fault).splitlines()[-1][:200]}")
        else:
            took = time.perf_counter() - begin, time.process_time() - cpu
            yield System(name, *took, *made)


def ours(xb: np.ndarray, skip: list[str]) -> Iterator[System | Absent]:
    kinds = {
        "exact": Exact(),
        "inverted": Inverted(),
        "lattice, 4 bits": Lattice(bits=4),
        "lattice, 2 bits": Lattice(bits=2),
    }
    for name, kind in kinds.items():
        if name in skip:
            yield Absent(name, "left out by --skip")
            continue
        begin, cpu = time.perf_counter(), time.process_time()
        index = VectorIndex.build(xb, np.arange(len(xb)), kind=kind, metric="l2")
        took = time.perf_counter() - begin, time.process_time() - cpu
        lists = index.stats().lists
        efforts: list[Any] = []
        if name == "inverted":
            efforts = [{"nprobe": n} for n in steps(lists)]
        elif name != "exact":
            efforts = [{"nprobe": n, "rerank": r} for n in steps(lists) for r in RERANKS]
        width = index.stats().scan_bytes / len(xb)
        yield System(name, *took, width, efforts, asking(index))
        there = copy.copy(index)  # the same lists, scanned on a card
        try:
            there.use("cuda")
        except FabricError as fault:
            yield Absent(f"{name}, on a card", f"{fault.code}: {fault}")
        else:
            yield System(
                f"{name}, on a card", *took, width, efforts, asking(there), there.stats().where, there.close
            )  # fmt: skip


def asking(index: VectorIndex[Any]) -> Ask:
    return lambda xq, effort: index.search(xq, K, **(effort or {})).I


Made = tuple[float, list[Any], Ask, str]
Maker = tuple[str, Callable[[], Made]]


def torches(xb: np.ndarray) -> Iterator[Maker]:
    yield "torch matmul + topk", lambda: torch_flat(xb, "cuda")
    yield "torch matmul + topk, on the CPU", lambda: torch_flat(xb, "cpu")


def torch_flat(xb: np.ndarray, device: str) -> Made:
    torch = importlib.import_module("torch")
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("torch sees no card")
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = torch.from_numpy(xb).to(device)
    half = (rows * rows).sum(dim=1) / 2
    pairs = 1 << 28  # 1 GiB of scores

    def ask(xq: np.ndarray, effort: Any) -> np.ndarray:
        found = []
        for start in range(0, len(xq), max(1, pairs // len(xb))):
            part = torch.from_numpy(xq[start : start + max(1, pairs // len(xb))]).to(device)
            found.append((half - part @ rows.T).topk(K, dim=1, largest=False).indices.cpu().numpy())
        return np.concatenate(found)

    where = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return 4.0 * xb.shape[1] + 4, [], ask, where


def faisses(xb: np.ndarray) -> Iterator[Maker]:
    rows, dim = xb.shape
    lists = round(rows**0.5)
    depths = [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024]
    both = [{"nprobe": n, "rerank": r} for n in steps(lists) for r in (10, 20, 40, 80)]
    for name, factory, sweep, width in (
        ("faiss Flat", "Flat", [], 4 * dim),
        ("faiss IVF,Flat", f"IVF{lists},Flat", steps(lists), 4 * dim + 8),
        ("faiss HNSW32", "HNSW32", depths, 4 * dim + 272),
        ("faiss IVF,RaBitQ 4 bits + rows", f"IVF{lists},RaBitQ4,RFlat", both, dim / 2 + 20),
    ):

        def make(factory: str = factory, sweep: Any = sweep, width: float = width) -> Made:
            return faiss_index(xb, factory, sweep, width)

        yield name, make


def faiss_index(xb: np.ndarray, factory: str, sweep: list[Any], width: float) -> Made:
    faiss = importlib.import_module("faiss")
    index = faiss.index_factory(xb.shape[1], factory)
    index.train(xb)
    index.add(xb)

    def ask(xq: np.ndarray, effort: Any) -> np.ndarray:
        if isinstance(effort, dict):
            index.k_factor = effort["rerank"] / K
            faiss.extract_index_ivf(index.base_index).nprobe = effort["nprobe"]
        elif effort is not None and "IVF" in factory:
            index.nprobe = effort
        elif effort is not None:
            index.hnsw.efSearch = effort
        found: np.ndarray = index.search(xq, K)[1]
        return found

    return width, sweep, ask, "cpu"


def cuvses(xb: np.ndarray) -> Iterator[Maker]:
    yield "cuVS brute force", lambda: cuvs_flat(xb)
    yield "cuVS CAGRA", lambda: cuvs_cagra(xb)
    yield "cuVS IVF-PQ + rows", lambda: cuvs_ivf_pq(xb)


def on_card(host: np.ndarray) -> Any:
    return importlib.import_module("cupy").asarray(host)


def to_host(found: Any) -> np.ndarray:
    """Places; cuVS's own word for none (a number beyond all rows) stays beyond them."""
    cupy = importlib.import_module("cupy")
    host: np.ndarray = cupy.asnumpy(cupy.asarray(found))
    return host.astype(np.int64)


def card_name() -> str:
    runtime = importlib.import_module("cupy").cuda.runtime
    name: str = runtime.getDeviceProperties(0)["name"].decode()
    return name


def cuvs_flat(xb: np.ndarray) -> Made:
    flat, rows = library().brute_force, on_card(xb)
    index = flat.build(rows, metric="sqeuclidean")

    def ask(
        xq: np.ndarray, effort: Any, rows: Any = rows
    ) -> np.ndarray:  # the index only borrows them
        return to_host(flat.search(index, on_card(xq), K)[1])

    return 4.0 * xb.shape[1] + 4, [], ask, card_name()


def cuvs_cagra(xb: np.ndarray) -> Made:
    cagra, rows = library().cagra, on_card(xb)
    index = cagra.build(cagra.IndexParams(metric="sqeuclidean"), rows)

    def ask(
        xq: np.ndarray, effort: Any, rows: Any = rows
    ) -> np.ndarray:  # the index only borrows them
        wanted = cagra.SearchParams(itopk_size=effort)
        return to_host(cagra.search(wanted, index, on_card(xq), K)[1])

    # Sizes are rounded up to a multiple of 32.
    return 4.0 * xb.shape[1] + 4 * index.graph_degree, [32, 64, 96, 128, 192, 256, 512], ask, card_name()  # fmt: skip


def cuvs_ivf_pq(xb: np.ndarray) -> Made:
    """Candidates are ranked by their rows, as ours are."""
    found = library()
    ivf_pq, rows, lists = found.ivf_pq, on_card(xb), round(len(xb) ** 0.5)
    index = ivf_pq.build(ivf_pq.IndexParams(n_lists=lists, metric="sqeuclidean"), rows)

    def ask(xq: np.ndarray, effort: Any) -> np.ndarray:
        asked = on_card(xq)
        wanted = ivf_pq.SearchParams(n_probes=effort["nprobe"])
        many = min(effort["rerank"], len(xb))
        near = found.cupy.asarray(ivf_pq.search(wanted, index, asked, many)[1])
        # Where the lists hold fewer rows, the rest are numbers beyond all rows, which refine would read.
        near = found.cupy.minimum(near, len(xb) - 1)
        return to_host(found.refine(rows, asked, near, k=K)[1])

    sweep = [{"nprobe": n, "rerank": r} for n in steps(lists) for r in RERANKS]
    return float(index.pq_dim * index.pq_bits / 8), sweep, ask, card_name()
