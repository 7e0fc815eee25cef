"""Submission: one idempotent act of a producer, made of numbered task batches.

The fingerprint covers content and order, so that the same id with other content is refused. It can be
computed before anything is sent, or while sending.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

from fabric_pipelines.errors import UsageError
from fabric_pipelines.records.task import logical_columns, token_counts


@dataclass(frozen=True, slots=True)
class Submission:
    """Header of a submission.

    submission_id: hex sha256, see ids.submission_id
    function:      selects sink and result schema (dataplane.sinks)
    engine:        name of the engine asked for, e.g. "smollm2-135m-instruct@ctranslate2-int8"
    sampling:      what the engine is to do with each task, JSON-able, see records/shape.py
    tenant:        owner; over a socket the credential decides, not this field
    vocab_size:    token ids must be below it
    tasks, tokens: totals over all batches
    fingerprint:   hex sha256 over all batches in order, see fingerprint_of
    """

    submission_id: str
    function: str
    engine: str
    sampling: Mapping[str, Any]
    vocab_size: int
    tasks: int
    tokens: int
    fingerprint: str
    tenant: str = "default"
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.submission_id) != 64 or set(self.submission_id) - set("0123456789abcdef"):
            raise UsageError(f"submission id {self.submission_id!r} is not 64 hex digits")
        for name in ("function", "engine", "tenant"):
            if not getattr(self, name):
                raise UsageError(f"submission {self.submission_id[:12]} lacks {name!r}")
        if self.tasks <= 0 or self.tokens < self.tasks:
            raise UsageError(f"submission {self.submission_id[:12]} has no tasks or empty prompts")

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Submission:
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as fault:
            raise UsageError(f"not a submission header: {fault}") from fault


_COLUMNS = ("tokens", "lengths", "new", "rows", "meta", "metalen")


class Fingerprinter:
    """Running totals and sha256 over the logical content of task batches in order.

    Independent of how rows are cut into batches and of Arrow's physical layout: hashed are, column by
    column over the whole, lengths and values, never raw buffers with offsets.
    """

    __slots__ = ("_parts", "tasks", "tokens")

    def __init__(self, begun: Fingerprinter | None = None) -> None:
        """Goes on where `begun` is, which stays as it is."""
        if begun is None:
            self.tasks = self.tokens = 0
            self._parts = {name: hashlib.sha256() for name in _COLUMNS}
        else:
            self.tasks, self.tokens = begun.tasks, begun.tokens
            self._parts = {name: part.copy() for name, part in begun._parts.items()}

    def update(self, batch: pa.RecordBatch) -> None:
        self.count(batch)
        self.hash(batch)

    def count(self, batch: pa.RecordBatch) -> None:
        """The totals alone; `hash` of the same batch has to follow, in the same order."""
        self.tasks += batch.num_rows
        self.tokens += int(token_counts(batch).sum())

    def hash(self, batch: pa.RecordBatch) -> None:
        for name, content in zip(_COLUMNS, logical_columns(batch), strict=True):
            self._parts[name].update(content)

    def copy(self) -> Fingerprinter:
        return Fingerprinter(self)

    def hexdigest(self) -> str:
        parts = self._parts
        return hashlib.sha256(b"".join(parts[name].digest() for name in sorted(parts))).hexdigest()


def fingerprint_of(batches: Iterable[pa.RecordBatch]) -> tuple[int, int, str]:
    """(tasks, tokens, hex sha256) of the batches' logical content in order, see Fingerprinter."""
    running = Fingerprinter()
    for batch in batches:
        running.update(batch)
    return running.tasks, running.tokens, running.hexdigest()
