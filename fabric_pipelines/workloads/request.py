"""From a request to a submission and its task batches: the one way every workload takes.

The id covers what decides the result (workload, partition, code version, the prompts' digest, engine,
sampling, salt), so asking again asks for nothing new. A batch holds at most BATCH_ROWS rows: the broker
acknowledges by batch, and a producer that dies resumes at the first one not yet durable.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from fabric_pipelines.errors import SchemaError, UsageError
from fabric_pipelines.ids import digest, submission_id
from fabric_pipelines.records.shape import aligned_lengths, sampling_kind
from fabric_pipelines.records.submission import Submission, fingerprint_of
from fabric_pipelines.records.task import TASK_SCHEMA, task_batch, token_counts

BATCH_ROWS = 4096
SUBMISSION_KEY, REQUEST_KEY = b"fabric.submission", b"fabric.request"
WHOLE = ""  # partition of a workload that has none


class Tokeniser(Protocol):
    """What a workload needs of models.Tokeniser."""

    @property
    def sha256(self) -> str: ...
    def encode(self, texts: Sequence[str]) -> list[list[int]]: ...
    def encode_chat(self, prompts: Sequence[str]) -> list[list[int]]: ...


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The engine asked for. identity: digest of what pins its answers (model files, runtime), known without
    opening it."""

    name: str
    identity: str
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Row:
    """One task before it is tokenised. source_row is the workload's own number of it."""

    source_row: int
    text: str
    metadata: Mapping[str, Any]


class Request(Protocol):
    """A frozen dataclass of plain values; what a person may set in the launchpad."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


RequestT = TypeVar("RequestT", bound=Request)


def request_from(cls: type[RequestT], values: Mapping[str, Any]) -> RequestT:
    """`cls` from JSON-able values. Raises UsageError for a name it does not have."""
    known = {item.name for item in fields(cls)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise UsageError(
            f"{cls.__module__.rsplit('.', 1)[-1]} request has no {unknown}; it has {sorted(known)}"
        )
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


@dataclass(frozen=True, slots=True)
class Prepared:
    """A submission and its tasks (one table, TASK_SCHEMA), ready to be sent. `request`: what was asked for, beside them and
    no label of theirs: it may ask for another reading of the same results (more shuffles of a control)."""

    submission: Submission
    tasks: pa.Table
    request: Mapping[str, Any]

    def batches(self) -> Iterator[pa.RecordBatch]:
        yield from self.tasks.to_batches(max_chunksize=BATCH_ROWS)

    @property
    def padding_ratio(self) -> float:
        """Share of a padded batch that would be padding, with lanes cut by records.shape.aligned_lengths."""
        if sampling_kind(self.submission.sampling) == "generate":
            return 0.0
        lengths = np.concatenate([token_counts(batch) for batch in self.batches()])
        return float(1 - lengths.sum() / aligned_lengths(lengths).sum())

    @property
    def tokens_max(self) -> int:
        """Prompt tokens plus everything that may be generated: the upper end of a progress bar."""
        return self.submission.tokens + int(np.sum(self.tasks.column("max_new_tokens").to_numpy()))

    def to_table(self) -> pa.Table:
        """The tasks, with submission and request in the schema's metadata: one Arrow file says it all."""
        return self.tasks.replace_schema_metadata(
            {SUBMISSION_KEY: self.submission.to_json(), REQUEST_KEY: json.dumps(dict(self.request))}
        )

    @classmethod
    def from_table(cls, table: pa.Table) -> Prepared:
        told = table.schema.metadata or {}
        if not {SUBMISSION_KEY, REQUEST_KEY} <= told.keys():
            raise SchemaError(
                "table of tasks carries no submission and request in its schema metadata"
            )
        request = json.loads(told[REQUEST_KEY])
        header = Submission.from_json(told[SUBMISSION_KEY])
        return cls(header, table.replace_schema_metadata(None), request)


def prepare(
    rows: Sequence[Row],
    *,
    workload: str,
    partition: str,
    code_version: str,
    request: Request,
    function: str,
    sampling: Mapping[str, Any],
    engine: EngineChoice,
    tokeniser: Tokeniser,
    max_new_tokens: int = 0,
    chat: bool = False,
) -> Prepared:
    """Tokenise `rows` in bulk and number the submission. Pure: equal arguments give an equal id."""
    if not rows:
        raise UsageError(f"{workload} request yields no task; ask for at least one row")
    texts = [row.text for row in rows]
    tokens = tokeniser.encode_chat(texts) if chat else tokeniser.encode(texts)
    batch = task_batch(
        tokens,
        max_new_tokens=max_new_tokens,
        source_rows=[row.source_row for row in rows],
        metadata=[json.dumps(dict(row.metadata), sort_keys=True).encode() for row in rows],
    )
    table = pa.Table.from_batches([batch], TASK_SCHEMA)
    count, token_sum, fingerprint = fingerprint_of(table.to_batches(max_chunksize=BATCH_ROWS))
    submission = Submission(
        submission_id=submission_id(
            asset=workload,
            partition=partition,
            code_version=code_version,
            input_version=fingerprint,
            engine_fingerprint=engine.identity,
            sampling=sampling,
            salt=str(getattr(request, "salt", "")),
        ),
        function=function,
        engine=engine.name,
        sampling=sampling,
        vocab_size=engine.vocab_size,
        tasks=count,
        tokens=token_sum,
        fingerprint=fingerprint,
        labels={
            "workload": workload,
            "partition": partition,
            "tokeniser": tokeniser.sha256,
            "input": digest(texts),
        },
    )
    return Prepared(submission, table, json.loads(json.dumps(asdict(request))))
