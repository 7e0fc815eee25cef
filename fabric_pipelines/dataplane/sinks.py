"""Sinks: for each function, the table its completions land in and how each column is made from Arrow.

A sink is data: a table and a list of columns, each with the Postgres kind and a function from the pulled batch
to an Arrow array. A function without a sink of its own has the generic table, so nothing is ever dropped.
Rows that Postgres is known to reject are told apart here, in columns, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fabric_pipelines.dataplane.encode import HALFVEC_DIM_MAX, Column, packed

Decode = Callable[[str, pa.Array], pa.Array | None]
"""(engine name, list<uint32> of output ids) -> strings, or None where that engine's tokeniser is not here."""

INT4_MAX = (1 << 31) - 1
TOO_LARGE = "54000"


@dataclass(frozen=True, slots=True)
class Landing:
    """What a column may depend on beside the batch."""

    vector_type: str
    decode: Decode | None = None


Build = Callable[[pa.RecordBatch, Landing], pa.Array]


@dataclass(frozen=True, slots=True)
class SinkColumn:
    """kind "vector" stands for what the database has: halfvec or bytea."""

    name: str
    kind: str
    build: Build


@dataclass(frozen=True, slots=True)
class Sink:
    function: str
    table: str
    columns: tuple[SinkColumn, ...]

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    def encode(self, batch: pa.RecordBatch, landing: Landing) -> list[Column]:
        return [
            Column(
                column.name,
                landing.vector_type if column.kind == "vector" else column.kind,
                column.build(batch, landing),
            )
            for column in self.columns
        ]


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why one row cannot land. `code` is an SQLSTATE or a completion's own error code."""

    row: int
    code: str
    reason: str


def sink_of(function: str) -> Sink:
    return SINKS.get(function, GENERIC)


def foresee(batch: pa.RecordBatch, sink: Sink, landing: Landing) -> dict[int, Rejection]:
    """Rows (by position) that the database would reject, found in columns: one rejected row costs a whole
    COPY, a whole batch of them would cost one COPY each. TOO_LARGE says that a row's size is all that is wrong."""
    found: dict[int, Rejection] = {}

    def note(rows: npt.NDArray[np.intp], code: str, reason: str) -> None:
        for row in rows.tolist():
            found.setdefault(row, Rejection(row, code, reason))

    vectors = batch.column("vector")
    typed = any(column.kind == "vector" for column in sink.columns)
    if typed:
        note(_rows_with_non_finite(vectors), "22000", "the vector holds NaN or infinity")
    for name in (
        "submission_id",
        "function",
        "engine",
        "engine_fingerprint",
        "artifact_uri",
        "artifact_sha256",
    ):
        strings = batch.column(name)
        bad = pc.fill_null(pc.match_substring(strings, "\x00"), False)
        note(
            np.flatnonzero(bad.to_numpy(zero_copy_only=False)),
            "22021",
            f"{name} holds a NUL character",
        )
    tokens = batch.column("prompt_tokens").to_numpy()
    note(np.flatnonzero(tokens > INT4_MAX), "22003", "prompt_tokens is beyond int4")
    if typed and landing.vector_type == "halfvec":
        # a row without a vector is no row with an empty one: its vector may be an artifact
        counts = pc.list_value_length(vectors).fill_null(1).to_numpy()
        note(np.flatnonzero(counts == 0), "22000", "the vector is empty")
        over = f"a vector has more than {HALFVEC_DIM_MAX} elements, which halfvec cannot hold"
        note(np.flatnonzero(counts > HALFVEC_DIM_MAX), TOO_LARGE, f"{over}: ask for fewer layers")
    return found


def without_nul(strings: pa.Array) -> pa.Array:
    """Postgres text holds no NUL; it becomes U+FFFD. The token ids beside it stay exact."""
    return pc.replace_substring(strings, "\x00", "\ufffd")


def _none() -> npt.NDArray[np.intp]:
    return np.zeros(0, np.intp)


def _rows_with_non_finite(lists: pa.Array) -> npt.NDArray[np.intp]:
    values = lists.flatten().to_numpy(zero_copy_only=False)
    bad = np.flatnonzero(~np.isfinite(values))
    if not bad.size:
        return _none()
    ends = np.cumsum(pc.list_value_length(lists).fill_null(0).to_numpy())
    return np.unique(np.searchsorted(ends, bad, side="right"))


def _take(name: str) -> Build:
    return lambda batch, landing: batch.column(name)


def _count(name: str) -> Build:
    return lambda batch, landing: pc.list_value_length(batch.column(name))


def _packed(name: str) -> Build:
    return lambda batch, landing: packed(batch.column(name))


def _vector(batch: pa.RecordBatch, landing: Landing) -> pa.Array:
    lists = batch.column("vector")
    return lists if landing.vector_type == "halfvec" else packed(lists)


def _text(batch: pa.RecordBatch, landing: Landing) -> pa.Array:
    """Decoded output, engine by engine; null where no tokeniser is at hand."""
    rows = batch.num_rows
    if landing.decode is None:
        return pa.nulls(rows, pa.string())
    engines = batch.column("engine")
    names = engines.unique().to_pylist()
    if len(names) == 1:
        texts = landing.decode(names[0], batch.column("output"))
        return pa.nulls(rows, pa.string()) if texts is None else without_nul(texts)
    parts, order = [], []
    for name in names:
        at = np.flatnonzero(pc.equal(engines, name).to_numpy(zero_copy_only=False))
        texts = landing.decode(name, batch.column("output").take(pa.array(at)))
        parts.append(pa.nulls(len(at), pa.string()) if texts is None else without_nul(texts))
        order.append(at)
    return pa.concat_arrays(parts).take(pa.array(np.argsort(np.concatenate(order))))


_HEAD = (
    SinkColumn("task_id", "int8", _take("task_id")),
    SinkColumn("submission_id", "text", _take("submission_id")),
    SinkColumn("source_row", "int8", _take("source_row")),
    SinkColumn("finish_reason", "text", _take("finish_reason")),
    SinkColumn("prompt_tokens", "int4", _take("prompt_tokens")),
)
_TOKENS = (
    SinkColumn("output_tokens", "int4", _count("output")),
    SinkColumn("output", "bytea", _packed("output")),
)
_TAIL = (
    SinkColumn("artifact_uri", "text", _take("artifact_uri")),
    SinkColumn("artifact_sha256", "text", _take("artifact_sha256")),
    SinkColumn("engine", "text", _take("engine")),
    SinkColumn("engine_fingerprint", "text", _take("engine_fingerprint")),
    SinkColumn("attempts", "int2", _take("attempts")),
    SinkColumn("t_start_us", "int8", _take("t_start_us")),
    SinkColumn("t_end_us", "int8", _take("t_end_us")),
    SinkColumn("metadata", "bytea", _take("metadata")),
)
_DIM = SinkColumn("dim", "int4", _count("vector"))
_SINGLE_PASS = (*_HEAD, _DIM, SinkColumn("vector", "vector", _vector), *_TAIL)

GENERIC = Sink(
    "*",
    "fabric.results",
    (
        _HEAD[0],
        SinkColumn("function", "text", _take("function")),
        *_HEAD[1:],
        *_TOKENS,
        _DIM,
        SinkColumn("vector", "bytea", _packed("vector")),
        *_TAIL,
    ),
)
SINKS: Mapping[str, Sink] = {
    "generate": Sink(
        "generate",
        "fabric.generate",
        (*_HEAD, *_TOKENS, SinkColumn("text", "text", _text), *_TAIL),
    ),
    "embed": Sink("embed", "fabric.embed", _SINGLE_PASS),
    "hidden_states": Sink("hidden_states", "fabric.hidden_states", _SINGLE_PASS),
}

DEAD_LETTERS = "fabric.dead_letters"


def dead_letter_columns(
    batch: pa.RecordBatch, rejections: Sequence[Rejection], raw: Sequence[bytes]
) -> list[Column]:
    """Dead-letter rows of `batch` (one per rejection, in the same order). Nothing in here may be rejected in
    its turn, so text loses its NULs and counts are clipped."""

    def text(name: str) -> pa.Array:
        return without_nul(batch.column(name))

    reasons = pa.array([item.reason for item in rejections], pa.string())
    codes = pa.array([item.code for item in rejections], pa.string())
    tokens = pc.min_element_wise(batch.column("prompt_tokens"), pa.scalar(INT4_MAX, pa.uint32()))
    return [
        Column("task_id", "int8", batch.column("task_id")),
        Column("function", "text", text("function")),
        Column("submission_id", "text", text("submission_id")),
        Column("source_row", "int8", batch.column("source_row")),
        Column("status", "text", text("status")),
        Column("error_code", "text", without_nul(codes)),
        Column("reason", "text", without_nul(reasons)),
        Column("prompt_tokens", "int4", tokens),
        Column("engine", "text", text("engine")),
        Column("engine_fingerprint", "text", text("engine_fingerprint")),
        Column("attempts", "int2", batch.column("attempts")),
        Column("requeues", "int2", batch.column("requeues")),
        Column("consumer", "text", text("consumer")),
        Column("raw", "bytea", pa.array(raw, pa.binary())),
    ]
