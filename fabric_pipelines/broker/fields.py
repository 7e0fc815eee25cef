"""Fields: reads one named value out of a request, of the type and within the bounds that the owner can bear.

What an answer is made of is decided by one thread, which no request may bring down: a number too large for a column or
a name as long as a book ends here, in the thread of who sent it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fabric_pipelines.errors import UsageError

COUNT_MAX = (1 << 53) - 1  # what a JSON number means in every language
NUMBER_MAX = (1 << 63) - 1
NAME_MAX = 200
TEXT_MAX = 4096

Head = Mapping[str, Any]


def text(head: Head, name: str, *, least: int = 1, most: int = NAME_MAX) -> str:
    value = head.get(name)
    if not isinstance(value, str) or not least <= len(value) <= most:
        raise UsageError(f"{name} must be text of {least} to {most} characters, not {shown(value)}")
    return value


def count(head: Head, name: str, *, least: int = 0, most: int = COUNT_MAX) -> int:
    value = head.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise UsageError(f"{name} must be a whole number of {least} to {most}, not {shown(value)}")
    return value


def seconds(head: Head, name: str, *, most: float) -> float:
    """Cut off at `most`."""
    value = head.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise UsageError(f"{name} must be a number of seconds, not {shown(value)}")
    return float(min(value, most))


def flag(head: Head, name: str, *, default: bool | None = None) -> bool:
    value = head.get(name, default)
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be true or false, not {shown(value)}")
    return value


def names(head: Head, name: str, *, most: int) -> tuple[str, ...]:
    """None where it is absent."""
    value = head.get(name, [])
    if not isinstance(value, list) or len(value) > most:
        raise UsageError(f"{name} must be a list of at most {most} names, not {shown(value)}")
    return tuple(text({name: each}, name) for each in value)


def mapping(head: Head, name: str) -> dict[str, Any]:
    value = head.get(name)
    if not isinstance(value, dict):
        raise UsageError(f"{name} must be an object, not {shown(value)}")
    return value


def shown(value: Any) -> str:
    """Short, whatever it is."""
    try:
        found = repr(value)
    except (
        ValueError,
        RecursionError,
    ):  # a number of thousands of digits, a nest of thousands of lists
        found = f"a {type(value).__name__}"
    return found if len(found) <= 80 else f"{found[:79]}…"
