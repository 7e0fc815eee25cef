"""Header: how a submission begins on the wire, and what makes it one that can be written down."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from fabric_pipelines.broker.fields import COUNT_MAX, NAME_MAX, shown
from fabric_pipelines.broker.promise import require_engine
from fabric_pipelines.broker.replies import ACKNOWLEDGED
from fabric_pipelines.broker.roles import Identity, require_tenant
from fabric_pipelines.errors import UsageError
from fabric_pipelines.ids import SEQUENCE_MAX, canonical_json
from fabric_pipelines.records.shape import require_function, sampling_kind
from fabric_pipelines.records.submission import Submission
from fabric_pipelines.settings import TENANT

BESIDE_HEADER = frozenset({"protocol", "role", ACKNOWLEDGED})
HEADER_BYTES_MAX = 1 << 20
DIGEST = re.compile("[0-9a-f]{64}")
_TYPES = {"str": str, "int": int, "Mapping[str, Any]": dict, "Mapping[str, str]": dict}


def read_opening(command: bytes | None) -> dict[str, Any]:
    """What a stream begins with: a submission's fields, and `protocol`, `role` and `acknowledged` beside them."""
    command = command or b""
    if len(command) > HEADER_BYTES_MAX:
        raise UsageError(
            f"a submission header of {len(command)} bytes is longer than {HEADER_BYTES_MAX}: what belongs to a "
            "task goes into its metadata"
        )
    try:
        head = json.loads(command)
    except (ValueError, RecursionError) as fault:
        raise UsageError(f"not a submission header: {type(fault).__name__} {fault}") from fault
    if not isinstance(head, dict):
        raise UsageError("not a submission header: it must be a JSON object")
    return head


def read_header(head: Mapping[str, Any], who: Identity) -> Submission:
    """The submission header, every field of its type and within bounds; the tenant is the credential's."""
    given = {name: value for name, value in head.items() if name not in BESIDE_HEADER}
    if who.bound:
        require_tenant(who, given.setdefault("tenant", who.tenant), "the submission's lane")
    for item in fields(Submission):
        if item.name in given:
            _require_type(item.name, given[item.name], str(item.type))
    try:
        header = Submission(**given)
    except TypeError as fault:
        raise UsageError(f"not a submission header: {fault}") from fault
    _require_bounds(header)
    require_function(header.function, sampling_kind(header.sampling))
    try:
        canonical_json(asdict(header))
    except (ValueError, RecursionError) as fault:
        raise UsageError(f"submission header has no canonical JSON: {fault}") from fault
    return header


def _require_type(name: str, value: Any, kind: str) -> None:
    if not isinstance(value, _TYPES[kind]) or isinstance(value, bool):
        raise UsageError(f"submission field {name} is {shown(value)}; it must be {kind}")
    if isinstance(value, str) and len(value) > NAME_MAX:
        raise UsageError(f"submission field {name} is longer than {NAME_MAX} characters")


def _require_bounds(header: Submission) -> None:
    for name, most in (("tasks", SEQUENCE_MAX), ("tokens", COUNT_MAX), ("vocab_size", 1 << 32)):
        value = getattr(header, name)
        if not 0 < value <= most:
            raise UsageError(f"submission field {name} is {shown(value)}; it must be in 1..{most}")
    require_engine(header.engine)
    if not DIGEST.fullmatch(header.fingerprint):
        raise UsageError(
            f"submission field fingerprint is {shown(header.fingerprint)}; it must be 64 hex digits in lower case, "
            "see fingerprint_of"
        )
    if not TENANT.fullmatch(header.tenant):
        raise UsageError(
            f"submission field tenant is {header.tenant!r}; it must be a name of letters, digits, '.', '_' and '-'"
        )
    if any(not isinstance(label, str) for label in header.labels.values()):
        raise UsageError("submission labels must be text")
