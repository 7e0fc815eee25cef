"""Task ids, submission ids and the incarnation that keeps one journal's ids apart from another's.

A task id is `incarnation << 40 | sequence`: 24 bits drawn once per journal, then a dense number that starts
at 0. A new journal on an old database therefore cannot pass for duplicates, and a lookup is a subtraction.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from typing import Any

SEQUENCE_BITS = 40
INCARNATION_BITS = (
    23  # of the 24 in the layout one stays 0, so that ids are positive int64 everywhere
)
SEQUENCE_MAX = (1 << SEQUENCE_BITS) - 1


def draw_incarnation() -> int:
    """A non-zero number of INCARNATION_BITS bits from the system's entropy."""
    return secrets.randbelow((1 << INCARNATION_BITS) - 1) + 1


def task_id(incarnation: int, sequence: int) -> int:
    assert 0 < incarnation < (1 << INCARNATION_BITS)
    assert 0 <= sequence <= SEQUENCE_MAX
    return incarnation << SEQUENCE_BITS | sequence


def incarnation_of(task: int) -> int:
    return task >> SEQUENCE_BITS


def sequence_of(task: int) -> int:
    return task & SEQUENCE_MAX


_canonical = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
).encode  # one encoder: making it takes as long as a small value


def canonical_json(value: Any) -> bytes:
    """One byte string per value: sorted keys, no spaces, UTF-8, no NaN (RFC 8785 for the subset we use)."""
    return _canonical(value).encode()


def digest(value: Any) -> str:
    """sha256 (hex) of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def submission_id(
    *,
    asset: str,
    partition: str,
    code_version: str,
    input_version: str,
    engine_fingerprint: str,
    sampling: Mapping[str, Any],
    salt: str = "",
) -> str:
    """The idempotency key of one submission (hex sha256).

    The same inputs give the same id, so an op retry, a re-launched run or a backfill cannot submit twice;
    a deliberate recomputation sets `salt`.
    """
    return digest(
        {
            "asset": asset,
            "partition": partition,
            "code_version": code_version,
            "input_version": input_version,
            "engine_fingerprint": engine_fingerprint,
            "sampling": dict(sampling),
            "salt": salt,
        }
    )
