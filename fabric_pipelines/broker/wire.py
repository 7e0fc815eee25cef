"""Wire: how requests, answers and errors travel in Arrow Flight; on the call socket they are the same in other frames.

Producers use DoPut with plain task batches: the descriptor's command is the submission header (JSON) with
`"protocol": 1` and, on this machine, `"role": "producer"` beside it; each batch's app_metadata says
`{"first_row": n, "crc32c": [...]}`, each answer is the submission's state. Everything else is DoAction with an
`envelope` both ways. Errors keep their type: their code travels in the message.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from fabric_pipelines.broker.envelope import Part, pack, unpack
from fabric_pipelines.broker.handshake import why_refused
from fabric_pipelines.broker.transport import Credentials
from fabric_pipelines.errors import (
    Backpressure,
    BrokerUnavailable,
    CorruptionFound,
    FabricError,
    by_code,
)

_MARK = "fabric-error:"


def message(head: Mapping[str, Any], *parts: Part) -> pa.Buffer:
    return pa.py_buffer(b"".join(pack(head, parts)))


def read_message(buffer: Any) -> tuple[dict[str, Any], list[memoryview]]:
    return unpack(buffer)


def error_head(fault: FabricError) -> dict[str, Any]:
    head: dict[str, Any] = {"error": fault.code, "message": str(fault)}
    if isinstance(fault, Backpressure):
        head["retry_after_s"] = fault.retry_after_s
    if isinstance(fault, CorruptionFound) and fault.places:
        head["places"] = [dict(place) for place in fault.places]
    return head


def raise_error(head: Mapping[str, Any]) -> None:
    """Raise the error that `head` carries, if it does."""
    code = head.get("error")
    if code is None:
        return
    cls, text = by_code(code), str(head.get("message", ""))
    if issubclass(cls, Backpressure):
        raise cls(text, float(head.get("retry_after_s", 1.0)))
    if issubclass(cls, CorruptionFound):
        raise cls(text, head.get("places", ()))
    raise cls(text)


def as_flight_error(fault: FabricError) -> flight.FlightServerError:
    """For streams, where there is no answer to put the error into."""
    return flight.FlightServerError(_MARK + json.dumps(error_head(fault)) + _MARK)


def from_flight_error(
    fault: Exception, endpoint: str, credentials: Credentials | None = None
) -> FabricError:
    """The typed error inside a Flight error, else BrokerUnavailable. Of a connection under TLS that did not come about
    gRPC says little and differently each time, so with `credentials` the handshake is asked itself."""
    _, mark, rest = str(fault).partition(_MARK)
    if mark:
        try:
            raise_error(json.loads(rest.partition(_MARK)[0]))
        except FabricError as typed:
            return typed
    if isinstance(fault, flight.FlightTimedOutError | BlockingIOError):
        return BrokerUnavailable(
            f"the broker at {endpoint} does not answer in time: see `fabric status` and its log"
        )
    if isinstance(fault, flight.FlightUnavailableError) and credentials is not None:
        return why_refused(endpoint, credentials)
    if isinstance(fault, flight.FlightUnavailableError):
        return BrokerUnavailable(f"no broker answers at {endpoint}: start one with `fabric up`")
    return BrokerUnavailable(
        f"the broker at {endpoint} cannot be reached: {_first_line(fault)[:160]}"
    )


def _first_line(fault: Exception) -> str:
    if isinstance(fault, OSError) and fault.errno:
        return os.strerror(fault.errno)
    return str(fault).splitlines()[0] if str(fault) else type(fault).__name__
