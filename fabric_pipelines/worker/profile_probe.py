"""Profile probe: run an engine on its card for some seconds, and declare the four numbers from what was seen.

The step's budget is the smallest that is within 3 % of the best rate: beyond it a larger step only makes a drain longer. On a
processor that others use too, rates are compared by CPU time, which does not hang on what the others do. The
window is what the engine eats while the broker is asked. Sequences and cache are the opened engine's own. A continuous
engine fixed its budget when it was opened, so only its rate is measured.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fabric_pipelines.clock import SYSTEM_CLOCK, Clock
from fabric_pipelines.errors import EngineFailed, ManifestRefused, StorageFailed, UsageError
from fabric_pipelines.given import value_of
from fabric_pipelines.records.lease import LEASE_SCHEMA, Lease
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.worker.device_lock import device_kind
from fabric_pipelines.worker.engines.door import Engine
from fabric_pipelines.worker.engines.names import folder_of

LOG = logging.getLogger("fabric.worker")
NEAR_BEST = 0.97
GIVE_UP = (
    0.8  # a larger step that is so much slower ends the search: attention grows with its square
)
ROUNDS = 3
STEPS = 4  # of each budget a round
LEAD_S = 0.5  # supply beside the engine lasts so long: several leases, each an fsync of the broker
WINDOW_STEPS_MAX = 8
BUDGET_LEAST = 32
PROMPT, NEW = 64, 16
POLL_S = 1.0
PATIENCE_S = 300.0
PROFILES = "profiles"  # <model cache>/profiles/<engine name>/<device>.json


@dataclass(frozen=True, slots=True)
class Row:
    """One budget: medians over the rounds. tokens_per_s: of a busy engine, with (slowest, fastest); merit: what budgets
    are compared by, tokens per CPU second of an engine on the processor, else the same as tokens_per_s."""

    max_num_tokens: int
    tokens_per_s: float
    spread: tuple[float, float]
    merit: float


@dataclass(frozen=True, slots=True)
class Probed:
    """hardware: what it was measured on; a profile is used there only."""

    engine: str
    fingerprint: str
    device: str
    hardware: str
    profile: Profile
    rows: tuple[Row, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def probe(
    engine: Engine,
    *,
    device: str,
    vocab_size: int,
    layer: int,
    clock: Clock = SYSTEM_CLOCK,
    cpu_s: Callable[[], float] = time.process_time,
) -> Probed:
    """Measure an open engine and give it the profile found. layer: deepest layer that `hidden` may ask for. Raises
    EngineFailed when a task does not come back well."""
    task = _Workload(engine, vocab_size, layer)
    budgets = (
        [engine.profile.max_num_tokens] if engine.capabilities.continuous else _budgets(engine)
    )
    meter = _Meter(engine, clock, cpu_s if device_kind(device) == "cpu" else None)
    rows = _measured(engine, budgets, task.lease, meter)
    best = max(row.merit for row in rows)
    chosen = next(row for row in rows if row.merit >= NEAR_BEST * best)
    engine.profile = _profile(engine, chosen)
    return Probed(
        engine.name, engine.fingerprint, device, hardware(device), engine.profile, tuple(rows)
    )


def _profile(engine: Engine, row: Row) -> Profile:
    limits, budget = engine.manifest, row.max_num_tokens
    window = min(max(round(LEAD_S * row.tokens_per_s), budget), WINDOW_STEPS_MAX * budget)
    return replace(
        engine.profile,
        max_num_tokens=budget,
        max_batch_size=min(limits.max_batch_size, budget),
        window_tokens=window,
    )


def _budgets(engine: Engine) -> list[int]:
    """Powers of two up to what the manifest allows, and that itself."""
    most = engine.manifest.max_num_tokens
    doubled = (BUDGET_LEAST << power for power in range(most.bit_length()))
    return [*(budget for budget in doubled if budget < most), most]


def _measured(
    engine: Engine, budgets: Sequence[int], lease: Callable[[int], Lease], meter: _Meter
) -> list[Row]:
    """Round after round over all budgets, so that a busy moment of the machine falls on all of them alike."""
    declared = engine.profile
    seen: dict[int, list[_Rate]] = {budget: [] for budget in budgets}
    for round_number in range(ROUNDS):
        for budget in list(seen):
            engine.profile = replace(
                declared,
                max_num_tokens=budget,
                max_batch_size=min(engine.manifest.max_batch_size, budget),
            )
            if round_number == 0:
                meter.run(lease(budget))  # first touch: memory, kernels, caches
            seen[budget].append(meter.run(lease(STEPS * budget)))
            best = max(_merit(rates) for rates in seen.values() if rates)
            if round_number == 0 and _merit(seen[budget]) < GIVE_UP * best:
                seen = {known: rates for known, rates in seen.items() if known <= budget}
                break
    engine.profile = declared
    return [
        Row(
            budget,
            statistics.median(rate.tokens_per_s for rate in rates),
            (min(rate.tokens_per_s for rate in rates), max(rate.tokens_per_s for rate in rates)),
            _merit(rates),
        )
        for budget, rates in seen.items()
    ]


def _merit(rates: Sequence[_Rate]) -> float:
    return statistics.median(rate.merit for rate in rates)


@dataclass(frozen=True, slots=True)
class _Rate:
    tokens_per_s: float
    merit: float


@dataclass(frozen=True, slots=True)
class _Meter:
    """Runs a lease and tells its rates. cpu_s: this process's CPU time, None where the processor does not compute."""

    engine: Engine
    clock: Clock
    cpu_s: Callable[[], float] | None

    def run(self, lease: Lease) -> _Rate:
        engine, tokens = self.engine, _tokens(lease)
        generated, busy_s = engine.stats.generated_tokens, engine.stats.busy_s
        started_s = self.cpu_s() if self.cpu_s is not None else 0.0
        end_s = self.clock.monotonic_s() + PATIENCE_S
        engine.submit(lease)
        while engine.unfinished():
            for batch in engine.poll(POLL_S):
                _require_ok(engine, batch)
            if self.clock.monotonic_s() > end_s:
                raise EngineFailed(
                    f"{engine.name} did not end {tokens} tokens within {PATIENCE_S:.0f} s"
                )
        tokens += engine.stats.generated_tokens - generated
        per_s = tokens / max(engine.stats.busy_s - busy_s, 1e-9)
        if self.cpu_s is None:
            return _Rate(per_s, per_s)
        return _Rate(per_s, tokens / max(self.cpu_s() - started_s, 1e-9))


def _tokens(lease: Lease) -> int:
    return int(pc.sum(pc.list_value_length(lease.tasks.column("tokens"))).as_py())


def _require_ok(engine: Engine, batch: pa.RecordBatch) -> None:
    for status, why in zip(
        batch.column("status").to_pylist(), batch.column("error_text").to_pylist(), strict=True
    ):
        if status != "ok":
            raise EngineFailed(f"{engine.name} cannot be probed: {why}")


class _Workload:
    """Prompts of random ids, 64 tokens or the longest that is taken; every lease has task ids of its own."""

    def __init__(self, engine: Engine, vocab_size: int, layer: int) -> None:
        limits, kinds = engine.manifest, engine.capabilities.kinds
        self._engine, self._vocab_size = engine.name, vocab_size
        self._length = min(PROMPT, limits.max_input_len, limits.max_num_tokens)
        self._new = 0
        self._sampling: Mapping[str, Any] = {"kind": "embed"}
        if "generate" in kinds:
            self._sampling = {"kind": "generate", "temperature": 0.0}
            self._new = min(NEW, limits.max_seq_len - self._length)
        elif "embed" not in kinds:
            self._sampling = {"kind": "hidden", "layers": [layer], "pooling": "mean"}
        self._draw = np.random.default_rng(1)
        self._ids = 0

    def lease(self, tokens: int) -> Lease:
        count = max(tokens // self._length, 1)
        first, self._ids = self._ids, self._ids + count
        length = min(self._length, tokens)
        columns = {
            "task_id": range(first, first + count),
            "tokens": list(self._draw.integers(0, self._vocab_size, (count, length), np.uint32)),
            "max_new_tokens": [self._new] * count,
            "source_row": range(count),
            "metadata": [b""] * count,
            "attempts": [0] * count,
            "leader": [False] * count,
        }
        arrays = [pa.array(columns[item.name], item.type) for item in LEASE_SCHEMA]
        batch = pa.RecordBatch.from_arrays(arrays, schema=LEASE_SCHEMA)
        return Lease(1, "probe", self._engine, dict(self._sampling), 0, 0, batch)


# ---- kept beside the models, used by the next worker


def hardware(device: str) -> str:
    """The card's model, or the processor's with the number of its cores that this process may use."""
    number = int(device.partition(":")[2] or 0)
    if device_kind(device) == "cuda":
        cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        return _field(cards[number], "Model") if number < len(cards) else "unknown card"
    model = _field(Path("/proc/cpuinfo"), "model name") or platform.machine()
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def _field(path: Path, name: str) -> str:
    lines = path.read_text().splitlines() if path.exists() else []
    values = (line.partition(":")[2] for line in lines if line.startswith(name))
    return next(values, "").strip()


def place_of(cache: Path, engine: str, device: str) -> Path:
    return folder_of(cache / PROFILES, engine) / f"{device.replace(':', '-')}.json"


def keep(probed: Probed, cache: Path) -> Path:
    """Written whole, then put in place. StorageFailed where it cannot be."""
    path = place_of(cache, probed.engine, probed.device)
    draft = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(probed.as_json(), indent=2))
        draft.replace(path)
    except OSError as fault:
        if path.parent.is_dir():
            draft.unlink(missing_ok=True)
        raise StorageFailed(
            f"the profile cannot be kept in {path} ({fault.strerror or fault}): see what lies there and whether the disk is full"
        ) from fault
    return path


def kept_profile(engine: Engine, cache: Path, device: str) -> Profile | None:
    """The profile that was measured for this very engine on this very hardware, else None: of another it is said and left."""
    path = place_of(cache, engine.name, device)
    if not path.exists():
        return None
    again = f"run `fabric engine probe {engine.name}` again"
    try:
        found = json.loads(path.read_bytes())
        known = {"fingerprint": engine.fingerprint, "hardware": hardware(device)}
        others = [name for name, value in known.items() if found[name] != value]
        profile = found["profile"]
    except OSError as fault:
        raise UsageError(
            f"the profile kept in {path} cannot be read ({fault.strerror or fault}): remove it and {again}"
        ) from fault
    except (ValueError, KeyError, TypeError, RecursionError) as fault:
        raise UsageError(f"the profile kept in {path} is damaged ({fault}): {again}") from fault
    if others:
        LOG.warning(
            "the profile kept in %s is of another %s and not used: %s to have one",
            path,
            " and ".join(others),
            again,
        )
        return None
    newer = f"upgrade this one, or {again}"
    return value_of(
        Profile, profile, str(path), what="profile", remedy=again, newer=newer, error=UsageError
    )


def held(measured: Profile, engine: Engine, where: Path) -> Profile:
    """`measured` as the engine can keep it, open on the card as it is now. ManifestRefused naming each number that no probe of
    this engine gave: it then was changed by hand. The cache is no such number, since it is what the card had free: where
    that is less now, the engine's own counts and it is said."""
    limits, own = engine.manifest, engine.profile
    most = {
        "max_batch_size": limits.max_batch_size,
        "max_num_tokens": limits.max_num_tokens,
        "window_tokens": WINDOW_STEPS_MAX * min(measured.max_num_tokens, limits.max_num_tokens),
    }
    faults = {
        name: f"is {bound}, below the profile's {getattr(measured, name)}"
        for name, bound in most.items()
        if getattr(measured, name) > bound
    }
    if bool(measured.kv_cache_tokens) != bool(own.kv_cache_tokens):
        faults["kv_cache_tokens"] = (
            f"is {own.kv_cache_tokens} of the opened engine and {measured.kv_cache_tokens} of the profile (0 = single pass)"
        )
    if faults:
        raise ManifestRefused(
            f"the profile kept in {where} promises what engine {engine.name} does not keep: "
            + "; ".join(f"{name} {why}" for name, why in faults.items())
            + f": run `fabric engine probe {engine.name}` again",
            tuple(faults),
        )
    cache = min(measured.kv_cache_tokens, own.kv_cache_tokens)
    if cache < measured.kv_cache_tokens:
        LOG.warning(
            "the profile kept in %s has kv_cache_tokens %d, and %s opened with %d: that is declared",
            where,
            measured.kv_cache_tokens,
            engine.name,
            cache,
        )
    return replace(measured, kv_cache_tokens=cache)
