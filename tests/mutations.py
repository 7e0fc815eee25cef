"""Where the source syncs and where it compares a CRC, found in the source itself, and the source without one of them."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fabric_pipelines

SYNCS = ("fsync", "fdatasync", "fsync_folder")
PACKAGE = Path(fabric_pipelines.__file__).parent
DURABLE = (
    "journal",
    "broker",
    "dataplane/cold_store.py",
    "folders.py",
)  # what writes or reads the log, its files and objects
EXACT = {"chain", "digest", ".least"}  # of CRCs, of a checkpoint, of a file that may not be shorter
SEAM = "journal/files.py"  # the operations themselves


@dataclass(frozen=True)
class Site:
    """One call or comparison: `text` in the function `name` of `module`; `line` tells two like ones apart."""

    module: str
    name: str
    text: str
    line: int

    def __str__(self) -> str:
        return f"{self.module.rpartition('.')[2]}.{self.name}: {self.text}"


def _functions(modules: tuple[str, ...]) -> Iterator[tuple[str, str, ast.FunctionDef]]:
    """(module, qualified name, definition), outermost functions only."""
    for entry in modules:
        path = PACKAGE / entry
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            relative = file.relative_to(PACKAGE)
            if relative.as_posix() == SEAM:
                continue
            module = ".".join(("fabric_pipelines", *relative.with_suffix("").parts))
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.FunctionDef):
                    yield module, node.name, node
                elif isinstance(node, ast.ClassDef):
                    for inner in node.body:
                        if isinstance(inner, ast.FunctionDef):
                            yield module, f"{node.name}.{inner.name}", inner


def sync_sites() -> list[Site]:
    """Each place that asks for a sync."""
    return [
        Site(module, name, node.func.attr, node.lineno)
        for module, name, function in _functions(DURABLE)
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in SYNCS
    ]


def _compares_crc(node: ast.AST) -> bool:
    if not isinstance(node, ast.Compare) or not isinstance(
        node.ops[0], ast.Eq | ast.NotEq | ast.Lt
    ):
        return False
    words = {
        part.id if isinstance(part, ast.Name) else part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Name | ast.Attribute)
    }
    words |= {f".{part.attr}" for part in ast.walk(node) if isinstance(part, ast.Attribute)}
    keys = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
    marks = ("crc", "checksums")
    named = {str(word) for word in words | keys}
    return bool(named & EXACT) or any(mark in word for mark in marks for word in named)


def crc_sites(modules: tuple[str, ...] = ("journal", "broker")) -> list[Site]:
    """Each comparison of a CRC32C, of a chain of them, of a digest or of the size of a file that decides something; an
    `assert` does not."""
    found = []
    for module, name, function in _functions(modules):
        asserted = {
            id(inner)
            for node in ast.walk(function)
            if isinstance(node, ast.Assert)
            for inner in ast.walk(node)
        }
        found += [
            Site(module, name, ast.unparse(node), node.lineno)
            for node in ast.walk(function)
            if _compares_crc(node) and id(node) not in asserted
        ]
    return found


class _TakeOut(ast.NodeTransformer):
    def __init__(self, site: Site) -> None:
        self._site = site

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if node.lineno == self._site.line and ast.unparse(node) == self._site.text:
            passes = isinstance(node.ops[0], ast.Eq)
            return ast.copy_location(ast.Constant(passes), node)
        return node


def take_out(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function at `site` from now on finds its CRC right, whatever it is."""
    (definition,) = [f for m, name, f in _functions((_file(site),)) if name == site.name]
    changed = _TakeOut(site).visit(definition)
    put(importlib.import_module(site.module), site.name, changed, monkeypatch)


def put(
    module: ModuleType, name: str, definition: ast.FunctionDef, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From now on `definition` is the function, or the method, `name` of `module`, for all who have it."""
    mutant = ast.fix_missing_locations(ast.Module([definition], type_ignores=[]))
    made: dict[str, Any] = {}
    exec(compile(mutant, str(module.__file__), "exec", flags=_annotations()), vars(module), made)
    owner, _, name = name.rpartition(".")
    if owner:
        monkeypatch.setattr(getattr(module, owner), name, made[name])
        return
    original = getattr(module, name)
    for user in _users(original, name):
        monkeypatch.setattr(user, name, made[name])


def _file(site: Site) -> str:
    return "/".join(site.module.split(".")[1:]) + ".py"


def _annotations() -> int:
    import __future__

    return __future__.annotations.compiler_flag


def _users(original: Any, name: str) -> list[ModuleType]:
    """Every module that has the function under its name."""
    return [
        module
        for key, module in list(sys.modules.items())
        if key.startswith("fabric_pipelines") and getattr(module, name, None) is original
    ]
