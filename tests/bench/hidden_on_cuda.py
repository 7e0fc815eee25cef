"""Hidden states on a card: packed steps of the transformers engine beside padded batches of the same model.

    python -m tests.bench.hidden_on_cuda --json OUT/hidden.json

Qwen2.5-7B's shape with random bfloat16 weights, 768 rows of log-normal length (mean about 435, p99 about 2,100), layers 8, 16
and 28 mean-pooled on the device. The padded ways use the library alone, with everything in memory; ours goes through
the engine's door, leases in and completions out. Rows are those of one run, in turn, so that they share the card's state. A figure is
printed and kept in the file as soon as it stands: a run takes some five minutes, and what ends it early must not take all of it along.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fabric_pipelines.models.description import CHECKPOINTS
from fabric_pipelines.models.recipes import Limits
from fabric_pipelines.worker.engines import registry
from fabric_pipelines.worker.engines.checkpoint import QWEN_7B_SHAPE, describe
from tests.tiny_models import lease_of

NAME = "qwen2.5-7b-shape-random-weights@transformers-bf16"
COMPILED = f"{NAME}-compiled"
ALONE = 16  # rows that are also asked for by themselves
ROWS, LAYERS, BATCH, BUDGET = 768, (8, 16, 28), 32, 32_768
MU, SIGMA, LONGEST = 5.731, 0.829, 4096
# Two a weight of the 28 blocks: q, k, v, out, and the three of the feed-forward. Attention's own products are left out.
FLOP_A_TOKEN = 2 * 28 * 3584 * (2 * 3584 + 2 * 512 + 3 * 18_944)


def lengths() -> np.ndarray:
    drawn = np.random.default_rng(11).lognormal(MU, SIGMA, ROWS)
    return np.clip(drawn, 8, LONGEST).astype(np.int64)


def prompts() -> list[list[int]]:
    draw = np.random.default_rng(12)
    return [draw.integers(0, 150_000, length).tolist() for length in lengths()]


def opened(name: str, folder: Path, budget: int) -> Any:
    import transformers

    place = folder / CHECKPOINTS / name
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(dict(QWEN_7B_SHAPE)))
    describe(place, Limits(1024, budget, LONGEST, LONGEST),
             version=f"transformers {transformers.__version__}",
             weight_quantisation="none", kv_quantisation="single_pass")  # fmt: skip
    engine = registry.construct_engine(name, cache=folder, threads=8, device="cuda")
    engine.open()
    return engine


def packed(engine: Any, rows: list[list[int]], budget: int) -> float:
    from dataclasses import replace

    engine.profile = replace(engine.profile, max_num_tokens=budget)
    sampling = {"kind": "hidden", "layers": list(LAYERS), "pooling": "mean"}
    lease = lease_of(rows, sampling, engine=engine.name)
    ended = 0
    start = time.perf_counter()
    engine.submit(lease)
    while ended < len(rows):  # as the worker looks at results: no vector becomes Python numbers
        for batch in engine.poll(1.0):
            statuses = batch.column("status").to_pylist()
            assert set(statuses) == {"ok"}, batch.column("error_text").to_pylist()[:3]
            ended += len(statuses)
    seconds = time.perf_counter() - start
    return sum(len(row) for row in rows) / seconds


def states(engine: Any, rows: list[list[int]]) -> np.ndarray:
    """[rows, layers, width] pooled states of one lease, in the order of the rows."""
    sampling = {"kind": "hidden", "layers": list(LAYERS), "pooling": "mean"}
    engine.submit(lease_of(rows, sampling, engine=engine.name))
    found: dict[int, Any] = {}
    while len(found) < len(rows):
        for batch in engine.poll(1.0):
            found.update({row["task_id"]: row["vector"] for row in batch.to_pylist()})
    made = np.array([found[number] for number in range(len(rows))], dtype=np.float64)
    return made.reshape(len(rows), len(LAYERS), -1)


def alone_and_among(engine: Any, rows: list[list[int]]) -> dict[str, Any]:
    """Of rows by themselves and the same among all others, per layer: the greatest |alone - among| / |alone|, bfloat16 both ways."""
    picked = list(range(0, len(rows), len(rows) // ALONE))[:ALONE]
    among = states(engine, rows)[picked]
    alone = np.concatenate([states(engine, [rows[number]]) for number in picked])
    apart = np.linalg.norm(alone - among, axis=2) / np.linalg.norm(alone, axis=2)
    return {str(layer): float(apart[:, at].max()) for at, layer in enumerate(LAYERS)}


def padded(torch: Any, model: Any, batches: list[list[list[int]]]) -> float:
    """Real tokens per second of batches padded to their longest, states of LAYERS pooled under the mask."""
    start = time.perf_counter()
    for batch in batches:
        width = max(len(row) for row in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros(len(batch), width, dtype=torch.int64)
        for number, row in enumerate(batch):
            ids[number, : len(row)] = torch.tensor(row)
            mask[number, : len(row)] = 1
        ids, mask = ids.cuda(), mask.cuda()
        pooled: list[Any] = []

        def keep(
            module: Any, given: Any, made: Any, mask: Any = mask, pooled: Any = pooled
        ) -> None:
            states = made[0] if isinstance(made, tuple) else made
            share = mask / mask.sum(1, keepdim=True)
            pooled.append(torch.einsum("bl,bld->bd", share.to(states.dtype), states).float())

        hooks = [model.layers[layer - 1].register_forward_hook(keep) for layer in LAYERS]
        with torch.inference_mode():
            model(input_ids=ids, attention_mask=mask, use_cache=False)
        for hook in hooks:
            hook.remove()
        torch.cat(pooled, dim=1).cpu()
    return sum(len(row) for batch in batches for row in batch) / (time.perf_counter() - start)


def in_batches(rows: list[list[int]], *, budget: int | None = None) -> list[list[list[int]]]:
    """BATCH rows each, or as many as a padded budget of tokens holds."""
    batches: list[list[list[int]]] = [[]]
    for row in rows:
        width = max([len(row), *(len(other) for other in batches[-1])])
        full = len(batches[-1]) >= (BATCH if budget is None else max(budget // width, 1))
        if full:
            batches.append([])
        batches[-1].append(row)
    return batches


def profiled(torch: Any, way: Callable[[], float]) -> dict[str, Any]:
    """Share of wall time in which kernels ran, and the ten that took longest, in milliseconds."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        start = time.perf_counter()
        way()
        wall_s = time.perf_counter() - start
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
    total_us = sum(row.self_device_time_total for row in rows)
    return {
        "wall_s": wall_s,
        "kernel_share": total_us / 1e6 / wall_s,
        "longest_ms": {row.key[:90]: row.self_device_time_total / 1e3 for row in rows[:10]},
    }


def matrix_rate(torch: Any) -> float:
    """bf16 FLOP/s of an 8,192 cubed product on random data, mean of ten after three."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        a @ b
    torch.cuda.synchronize()
    return 10 * 2 * 8192**3 / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    import torch

    rows = prompts()
    report: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rows": len(rows),
        "tokens": sum(map(len, rows)),
        "matrix_flop_s": matrix_rate(torch),
        "tokens_per_s": {},
    }

    def keep() -> None:
        given.json.write_text(json.dumps(report, indent=1) + "\n")

    def take(name: str, way: Callable[[list[list[int]]], float]) -> None:
        rate = way(rows)
        report["tokens_per_s"].setdefault(name, []).append(rate)
        share = rate * FLOP_A_TOKEN / report["matrix_flop_s"]
        sys.stdout.write(f"{name:<36} {rate:>9,.0f} tok/s  {share:.2f} of the matrix rate\n")
        sys.stdout.flush()
        keep()

    with tempfile.TemporaryDirectory() as place:
        engine = opened(NAME, Path(place), BUDGET)
        faster = opened(COMPILED, Path(place), BUDGET)
        start = time.perf_counter()
        packed(faster, rows[:128], BUDGET)
        packed(faster, rows[128:256], BUDGET)
        report["compile_s"] = time.perf_counter() - start

        def library(batches: list[list[list[int]]], whose: Any = engine) -> float:
            whose._model.set_attn_implementation("sdpa")
            try:
                return padded(torch, whose._model, batches)
            finally:
                whose._model.set_attn_implementation(whose._attention.name)

        def sorted_budget(some: list[list[int]], whose: Any = engine) -> float:
            return library(in_batches(sorted(some, key=len), budget=BUDGET), whose)

        ways: dict[str, Callable[[list[list[int]]], float]] = {
            "packed, 32,768 tokens a step": lambda some: packed(engine, some, BUDGET),
            "padded, sorted, 32,768 tokens": sorted_budget,
            "packed and compiled, 32,768": lambda some: packed(faster, some, BUDGET),
            "packed and compiled, 16,384": lambda some: packed(faster, some, BUDGET // 2),
            "padded, sorted, batches of 32": lambda some: library(
                in_batches(sorted(some, key=len))
            ),
        }
        for way in ways.values():  # once for memory and kernels; not counted
            way(rows[::3])
        for turn in range(3):
            for name, way in ways.items():
                if turn < 2 or "32,768" in name:
                    take(name, way)
        for _ in range(2):
            take("padded, in order, batches of 32", lambda some: library(in_batches(some)))
        report["kernels"] = {
            "packed": profiled(torch, lambda: packed(engine, rows[:256], BUDGET)),
            "compiled": profiled(torch, lambda: packed(faster, rows[:256], BUDGET)),
        }
        report["alone_and_among"] = {
            "packed": alone_and_among(engine, rows[:256]),
            "compiled": alone_and_among(faster, rows[:256]),
        }
        keep()
        # what compiling gives the padded ways: blocks of the library's model, shapes open, as ours are
        compiled_pads: dict[str, Callable[[list[list[int]]], float]] = {
            "padded and compiled, sorted, 32,768": lambda some: sorted_budget(some, faster),
            "padded and compiled, in order, 32": lambda some: library(in_batches(some), faster),
        }
        for name, pads in compiled_pads.items():
            try:
                pads(rows[::6])
                take(name, pads)
            except Exception as fault:  # noqa: BLE001 - another's way that fails must not take ours along
                report.setdefault("failed", {})[name] = f"{type(fault).__name__}: {fault}"[:400]
        engine.close()
        faster.close()
    report["matrix_flop_s_after"] = matrix_rate(torch)
    keep()
    sys.stdout.write(
        json.dumps({k: v for k, v in report.items() if k != "tokens_per_s"}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
