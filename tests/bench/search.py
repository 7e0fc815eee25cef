"""Queries a second of exact, inverted-file and lattice search at recall 0.90, 0.95 and 0.99, beside faiss-cpu.

    python -m tests.bench.search --rows 100000 --dim 128 --dim 384

One process, one run. Every system answers the same held-out queries over the same rows, recall@10 is against our exact
search (itself compared with faiss's flat index), and for each recall the least effort of a sweep is taken that
reaches it. Systems take turns, round after round; a figure is the median over its batches (in brackets the
fastest, which other work on the machine stretches least). faiss is left out where it
is not installed.
"""

from __future__ import annotations

import argparse
import bisect
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fabric_pipelines.analytics.index import Exact, Inverted, Lattice, VectorIndex
from fabric_pipelines.analytics.search import recall_at_k

K = 10
AIMS = (0.90, 0.95, 0.99)
BATCHES = {1: 16, 32: 3, 1024: 1}  # batches a round
CLUSTERS, SPREAD = 1000, 0.2
LATENT = 24
QUESTIONS = 256


@dataclass(frozen=True)
class System:
    """ask(xq, effort) -> I. efforts: in rising order; empty: there is no choice."""

    name: str
    build_s: float
    build_cpu_s: float
    scan_bytes: float
    efforts: list[Any]
    ask: Callable[[np.ndarray, Any], np.ndarray]


def drawn(kind: str, rows: int, dim: int, seed: int) -> np.ndarray:
    rng, fixed = np.random.default_rng(seed), np.random.default_rng(5)
    if kind == "uniform":
        return rng.random((rows, dim), dtype=np.float32)
    if kind == "clustered":
        centres = fixed.standard_normal((CLUSTERS, dim), dtype=np.float32)
        noise = SPREAD * rng.standard_normal((rows, dim), dtype=np.float32)
        return centres[rng.integers(0, CLUSTERS, rows)] + noise
    assert kind == "latent", kind
    maps = fixed.standard_normal((LATENT, dim), dtype=np.float32)
    latent = rng.standard_normal((rows, LATENT), dtype=np.float32)
    return np.tanh(latent @ maps / 4) + 0.05 * rng.standard_normal((rows, dim), dtype=np.float32)


def steps(last: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 11, 16 ... last: half an octave each."""
    found = sorted({round(2 ** (half / 2)) for half in range(2 * last.bit_length())})
    return [step for step in found if step < last] + [last]


def ours(xb: np.ndarray, skip: list[str]) -> Iterator[System]:
    kinds = {
        "exact": Exact(),
        "inverted": Inverted(),
        "lattice, 4 bits": Lattice(bits=4),
        "lattice, 2 bits": Lattice(bits=2),
    }
    for name, kind in kinds.items():
        if name in skip:
            continue
        begin, cpu = time.perf_counter(), time.process_time()
        index = VectorIndex.build(xb, np.arange(len(xb)), kind=kind, metric="l2")
        took = time.perf_counter() - begin, time.process_time() - cpu
        lists = index.stats().lists
        efforts: list[Any] = []
        if name == "inverted":
            efforts = [{"nprobe": n} for n in steps(lists)]
        elif name != "exact":
            efforts = [
                {"nprobe": n, "rerank": r} for n in steps(lists) for r in (10, 20, 40, 80, 160)
            ]
        yield System(
            name,
            *took,
            index.stats().scan_bytes / len(xb),
            efforts,
            lambda xq, effort, index=index: index.search(xq, K, **(effort or {})).I,
        )


def peers(xb: np.ndarray, skip: list[str], say: Callable[[str], None]) -> Iterator[System]:
    try:
        import faiss
    except ImportError:
        say("faiss is not installed: its rows are left out")
        return
    rows, dim = xb.shape
    lists = round(rows**0.5)
    for name, factory, sweep, width in (
        ("faiss Flat", "Flat", [], 4 * dim),
        ("faiss IVF,Flat", f"IVF{lists},Flat", steps(lists), 4 * dim + 8),
        ("faiss HNSW32", "HNSW32", [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024], 4 * dim + 272),
        ("faiss IVF,RaBitQ 4 bits + rows", f"IVF{lists},RaBitQ4,RFlat", None, dim / 2 + 20),
    ):  # fmt: skip
        if name in skip:
            continue
        begin, cpu = time.perf_counter(), time.process_time()
        try:
            index = faiss.index_factory(dim, factory)
        except RuntimeError as fault:
            say(f"{factory}: {str(fault).splitlines()[-1][:200]}")
            continue
        index.train(xb)
        index.add(xb)
        took = time.perf_counter() - begin, time.process_time() - cpu

        def ask(xq: np.ndarray, effort: Any, index: Any = index, name: str = name) -> np.ndarray:
            if effort is not None:
                if "RaBitQ" in name:
                    index.k_factor = effort["rerank"] / K
                    faiss.extract_index_ivf(index.base_index).nprobe = effort["nprobe"]
                elif "IVF" in name:
                    index.nprobe = effort
                else:
                    index.hnsw.efSearch = effort
            return index.search(xq, K)[1]

        if sweep is None:
            sweep = [{"nprobe": n, "rerank": r} for n in steps(lists) for r in (10, 20, 40, 80)]
        yield System(name, *took, width, sweep, ask)


def least_efforts(
    system: System, xq: np.ndarray, truth: np.ndarray
) -> Iterator[tuple[float, Any, float]]:
    """(aim, effort, recall): the least effort that reaches each aim; effort None and NaN where none does."""
    seen: dict[str, float] = {}

    def recall(effort: Any) -> float:
        if str(effort) not in seen:
            seen[str(effort)] = recall_at_k(system.ask(xq, effort), truth)
        return seen[str(effort)]

    if not system.efforts:
        yield 1.0, None, recall(None)
        return
    # by lists looked at, each with rising numbers of candidates: what was not looked at, no candidate makes good
    groups: dict[str, list[Any]] = defaultdict(list)
    for effort in system.efforts:
        two = isinstance(effort, dict) and "rerank" in effort
        groups[str(effort["nprobe"]) if two else str(effort)].append(effort)
    ladder = list(groups.values())
    for aim in AIMS:
        first = bisect.bisect_left(ladder, True, key=lambda group: recall(group[-1]) >= aim)
        if first == len(ladder):
            yield aim, None, float("nan")
        else:
            chosen = next(effort for effort in ladder[first] if recall(effort) >= aim)
            yield aim, chosen, recall(chosen)


def measure(
    kind: str, rows: int, dim: int, rounds: int, skip: list[str], say: Callable[[str], None]
) -> list[dict[str, Any]]:
    xb, xq = drawn(kind, rows, dim, 1), drawn(kind, 2048, dim, 2)
    systems: list[System] = []
    for system in [*ours(xb, skip), *peers(xb, skip, say)]:
        systems.append(system)
        say(f"{kind} {dim}: {system.name} built in {system.build_s:.1f} s")
    asked = xq[:QUESTIONS]
    truth = systems[0].ask(asked, None)
    lines: list[dict[str, Any]] = []
    shared: dict[tuple[str, str], dict[int, list[float]]] = {}  # one effort may reach several aims
    for system in systems:
        for aim, effort, recall in least_efforts(system, asked, truth):
            line = {"system": system, "aim": aim, "effort": effort, "recall": recall}
            times = shared.setdefault((system.name, str(effort)), defaultdict(list))
            lines.append(line | {"times": times})
            say(f"{kind} {dim}: {system.name} {aim} {effort} {recall:.3f}")
    for number in range(rounds + 1):  # the first one warms caches and does not count
        for line in {id(line["times"]): line for line in lines}.values():
            if np.isnan(line["recall"]):
                continue
            for batch, times in BATCHES.items():
                if not number and batch > 32:
                    continue
                for turn in range(times):
                    start = ((number * times + turn) * batch) % 1024
                    part = np.ascontiguousarray(xq[start : start + batch])
                    begin = time.perf_counter()
                    line["system"].ask(part, line["effort"])
                    if number:
                        line["times"][batch].append(time.perf_counter() - begin)
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    text = [
        "| | aim | recall@10 | nprobe / rerank / ef | 1 a batch | 32 | 1,024 | bytes read a row | build s (CPU s) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        system, effort = line["system"], line["effort"]
        many = [
            f"{batch / np.median(times):,.0f} ({batch / min(times):,.0f})" if times else "-"
            for batch, times in ((batch, line["times"][batch]) for batch in BATCHES)
        ]
        shown = " / ".join(map(str, effort.values())) if isinstance(effort, dict) else effort or "-"
        recall = "not reached" if np.isnan(line["recall"]) else f"{line['recall']:.3f}"
        text.append(
            f"| {system.name} | {line['aim']:.2f} | {recall} | {shown} | {' | '.join(many)} | "
            f"{system.scan_bytes:,.0f} | {system.build_s:.1f} ({system.build_cpu_s:.1f}) |"
        )
    return "\n".join(text)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rows", type=int, default=100_000)
    arguments.add_argument("--dim", type=int, action="append")
    arguments.add_argument("--kind", action="append", choices=["uniform", "clustered", "latent"])
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--skip", action="append", default=[], help="a system, by its name")
    given = arguments.parse_args()

    def say(line: str) -> None:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

    for dim in given.dim or [128, 384]:
        for kind in given.kind or ["uniform", "clustered", "latent"]:
            load = os.getloadavg()[0]
            lines = measure(kind, given.rows, dim, given.rounds, given.skip, say)
            after = os.getloadavg()[0]
            sys.stdout.write(
                f"\n{kind}, {given.rows:,} x {dim}; load {load:.1f} to {after:.1f}:\n\n{table(lines)}\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
