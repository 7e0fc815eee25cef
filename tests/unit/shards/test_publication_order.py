"""The order {blocks, manifest, rename, row, device copy} is needed: a step that is moved or left out, in the source
itself, turns an enumeration red: of kills, of power cuts, or of deaths on the way to the card."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import shutil
import textwrap
from collections.abc import Callable
from contextlib import suppress

import pytest

from fabric_pipelines import shards
from fabric_pipelines.errors import FabricError
from fabric_pipelines.shards.disk import DISK
from tests.mutations import put
from tests.support_power import PowerDisk
from tests.unit.shards import test_generation as generations
from tests.unit.shards import test_refresh as refreshes
from tests.unit.shards import test_retention as retention
from tests.unit.shards.test_generation import WorldEnded, build, current


def _built(store, root, disk):
    return build(store, root, keep_centroids=True, disk=disk)


def _refreshed(store, root, disk):
    return refreshes.refreshed(store, root, disk=disk).generation


def _power_cuts(store, rows, folder, make):
    """After the last step of `make` generation 2 is whole; before each, generation 1 is what it was. Returns how many."""
    build(store, folder / "whole")
    before = current(store, folder / "whole")
    store.put(rows[0][:5], -rows[1][:5])
    steps, made = _power_cut(store, folder, make, -1)
    assert made[0] == 2
    for step in range(steps):
        assert _power_cut(store, folder, make, step) == (step, before)
    return steps


def _power_cut(store, folder, make, step):
    """(steps done, generation and answers afterwards); what is current is whole, and the next build as well."""
    world, root = copy.deepcopy(store), folder / "at"
    shutil.copytree(folder / "whole", root)
    with pytest.MonkeyPatch.context() as patch:
        disk = PowerDisk(root, patch, WorldEnded, step)
        with suppress(WorldEnded):
            make(world, root, disk)
    disk.cut()
    now = current(world, root)
    assert shards.scrub(world, root, "notes").ok
    _built(world, root, DISK)
    assert shards.scrub(world, root, "notes").ok
    shutil.rmtree(root)
    return disk.steps, now


@pytest.mark.parametrize("make", [_built, _refreshed])
def test_a_power_cut_before_any_step_leaves_the_old_generation_and_after_the_last_the_new_one(
    store, rows, tmp_path, make
):
    assert _power_cuts(store, rows, tmp_path, make) >= 15


# ---- what turns red without its place


def kills(store, rows, folder):
    generations.test_a_crash_before_any_step_leaves_the_old_generation_whole_and_the_next_build_clean(
        store, rows, folder
    )


def kills_of_a_refresh(store, rows, folder):
    refreshes.build(store, folder)
    refreshes.test_a_crash_before_any_step_of_a_refresh_leaves_the_old_generation_and_loses_no_move(
        store, rows, folder
    )


def power_cuts(store, rows, folder):
    _power_cuts(store, rows, folder, _built)


def power_cuts_of_a_refresh(store, rows, folder):
    _power_cuts(store, rows, folder, _refreshed)


def deaths_at_the_card(store, rows, folder):
    generations.test_a_crash_in_the_device_copy_leaves_both_generations_whole_and_says_only_what_was_loaded(
        store, rows, folder
    )


def kills_of_a_prune(store, rows, folder):
    retention.test_a_kill_between_any_two_steps_leaves_rows_that_tell_the_truth(store, rows, folder)


Change = Callable[[ast.FunctionDef], None]


def _bodies(function):
    for node in ast.walk(function):
        for name in ("body", "orelse", "finalbody"):
            if isinstance(getattr(node, name, None), list):
                yield getattr(node, name)


def _where(function, text):
    """(body, index) of the one innermost statement that says `text`."""

    def says(statement):
        return text in ast.unparse(statement)

    (found,) = [
        (body, at)
        for body in _bodies(function)
        for at, statement in enumerate(body)
        if says(statement) and not any(says(inner) for part in _bodies(statement) for inner in part)
    ]
    return found


def _take(function, text):
    body, at = _where(function, text)
    statement, body[at] = body[at], ast.copy_location(ast.Pass(), body[at])
    return statement


def left_out(text: str) -> Change:
    def change(function: ast.FunctionDef) -> None:
        _take(function, text)

    return change


def moved(*texts: str, after: str, **renamed: str) -> Change:
    """The statements that say `texts` come right after the one that says `after`, with some of their names changed."""

    def change(function: ast.FunctionDef) -> None:
        statements = [_take(function, text) for text in texts]
        for node in (node for statement in statements for node in ast.walk(statement)):
            if isinstance(node, ast.Name):
                node.id = renamed.get(node.id, node.id)
        body, at = _where(function, after)
        body[at + 1 : at + 1] = statements

    return change


MUTANTS: dict[str, tuple[str, Change, Callable[..., None]]] = {
    "the row before blocks, manifest and rename": (
        "shards.building:build_next",
        moved("write_generation(", after="publish_generation("),
        kills,
    ),
    "the same in a refresh": (
        "shards.renewal:_Refresh._published",
        moved("sha256 = ", "publish_generation(", after="renew_shard("),
        kills_of_a_refresh,
    ),
    "no row": ("shards.building:build_next", left_out("publish_generation("), kills),
    "no blocks": ("shards.generation:write_generation", left_out("block.content"), kills),
    "no manifest": ("shards.generation:write_generation", left_out("FILE_NAME"), kills),
    "no rename": ("shards.generation:write_generation", left_out("disk.rename("), kills),
    "the manifest after the rename": (
        "shards.generation:write_generation",
        moved("FILE_NAME", after="disk.sync_folder(folder)", temp="final"),
        power_cuts,
    ),
    "the parent's sync before the rename": (
        "shards.generation:write_generation",
        moved("disk.sync_folder(folder)", after="disk.sync_folder(temp)"),
        power_cuts,
    ),
    "blocks without a sync": ("shards.disk:Disk.write_file", left_out("os.fsync("), power_cuts),
    "their folders without a sync": (
        "shards.generation:write_generation",
        left_out("disk.sync_folder(inner)"),
        power_cuts,
    ),
    "the manifest's name without a sync": (
        "shards.generation:write_generation",
        left_out("disk.sync_folder(temp)"),
        power_cuts,
    ),
    "the rename without a sync": (
        "shards.generation:write_generation",
        left_out("disk.sync_folder(folder)"),
        power_cuts_of_a_refresh,
    ),
    "loaded, says the row, before the copy": (
        "shards.residence:Residence.open",
        moved("self._publish(", after="shard = DeviceShard("),
        deaths_at_the_card,
    ),
    "loaded, says the row, before the canaries": (
        "shards.residence:Residence.open",
        moved("self._ask_canaries(", after="self._publish("),
        deaths_at_the_card,
    ),
    "files that go without their row": (
        "shards.retention:prune",
        left_out("if not store.prune_generation("),
        kills_of_a_prune,
    ),
    "a folder that goes while it is found": (
        "shards.retention:prune",
        left_out("hidden.append("),
        kills_of_a_prune,
    ),
    "a copy of which no row says": (
        "shards.residence:Residence.open",
        left_out("self._publish("),
        deaths_at_the_card,
    ),
}


@pytest.mark.parametrize("claim", MUTANTS)
def test_each_step_is_needed_in_its_place(store, rows, tmp_path, monkeypatch, claim):
    place, change, judge = MUTANTS[claim]
    path, _, name = place.partition(":")
    module = importlib.import_module(f"fabric_pipelines.{path}")
    original = module
    for part in name.split("."):
        original = getattr(original, part)
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(original))).body
    change(definition)
    put(module, name, definition, monkeypatch)
    with pytest.raises((AssertionError, FabricError)):
        judge(store, rows, tmp_path)
