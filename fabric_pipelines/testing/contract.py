"""A contract: what a library's Python API looks like, as a file in tests/contracts states it; stand-ins are held to it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any


class Contract:
    """The facts of one file; `calls` have positional, keyword_only and required names, `fields` have names."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.version: str = facts["source"]["version"]
        self._facts = facts

    def names(self, name: str) -> list[str]:
        return list(self._facts["fields"][name]["names"])

    def keywords(self, name: str) -> list[str]:
        call = self._facts["calls"][name]
        return [*call["positional"], *call["keyword_only"]]

    def bind(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by name, or TypeError as the real signature raises it."""
        call = self._facts["calls"][name]
        kind, required = inspect.Parameter, set(call["required"])
        parameters = [
            kind(name, how, default=kind.empty if name in required else None)
            for names, how in (
                (call["positional"], kind.POSITIONAL_OR_KEYWORD),
                (call["keyword_only"], kind.KEYWORD_ONLY),
            )
            for name in names
        ]
        if call["extra_keywords"]:
            parameters.append(kind("extra", kind.VAR_KEYWORD))
        bound = inspect.Signature(parameters).bind(*args, **kwargs).arguments
        extra = bound.pop("extra", {})
        return {**bound, **extra}

    def value(self, name: str, **fields: Any) -> SimpleNamespace:
        """An object of the contract's class `name`; AssertionError for a field that it does not have."""
        unknown = set(fields) - set(self.names(name))
        assert not unknown, f"{name} has no field {', '.join(sorted(unknown))}"
        return SimpleNamespace(**fields)
