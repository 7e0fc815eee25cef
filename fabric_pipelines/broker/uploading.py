"""Uploading: a producer's end of an upload, through either door.

Both raise what their transport raises; the client makes typed errors of it. A batch that cannot be sent any more has
its reason among the answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.flight as flight

from fabric_pipelines.broker.callsocket import CallStream
from fabric_pipelines.errors import SchemaError
from fabric_pipelines.records.arrow import to_ipc_pieces
from fabric_pipelines.records.task import TASK_SCHEMA

BROKEN = (flight.FlightError, pa.ArrowException, OSError)


class Uploading(Protocol):
    def send(self, batch: pa.RecordBatch, note: Mapping[str, Any]) -> None: ...

    def answer(self) -> dict[str, Any] | None:
        """The next one; None at the end."""
        ...

    def done(self) -> None:
        """There are no more batches; answers may follow."""
        ...

    def close(self) -> None: ...


class FlightUploading:
    def __init__(self, client: flight.FlightClient, command: bytes) -> None:
        descriptor = flight.FlightDescriptor.for_command(command)
        self._writer, self._reader = client.do_put(descriptor, TASK_SCHEMA)

    def send(self, batch: pa.RecordBatch, note: Mapping[str, Any]) -> None:
        self._writer.write_with_metadata(batch, json.dumps(note).encode())

    def answer(self) -> dict[str, Any] | None:
        found = self._reader.read()
        return None if found is None else json.loads(bytes(found))

    def done(self) -> None:
        self._writer.done_writing()

    def close(self) -> None:
        self._writer.close()


class CallUploading:
    def __init__(self, stream: CallStream) -> None:
        self._stream = stream

    def send(self, batch: pa.RecordBatch, note: Mapping[str, Any]) -> None:
        self._stream.send({**note, "do": "batch"}, to_ipc_pieces(batch))

    def answer(self) -> dict[str, Any] | None:
        found = self._stream.read()
        if found is None:
            return None
        head, parts = found
        if parts:
            raise SchemaError(
                "the answer to an upload has parts: use the broker's own version of the client"
            )
        return head

    def done(self) -> None:
        self._stream.send({"do": "end"})

    def close(self) -> None:
        self._stream.close()
