"""Promise: what a leased task may still write into the log, at most, down to the byte and reported all by itself.

From its lease on a task writes one outcome, or comes back, and then is retired or buried. Each of these is paid for as
if it were alone in its group: its frame, the COMMIT behind it, the mark that it is durable, a step of its lane. What
goes into an outcome beside tokens, vector and the task's own metadata is bounded where it enters (`bounded`), so that
the sum is a bound and no guess. Refuses text that is longer than that, and cuts an error's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fabric_pipelines.errors import SchemaError, UsageError
from fabric_pipelines.ids import canonical_json
from fabric_pipelines.records.completion import ERROR_TEXT_BYTES_MAX, clip_error_text

TOKEN_BYTES = 4
OUTCOME_BYTES = 4864  # of an outcome alone beside tokens, vector and metadata, see `bounded`
SETTLE_BYTES = 1280  # of a retirement or burial alone
LEASE_BYTES = 1024  # of a lease, beside the numbers of its tasks
TASK_BYTES = 8  # of such a number
VECTOR_UNKNOWN_BYTES = 2048  # of a vector while none of its kind was seen: 1,024 elements
PROOF_BYTES_MAX = 512
NAME_BYTES_MAX = 256  # of a session as it is written down: 200 characters may be more
TEXT_BYTES_MAX: Mapping[str, int] = {
    "finish_reason": 32,
    "artifact_uri": 256,
    "artifact_sha256": 64,
    "error_code": 64,
    "engine": 128,
    "engine_fingerprint": 64,
}


def bounded(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The completion batch with no error text above ERROR_TEXT_BYTES_MAX. SchemaError for other text that is longer
    than anything an engine has to say."""
    for name, most in TEXT_BYTES_MAX.items():
        longest = _longest(batch, name)
        if longest > most:
            raise SchemaError(
                f"completion batch has a {name!r} of {longest} bytes; {most} are the most that is kept"
            )
    if _longest(batch, "error_text") <= ERROR_TEXT_BYTES_MAX:
        return batch
    texts = batch.column("error_text").to_pylist()
    cut = [None if text is None else clip_error_text(text) for text in texts]
    at = batch.schema.get_field_index("error_text")
    return batch.set_column(at, batch.schema.field(at), pa.array(cut, pa.string()))


def _longest(batch: pa.RecordBatch, name: str) -> int:
    return int(pc.max(pc.binary_length(batch.column(name))).as_py() or 0)


def require_proof(proof: Mapping[str, Any]) -> None:
    """UsageError for a confirmation that is longer than what a retirement has room for."""
    size = len(canonical_json(dict(proof)))
    if size > PROOF_BYTES_MAX:
        raise UsageError(f"proof is of {size} bytes; it must be of at most {PROOF_BYTES_MAX}")


def require_name(name: str) -> None:
    """UsageError for a session whose name takes too many bytes in every fact about it."""
    size = len(canonical_json(name))
    if size > NAME_BYTES_MAX:
        raise UsageError(
            f"session is a name of {size} bytes as JSON; it must be of at most {NAME_BYTES_MAX}"
        )


def require_engine(engine: str, fingerprint: str = "") -> None:
    """UsageError for an engine whose outcomes could not be taken for its name alone."""
    for name, value in (("engine", engine), ("engine_fingerprint", fingerprint)):
        size, most = len(value.encode(errors="surrogatepass")), TEXT_BYTES_MAX[name]
        if size > most:
            raise UsageError(
                f"{name} is of {size} bytes; it must be of at most {most}, since every outcome carries it"
            )


def largest_metadata(batch: pa.RecordBatch) -> int:
    """Bytes of the longest metadata of a task batch, 0 without any."""
    column = batch.column("metadata")
    offsets = np.frombuffer(column.buffers()[1], np.int32)
    return int(np.diff(offsets[column.offset : column.offset + len(column) + 1]).max(initial=0))
