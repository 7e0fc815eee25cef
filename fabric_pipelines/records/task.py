"""Task batch: what a producer hands over and a journal keeps.

Rows are token ids, never text. `max_new_tokens` 0 means a single pass (hidden states, embeddings).
`source_row` is the producer's own row number and comes back with the result; `metadata` is opaque bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fabric_pipelines.errors import SchemaError
from fabric_pipelines.records.arrow import crc32c, require_schema

TASK_SCHEMA = pa.schema(
    [
        pa.field("tokens", pa.list_(pa.uint32()), nullable=False),
        pa.field("max_new_tokens", pa.uint32(), nullable=False),
        pa.field("source_row", pa.int64(), nullable=False),
        pa.field("metadata", pa.binary(), nullable=False),
    ]
)


def task_batch(
    tokens: Sequence[Sequence[int]] | pa.Array,
    *,
    max_new_tokens: Sequence[int] | int = 0,
    source_rows: Sequence[int] | None = None,
    metadata: Sequence[bytes] | None = None,
) -> pa.RecordBatch:
    """A checked task batch from columns of equal length."""
    count = len(tokens)
    new = [max_new_tokens] * count if isinstance(max_new_tokens, int) else list(max_new_tokens)
    batch = pa.RecordBatch.from_arrays(
        [
            tokens if isinstance(tokens, pa.Array) else pa.array(tokens, pa.list_(pa.uint32())),
            pa.array(new, pa.uint32()),
            pa.array(range(count) if source_rows is None else source_rows, pa.int64()),
            pa.array([b""] * count if metadata is None else metadata, pa.binary()),
        ],
        schema=TASK_SCHEMA,
    )
    require_task_batch(batch)
    return batch


def token_counts(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """Prompt length of each row, int64 [rows]."""
    lengths: npt.NDArray[np.int64] = (
        pc.list_value_length(batch.column("tokens")).cast(pa.int64()).to_numpy(zero_copy_only=False)
    )
    return lengths


def logical_columns(batch: pa.RecordBatch) -> list[memoryview]:
    """Content of a task batch as six byte strings: token ids, prompt lengths, max_new_tokens, source_row,
    metadata, metadata lengths (lengths as int64). The same rows give the same bytes however they are sliced."""
    metadata = batch.column("metadata")
    offsets = np.frombuffer(metadata.buffers()[1], np.int32)[
        metadata.offset : metadata.offset + len(metadata) + 1
    ]
    blob = memoryview(metadata.buffers()[2] or b"")[int(offsets[0]) : int(offsets[-1])]
    arrays = (
        batch.column("tokens").flatten().to_numpy(),
        token_counts(batch),
        batch.column("max_new_tokens").to_numpy(),
        batch.column("source_row").to_numpy(),
    )
    return [
        *(np.ascontiguousarray(array).data for array in arrays),
        blob,
        np.diff(offsets).astype(np.int64).data,
    ]


def column_checksums(batch: pa.RecordBatch) -> list[int]:
    """CRC32C of each of `logical_columns`; travels with a batch and is checked before it is journaled."""
    return [crc32c(content) for content in logical_columns(batch)]


def require_task_batch(batch: pa.RecordBatch, *, vocab_size: int | None = None) -> None:
    """Raise SchemaError for a wrong schema, broken offsets, nulls, an empty batch, an empty prompt or a token
    id at or above `vocab_size`; the message names the first row at fault."""
    require_schema(batch, TASK_SCHEMA, "task batch")
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as fault:
        raise SchemaError(f"task batch is not valid Arrow: {fault}") from fault
    if batch.num_rows == 0:
        raise SchemaError("task batch has no rows")
    for name in TASK_SCHEMA.names:
        if batch.column(name).null_count:
            raise SchemaError(f"task batch has nulls in {name!r}")
    values = batch.column("tokens").flatten()
    if values.null_count:
        raise SchemaError("task batch has nulls among its token ids")
    lengths = token_counts(batch)
    if not lengths.all():
        raise SchemaError(f"task batch has an empty prompt in row {int(np.argmin(lengths))}")
    if vocab_size is not None:
        ids = values.to_numpy()
        if int(ids.max()) >= vocab_size:
            at = int(np.argmax(ids >= vocab_size))
            row = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
            raise SchemaError(
                f"task batch has token id {int(ids[at])} in row {row}; the vocabulary ends at {vocab_size - 1}"
            )
