"""Queries a second of exact, inverted-file and lattice search at recall 0.90, 0.95 and 0.99, beside torch, faiss-cpu and cuVS.

    python -m tests.bench.search --rows 100000 --dim 128 --dim 384
    python -m tests.bench.search --rows 1000000 --embeddings real.npy --json search.json       # on a machine with a card
    python -m tests.bench.search --make-embeddings real.npy                                    # where the model is
    python -m tests.bench.search --rehearse                                                    # small, within a minute

One process, one run. Every system answers the same held-out queries over the same rows, recall@10 is against our exact
search (itself compared with torch's and faiss's), and for each recall the least effort of a sweep is taken that
reaches it. Systems take turns, round after round; a figure is the median over its batches (in brackets the
fastest, which other work on the machine stretches least), and beside it how many times that of the base: torch's exact search on
a card where there is one, else our exact search. Uniform rows, tight clusters, and embeddings of the project's own
corpus. What is not there or fails is a row that says so.
"""

from __future__ import annotations

import argparse
import bisect
import json
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from fabric_pipelines.analytics.search import recall_at_k
from fabric_pipelines.errors import FabricError
from tests.bench.search_rows import drawn, embedded, real
from tests.bench.search_systems import Absent, System, every

AIMS = (0.90, 0.95, 0.99)
BATCHES = {1: 16, 32: 3, 1024: 1}  # batches a round
QUESTIONS, QUERIES = 256, 2048
KINDS = ("uniform", "clustered", "real")
BASES = ("torch matmul + topk", "exact")
REAL_ROWS = 100_000
Say = Callable[[str], None]


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


def rows_of(kind: str, rows: int, dim: int, file: Path | None) -> tuple[np.ndarray, np.ndarray]:
    if kind == "real":
        return real(rows, QUERIES, file)
    return drawn(kind, rows, dim, 1), drawn(kind, QUERIES, dim, 2)


def measure(
    xb: np.ndarray, xq: np.ndarray, rounds: int, skip: list[str], say: Say
) -> list[dict[str, Any]]:
    """A line for each system and aim: system, aim, effort, recall, times [batch]; one with `why` for what is absent."""
    systems: list[System] = []
    lines: list[dict[str, Any]] = []
    for found in every(xb, skip):
        if isinstance(found, Absent):
            lines.append({"absent": found})
            say(f"{found.name}: not measured: {found.why}")
        else:
            systems.append(found)
            say(f"{found.name} built in {found.build_s:.1f} s")
    asked = xq[:QUESTIONS]
    truth = systems[0].ask(asked, None)
    shared: dict[tuple[str, str], dict[int, list[float]]] = {}  # one effort may reach several aims
    for system in systems:
        try:
            for aim, effort, recall in least_efforts(system, asked, truth):
                line = {"system": system, "aim": aim, "effort": effort, "recall": recall}
                times = shared.setdefault((system.name, str(effort)), defaultdict(list))
                lines.append(line | {"times": times})
                say(f"{system.name} {aim} {effort} {recall:.3f}")
        except Exception as fault:  # noqa: BLE001 (whatever a library says: it goes into the table)
            lines.append({"absent": Absent(system.name, f"{type(fault).__name__}: {fault}"[:200])})
            say(f"{system.name} fails: {fault}")
    measured = [line for line in lines if "system" in line and not np.isnan(line["recall"])]
    failed: set[int] = set()
    for number in range(rounds + 1):  # the first one warms caches and does not count
        for line in {id(line["times"]): line for line in measured}.values():
            if id(line["times"]) in failed:
                continue
            try:
                timed(line, xq, number)
            except Exception as fault:  # noqa: BLE001 (as above)
                failed.add(id(line["times"]))
                name = f"{line['system'].name}, {line['effort']}"
                lines.append({"absent": Absent(name, f"{type(fault).__name__}: {fault}"[:200])})
                say(f"{name} fails: {fault}")
    for system in systems:
        system.close()
    return sorted(lines, key=lambda line: "absent" in line)


def timed(line: dict[str, Any], xq: np.ndarray, number: int) -> None:
    for batch, times in BATCHES.items():
        for turn in range(
            times if number else 1
        ):  # the first round loads and allocates for each batch
            start = ((number * times + turn) * batch) % 1024
            part = np.ascontiguousarray(xq[start : start + batch])
            begin = time.perf_counter()
            line["system"].ask(part, line["effort"])
            if number:
                line["times"][batch].append(time.perf_counter() - begin)


def rates(line: dict[str, Any]) -> dict[int, tuple[float, float]]:
    """Queries a second of each batch: median, fastest."""
    return {
        batch: (batch / float(np.median(line["times"][batch])), batch / min(line["times"][batch]))
        for batch in BATCHES
        if line["times"][batch]
    }


def base_of(lines: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    for name in BASES:
        for line in lines:
            if "system" in line and line["system"].name == name:
                return line
    return None


def facts(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """As JSON has it: system, where, aim, effort, recall, and by batch queries_per_s and times_base; or why_not."""
    base = base_of(lines)
    under = rates(base) if base else {}
    found = []
    for line in lines:
        if "absent" in line:
            found.append({"system": line["absent"].name, "why_not": line["absent"].why})
            continue
        system, own = line["system"], rates(line)
        reached = not np.isnan(line["recall"])
        found.append(
            {
                "system": system.name,
                "where": system.where,
                "aim": line["aim"],
                "recall": line["recall"] if reached else None,
                "effort": line["effort"],
                "queries_per_s": {batch: rate[0] for batch, rate in own.items()},
                "fastest_per_s": {batch: rate[1] for batch, rate in own.items()},
                "times_base": {b: rate[0] / under[b][0] for b, rate in own.items() if b in under},
                "bytes_a_row": system.scan_bytes,
                "build_s": system.build_s,
                "build_cpu_s": system.build_cpu_s,
            }
        )
    return found


def table(lines: Sequence[dict[str, Any]]) -> str:
    base = base_of(lines)
    against = f"times {base['system'].name}" if base else "times"
    text = [
        f"| | where | aim | recall@10 | nprobe / rerank / ef | 1 a batch | 32 | 1,024 | {against} (1 / 32 / 1,024) "
        "| bytes read a row | build s (CPU s) |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for line in facts(lines):
        if "why_not" in line:
            text.append(f"| {line['system']} | not measured: {line['why_not']} |" + " |" * 9)
            continue
        many = [
            f"{line['queries_per_s'][b]:,.0f} ({line['fastest_per_s'][b]:,.0f})" if b in line["queries_per_s"] else "-"
            for b in BATCHES
        ]  # fmt: skip
        times = " / ".join(
            f"{line['times_base'][b]:.3g}" if b in line["times_base"] else "-" for b in BATCHES
        )
        effort = line["effort"]
        shown = " / ".join(map(str, effort.values())) if isinstance(effort, dict) else effort or "-"
        recall = "not reached" if line["recall"] is None else f"{line['recall']:.3f}"
        text.append(
            f"| {line['system']} | {line['where']} | {line['aim']:.2f} | {recall} | {shown} | {' | '.join(many)} | "
            f"{times} | {line['bytes_a_row']:,.0f} | {line['build_s']:.1f} ({line['build_cpu_s']:.1f}) |"
        )
    return "\n".join(text)


def machine() -> dict[str, Any]:
    versions = {}
    for name in ("numpy", "faiss-cpu", "torch", "cuvs-cu13", "cupy-cuda13x"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": versions,
    }


def keep(to: Path | None, told: list[dict[str, Any]]) -> None:
    if to:
        to.write_text(json.dumps({"machine": machine(), "runs": told}, indent=1) + "\n")


def arguments() -> argparse.ArgumentParser:
    wanted = argparse.ArgumentParser(description=__doc__)
    wanted.add_argument("--rows", type=int)
    wanted.add_argument("--dim", type=int, action="append", help="of rows that are drawn")
    wanted.add_argument("--kind", action="append", choices=[*KINDS, "latent"])
    wanted.add_argument("--rounds", type=int)
    wanted.add_argument("--skip", action="append", default=[], help="a system, by its name")
    wanted.add_argument(
        "--embeddings", type=Path, help="rows of kind real, as --make-embeddings wrote them"
    )
    wanted.add_argument(
        "--make-embeddings", type=Path, help=f"{REAL_ROWS:,} at most, or --rows; and nothing else"
    )
    wanted.add_argument("--json", type=Path, help="everything, with the machine, goes here too")
    wanted.add_argument(
        "--rehearse", action="store_true", help="the same on few rows: 600 x 32, one round"
    )
    return wanted


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments()
    given = parser.parse_args(words)
    if "exact" in given.skip:
        parser.error("--skip exact: recall is measured against its answers")

    def say(line: str) -> None:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

    if given.make_embeddings:
        np.save(given.make_embeddings, embedded(given.rows or REAL_ROWS))
        return
    rows = given.rows or (600 if given.rehearse else 100_000)
    rounds = given.rounds or (1 if given.rehearse else 2)
    told = []
    for kind in given.kind or KINDS:
        for dim in [0] if kind == "real" else given.dim or ([32] if given.rehearse else [128, 384]):
            load = os.getloadavg()[0]
            try:
                made_now = kind == "real" and not given.embeddings
                most = min(rows, REAL_ROWS) if made_now else rows
                xb, xq = rows_of(kind, most, dim, given.embeddings)
            except (FabricError, OSError, ValueError) as fault:
                sys.stdout.write(f"\n{kind}: not measured: {fault}\n")
                told.append({"rows_of": kind, "why_not": str(fault)})
                keep(given.json, told)
                continue
            say(f"{kind}, {len(xb):,} x {xb.shape[1]}")
            lines = measure(xb, xq, rounds, given.skip, say)
            after = os.getloadavg()[0]
            sys.stdout.write(
                f"\n{kind}, {len(xb):,} x {xb.shape[1]}; load {load:.1f} to {after:.1f}:\n\n{table(lines)}\n"
            )
            sys.stdout.flush()
            told.append(
                {
                    "rows_of": kind,
                    "rows": len(xb),
                    "dim": xb.shape[1],
                    "load": [load, after],
                    "lines": facts(lines),
                }
            )
            keep(given.json, told)  # what ends a long run must not take the tables before it along


if __name__ == "__main__":
    main()
