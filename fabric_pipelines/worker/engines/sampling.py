"""Sampling fields, judged before a runtime sees them; every engine asks here, so all refuse in the same words."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fabric_pipelines.worker.engines.tasks import EMPTY, Task

SAMPLING_KEYS = frozenset({"kind", "temperature", "top_k", "top_p", "seed", "repetition_penalty"})
PASS_KEYS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "hidden": frozenset({"kind", "layers", "pooling"}),
        "embed": frozenset({"kind", "pooling", "normalise"}),
    }
)
# What no engine takes is refused whatever the engine. Below SMALLEST a float32 is 0, by which a runtime divides.
SMALLEST = 1e-30
COLDEST = 1e-5  # of a temperature that is not 0: logits over it stay finite
WHOLE: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"top_k": (0, (1 << 31) - 1), "seed": (0, (1 << 63) - 1)}
)
REAL: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"temperature": (0.0, 1e6), "top_p": (SMALLEST, 1.0), "repetition_penalty": (SMALLEST, 1e6)}
)


def sampling_objection(
    sampling: Mapping[str, Any], keys: frozenset[str] = SAMPLING_KEYS
) -> str | None:
    """Why this sampling cannot be served, or None."""
    if sampling.get("kind") != "generate":
        return f"kind {sampling.get('kind')!r} is not served here, only 'generate'"
    unknown = sorted(set(sampling) - keys)
    if unknown:
        return f"sampling fields {', '.join(unknown)} are unknown to this engine"
    for name in (*REAL, *WHOLE):
        if name in sampling and (wanted := wanted_number(name, sampling[name])):
            return f"sampling field {name} is {sampling[name]!r}; it must be {wanted}"
    return None


def wanted_number(name: str, value: object) -> str:
    """What the number `name` of a sampling must be, where `value` is not that; else empty."""
    if name in WHOLE:
        least, most = WHOLE[name]
        good = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        return "" if good else f"a whole number from {least} to {most}"
    low, high = REAL[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and low <= value <= high and math.isfinite(value):  # type: ignore[operator, arg-type]
        cold = name == "temperature" and 0 < value < COLDEST  # type: ignore[operator]
        return f"0 or a number from {COLDEST:g} to {high:g}" if cold else ""
    return f"a number above 0, at most {high:g}" if low else f"a number from 0 to {high:g}"


def generation_objection(task: Task, vocab_size: int, keys: frozenset[str]) -> str | None:
    """Why an engine that takes requests one by one cannot serve this task, or None."""
    if task.length == 0:
        return EMPTY
    if task.max_new_tokens < 1:
        return "max_new_tokens is 0; a generation needs at least 1"
    if int(task.tokens.max()) >= vocab_size:
        return f"token id {int(task.tokens.max())} is beyond the vocabulary"
    if not isinstance(task.sampling.get("ignore_eos", False), bool):
        return "sampling field ignore_eos must be true or false"
    return sampling_objection(task.sampling, keys)


def is_greedy(sampling: Mapping[str, Any]) -> bool:
    return sampling.get("temperature", 0.0) == 0 or sampling.get("top_k") == 1


def step_seed(tasks: Sequence[Task]) -> int:
    """32 bits from the sampling's seed and the step's prompts and rows: the same step draws the same tokens
    whatever ran before it, and another step with the same prompts draws others."""
    mark = hashlib.sha256(str(tasks[0].sampling.get("seed", 0)).encode())
    for task in tasks:
        mark.update(task.source_row.to_bytes(8, "little", signed=True))
        mark.update(task.tokens.tobytes())
    return int.from_bytes(mark.digest()[:4], "little")


def request_seed(task: Task) -> int:
    """Its own for each source row, so that equal prompts in other rows draw other tokens."""
    return (int(task.sampling.get("seed", 0)) * 0x9E3779B1 + task.source_row) % (1 << 31)


def pass_objection(task: Task, kinds: Collection[str], vocab_size: int, layers: int) -> str | None:
    """Why an engine of single passes cannot serve this task, or None. layers: the last layer number."""
    sampling = task.sampling
    kind = sampling.get("kind")
    if task.max_new_tokens:
        return f"max_new_tokens is {task.max_new_tokens}; a single pass generates nothing"
    if int(task.tokens.max()) >= vocab_size:
        return f"token id {int(task.tokens.max())} is beyond the vocabulary"
    if kind not in kinds:
        served = " or ".join(repr(one) for one in sorted(kinds))
        return f"kind {kind!r} is not served here, only {served}"
    return pass_fields_objection(sampling, layers)


def pass_fields_objection(sampling: Mapping[str, Any], layers: int) -> str | None:
    """Why this sampling of kind "hidden" or "embed" cannot be served, or None."""
    kind = str(sampling.get("kind"))
    unknown = sorted(set(sampling) - PASS_KEYS[kind])
    if unknown:
        return f"sampling fields {', '.join(unknown)} are unknown to this engine"
    return _hidden_objection(sampling, layers) if kind == "hidden" else _embed_objection(sampling)


def _hidden_objection(sampling: Mapping[str, Any], last: int) -> str | None:
    layers = sampling.get("layers")
    if not isinstance(layers, list | tuple) or not layers:
        return "sampling field layers must be a list of layer numbers"
    wrong = [
        n for n in layers if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= last
    ]
    if wrong:
        return f"layers {wrong} do not exist; they go from 0 to {last}"
    if sampling.get("pooling") not in ("last", "mean"):
        return f"pooling {sampling.get('pooling')!r} is neither 'last' nor 'mean'"
    return None


def _embed_objection(sampling: Mapping[str, Any]) -> str | None:
    if sampling.get("pooling", "mean") != "mean":
        return f"pooling {sampling['pooling']!r} is not this model's; it was trained with 'mean'"
    if not isinstance(sampling.get("normalise", True), bool):
        return "sampling field normalise must be true or false"
    return None
