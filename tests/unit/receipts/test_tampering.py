"""Whatever is changed in a receipt's row or in the source, verify names it and never falls over."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fabric_pipelines import receipts

BASE = 5 << 40


def leaves(value, path=()):
    """Paths to every field, and to the first two items of every list."""
    items = value.items() if isinstance(value, dict) else list(enumerate(value))[:2]
    for key, item in items:
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from leaves(item, (*path, key))


def at(value, path):
    for key in path:
        value = value[key]
    return value


@pytest.mark.parametrize("edit", ["remove", "null", "word"])
def test_any_field_of_a_receipt_that_is_edited_is_noticed(store, tmp_path, receipt, edit):
    row = store.receipts[receipt.receipt_id]
    silent = []
    for path in list(leaves(row.statement)):
        statement = copy.deepcopy(dict(row.statement))
        parent = at(statement, path[:-1])
        if edit == "remove":
            del parent[path[-1]]
        else:
            parent[path[-1]] = None if edit == "null" else "another"
        if statement == row.statement:  # it was null before
            continue
        store.receipts[receipt.receipt_id] = dataclasses.replace(row, statement=statement)
        if receipts.verify(store, tmp_path, receipt.receipt_id).ok:
            silent.append(path)
    assert silent == []


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    changed=st.sets(st.integers(0, 299), max_size=4),
    removed=st.sets(st.integers(0, 299), max_size=4),
    added=st.sets(st.integers(300, 5000), max_size=4),
)
def test_exactly_the_rows_that_moved_are_named(store, tmp_path, receipt, changed, removed, added):
    before = dict(store.rows)
    changed -= removed
    try:
        for row in changed:
            store.put(np.array([BASE + row]), store.rows[BASE + row][None] + np.float16(0.5))
        for row in added:
            store.put(np.array([BASE + row]), np.ones((1, 16)))
        for row in removed:
            del store.rows[BASE + row]
        found = {
            item.what.rpartition(".")[2]: item.sentence
            for item in receipts.verify(store, tmp_path, receipt.receipt_id).differences
        }
    finally:
        store.rows = before
    wanted = {"changed": changed, "removed": removed, "added": added}
    assert found.keys() == {kind for kind, rows in wanted.items() if rows}
    for kind, sentence in found.items():
        ids = ", ".join(str(BASE + row) for row in sorted(wanted[kind]))
        assert f"(task_id {ids})" in sentence
