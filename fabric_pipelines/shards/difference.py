"""One difference between what is written down and what is found, naming the thing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Difference:
    """`what` names the thing (a field path, a file, rows); `sentence` is what a person reads."""

    what: str
    expected: str
    found: str
    sentence: str

    def __str__(self) -> str:
        return self.sentence

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def field_differences(path: str, expected: Any, found: Any, between: str) -> Iterator[Difference]:
    """Compare two JSON values leaf by leaf. `between` says whose they are: "{expected} ..., {found} ..."."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key in sorted(set(expected) | set(found)):
            yield from field_differences(
                f"{path}.{key}", expected.get(key), found.get(key), between
            )
    elif _is_list(expected) and _is_list(found) and len(expected) == len(found):
        for index, (left, right) in enumerate(zip(expected, found, strict=True)):
            yield from field_differences(f"{path}[{index}]", left, right, between)
    elif expected != found:
        left, right = _short(expected), _short(found)
        yield Difference(
            path, left, right, f"{path}: " + between.format(expected=left, found=right)
        )


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 100 else text[:97] + "..."
