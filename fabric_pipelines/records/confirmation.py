"""Confirmation: a sink's proof that completions are durable; without one the broker retires nothing.

kind "postgres": `proof` = {"cluster": system identifier, "xid": committed transaction id, "table": name}.
kind "object":   `proof` = {"uri": ..., "size": bytes, "sha256": hex}.
kind "dead_letter": as postgres, for rows of `fabric.dead_letters`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fabric_pipelines.errors import UsageError

REQUIRED = {
    "postgres": ("cluster", "xid", "table"),
    "object": ("uri", "size", "sha256"),
    "dead_letter": ("cluster", "xid", "table"),
}


@dataclass(frozen=True, slots=True)
class Confirmation:
    kind: str
    proof: Mapping[str, Any]

    def __post_init__(self) -> None:
        required = REQUIRED.get(self.kind)
        if required is None:
            raise UsageError(
                f"confirmation kind {self.kind!r} is unknown; use one of {sorted(REQUIRED)}"
            )
        missing = [name for name in required if self.proof.get(name) in (None, "")]
        if missing:
            raise UsageError(f"confirmation of kind {self.kind!r} lacks {', '.join(missing)}")
