"""What a document names as the command of a figure can at least be started: nothing it imports is gone."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import tests.bench


@pytest.mark.parametrize(
    "name", sorted(item.name for item in pkgutil.iter_modules(tests.bench.__path__))
)
def test_a_bench_imports_all_that_it_names(name: str) -> None:
    module = importlib.import_module(f"tests.bench.{name}")
    assert module.__doc__
