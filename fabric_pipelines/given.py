"""Fields that came from a file or from another process, as a value of this program, or one error that names the place and the remedy.

What stands there may be damaged, or of an older or newer program than this one. A field that this program does not know is
never left out in silence: whoever writes the value back would lose it. Refuses to guess: no value is converted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fabric_pipelines.errors import CorruptionFound, FabricError, VersionRefused

T = TypeVar("T")


def value_of(
    cls: type[T],
    told: object,
    where: str,
    *,
    what: str,
    remedy: str,
    newer: str = "upgrade this one",
    error: type[FabricError] = CorruptionFound,
) -> T:
    """`cls` is a dataclass; told: its fields, or the JSON text of them, from `where`; what: how people call such a value.
    Fields with a default may be missing. VersionRefused, with `newer`, where everything is there and more;
    `error`, with `remedy`, for whatever else is not as `cls` has it."""
    try:
        given = _parsed(told)
        kind: Any = cls
        hints, needed = _fields_of(kind)
        foreign = sorted(set(given) - set(hints))
        if foreign and needed <= set(given):
            raise VersionRefused(
                f"{where} was written by a newer program (it also says {', '.join(foreign)}): {newer}"
            )
        if lacking := sorted(needed - set(given)):
            raise TypeError(f"it lacks {', '.join(lacking)}")
        for name, value in given.items():
            if not _fits(value, hints[name]):
                shown = repr(value)
                shown = shown if len(shown) <= 60 else f"{shown[:59]}…"
                raise TypeError(f"its field {name} is {shown}, which is of another type")
        return cls(**given)
    except VersionRefused:
        raise
    except (TypeError, ValueError, RecursionError, FabricError) as fault:
        raise error(f"{where} is no {what}: {fault}; {remedy}") from fault


def _parsed(told: object) -> Mapping[str, Any]:
    given = json.loads(told) if isinstance(told, str | bytes) else told
    if not isinstance(given, Mapping):
        raise TypeError("it is no JSON object")
    return given


@cache
def _fields_of(cls: Any) -> tuple[dict[str, Any], set[str]]:
    """Types by field, and which fields have no default."""
    made = fields(cls)
    hints = get_type_hints(cls)
    needed = {
        item.name for item in made if item.default is MISSING and item.default_factory is MISSING
    }
    return {item.name: hints[item.name] for item in made}, needed


def _fits(value: Any, hint: Any) -> bool:
    """As far as JSON has the type; what it has not is the dataclass' own to judge."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in inner)
    if origin is Literal:
        return value in inner
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(_fits(each, inner[-1]) for each in value.values())
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return isinstance(value, list | tuple) and all(_fits(each, inner[0]) for each in value)
    if hint in (int, float):
        return isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)  # fmt: skip
    if hint in (str, bool, NoneType):
        return isinstance(value, hint)
    return True
