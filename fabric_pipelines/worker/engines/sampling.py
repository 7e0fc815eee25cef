"""Sampling fields of `generate`, judged before a runtime sees them; every engine that samples asks here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SAMPLING_KEYS = frozenset({"kind", "temperature", "top_k", "top_p", "seed", "repetition_penalty"})
NUMBERS = (("temperature", 0.0), ("top_k", 0), ("top_p", 0.0), ("seed", 0))


def sampling_objection(
    sampling: Mapping[str, Any], keys: frozenset[str] = SAMPLING_KEYS
) -> str | None:
    """Why this sampling cannot be served, or None."""
    if sampling.get("kind") != "generate":
        return f"kind {sampling.get('kind')!r} is not served here, only 'generate'"
    unknown = sorted(set(sampling) - keys)
    if unknown:
        return f"sampling fields {', '.join(unknown)} are unknown to this engine"
    for name, least in NUMBERS:
        value = sampling.get(name, least)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
            return f"sampling field {name} is {value!r}; it must be a number >= {least}"
    return None


def is_greedy(sampling: Mapping[str, Any]) -> bool:
    return sampling.get("temperature", 0.0) == 0 or sampling.get("top_k") == 1
