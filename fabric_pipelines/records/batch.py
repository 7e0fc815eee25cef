"""Batch order and cuts as plain numbers: what packing decides and a worker executes.

Kept apart from Arrow so that packing stays a pure function on integer arrays.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Budget:
    """What a session may still take: sequences, packed prompt tokens, KV tokens (None = single pass)."""

    sequences: int
    tokens: int
    kv_tokens: int | None
