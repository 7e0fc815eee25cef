"""Wire: how requests, answers and errors travel in Arrow Flight.

Producers use DoPut with plain task batches: the descriptor's command is the submission header (JSON), each
batch's app_metadata says `{"first_row": n, "crc32c": [...]}`, each answer is the submission's state. Everything
else is DoAction with an `envelope` both ways. Errors keep their type: their code travels in the message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from fabric_pipelines.broker.callsocket import path_beside
from fabric_pipelines.broker.envelope import Part, pack, unpack
from fabric_pipelines.errors import (
    Backpressure,
    BrokerUnavailable,
    FabricError,
    ManifestRefused,
    SettingsError,
    by_code,
)
from fabric_pipelines.settings import PLAIN_PATH

UNIX = "grpc+unix://"
TCP = "grpc://"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_MARK = "fabric-error:"


def require_local(endpoint: str) -> str:
    """The endpoint, if it is a Unix socket or loopback; anything else needs mutual TLS, which has no off switch."""
    if endpoint.startswith(UNIX):
        if PLAIN_PATH.fullmatch(endpoint.removeprefix(UNIX)):
            return endpoint
        raise SettingsError(
            f"the socket path of broker endpoint {endpoint!r} has characters other than letters, digits and "
            "._~-/, which gRPC does not take: set FABRIC_BROKER_URL to a plain path"
        )
    host = endpoint.removeprefix(TCP).rpartition(":")[0]
    if endpoint.startswith(TCP) and host in LOOPBACK:
        return endpoint
    raise SettingsError(
        f"broker endpoint {endpoint!r} is neither {UNIX}<path> nor {TCP}127.0.0.1:<port>; plain connections "
        "never leave the machine"
    )


def call_path(endpoint: str) -> Path | None:
    """The call socket beside an endpoint; None where there is none and calls go through Flight."""
    if not endpoint.startswith(UNIX):
        return None
    return path_beside(Path(endpoint.removeprefix(UNIX)))


def message(head: Mapping[str, Any], *parts: Part) -> pa.Buffer:
    return pa.py_buffer(b"".join(pack(head, parts)))


def read_message(buffer: Any) -> tuple[dict[str, Any], list[memoryview]]:
    return unpack(buffer)


def error_head(fault: FabricError) -> dict[str, Any]:
    head: dict[str, Any] = {"error": fault.code, "message": str(fault)}
    if isinstance(fault, Backpressure):
        head["retry_after_s"] = fault.retry_after_s
    return head


def raise_error(head: Mapping[str, Any]) -> None:
    """Raise the error that `head` carries, if it does."""
    code = head.get("error")
    if code is None:
        return
    cls, text = by_code(code), str(head.get("message", ""))
    if issubclass(cls, Backpressure):
        raise cls(text, float(head.get("retry_after_s", 1.0)))
    if issubclass(cls, ManifestRefused):
        raise cls(text)
    raise cls(text)


def as_flight_error(fault: FabricError) -> flight.FlightServerError:
    """For streams, where there is no answer to put the error into."""
    return flight.FlightServerError(_MARK + json.dumps(error_head(fault)) + _MARK)


def from_flight_error(fault: Exception, endpoint: str) -> FabricError:
    """The typed error inside a Flight error, else BrokerUnavailable."""
    _, mark, rest = str(fault).partition(_MARK)
    if mark:
        try:
            raise_error(json.loads(rest.partition(_MARK)[0]))
        except FabricError as typed:
            return typed
    if isinstance(fault, flight.FlightTimedOutError):
        return BrokerUnavailable(
            f"the broker at {endpoint} does not answer in time: see `fabric status` and its log"
        )
    if isinstance(fault, flight.FlightUnavailableError):
        return BrokerUnavailable(f"no broker answers at {endpoint}: start one with `fabric up`")
    first = str(fault).splitlines()[0] if str(fault) else type(fault).__name__
    return BrokerUnavailable(f"the broker at {endpoint} cannot be reached: {first[:160]}")
