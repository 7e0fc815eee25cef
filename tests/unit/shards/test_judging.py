"""Verdicts on the lists of a shard: carried from generation to generation, and told from the build under them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fabric_pipelines import shards
from fabric_pipelines.analytics.rules import RuleTable, Verdict, parse, shipped
from fabric_pipelines.errors import SchemaError
from fabric_pipelines.shards.judging import DECISIONS_FILE, Judged
from fabric_pipelines.shards.shard import Shard
from fabric_pipelines.testing.vector_store import MemoryVectorStore

LISTS = 8
THRICE = """
[[rule]]
name = "any"
verdict = "REVIEW"
consecutive = 3
when = [{ signal = "size", above = 0 }]
"""


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.fixture
def built(rows: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> MemoryVectorStore:
    store = MemoryVectorStore()
    store.put(rows[0], unit(rows[1].astype(np.float64)))
    recipe = {"engine_fingerprint": "ab" * 32}
    shards.build(store, tmp_path, "notes", lists=LISTS, seed=3, metric="cosine", recipe=recipe)
    return store


def judged(
    store: MemoryVectorStore,
    root: Path,
    table: RuleTable,
    *,
    record: bool = True,
    ask: bool = False,
) -> Judged:
    with shards.open_shard(store, root, "notes") as opened:
        found = shards.judge(store, root, opened, table, ask=ask)
        if record:
            shards.record(opened.generation, found)
    return found


def move(store: MemoryVectorStore, root: Path, at: int) -> None:
    """One row a little, and the generation that follows."""
    ids = np.array(sorted(store.rows), np.int64)[at : at + 1]
    store.put(ids, np.stack([store.rows[int(name)] for name in ids]) * np.float16(1.001))
    assert shards.refresh(store, root, "notes").how == "increment"


def test_a_first_build_has_nothing_to_be_compared_with(
    built: MemoryVectorStore, tmp_path: Path
) -> None:
    found = judged(built, tmp_path, shipped())
    assert (found.generation, found.compared_with, found.follows) == (1, None, None)
    assert sum(found.verdicts().values()) == LISTS
    table = found.to_arrow()
    assert table.column("verdict").to_pylist() == [d.verdict.value for d in found.decisions]
    assert set(found.health.readings["checksum_mismatch"].status.tolist()) == {3}  # U_CONTEXT


def test_three_generations_in_a_row_change_a_verdict_that_asks_for_three(
    built: MemoryVectorStore, tmp_path: Path
) -> None:
    table = parse(THRICE, "test")
    assert judged(built, tmp_path, table).verdicts()["KEEP"] == LISTS
    move(built, tmp_path, 0)
    second = judged(built, tmp_path, table)
    assert (second.generation, second.compared_with, second.follows) == (2, 1, 1)
    assert {(d.seen, d.needed) for d in second.decisions} == {(2, 3)}
    move(built, tmp_path, 1)
    third = judged(built, tmp_path, table)
    assert (third.compared_with, third.follows) == (1, 2)
    assert [d.verdict for d in third.decisions] == [Verdict.REVIEW] * LISTS
    assert {d.shown.since for d in third.decisions} == {3}


def test_a_generation_is_one_measurement_however_often_it_is_measured(
    built: MemoryVectorStore, tmp_path: Path
) -> None:
    table = parse(THRICE, "test")
    first = [judged(built, tmp_path, table).to_json() for _ in range(4)]
    assert first == first[:1] * 4


def test_what_nobody_recorded_is_no_part_of_the_row(
    built: MemoryVectorStore, tmp_path: Path
) -> None:
    table = parse(THRICE, "test")
    judged(built, tmp_path, table, record=False)
    assert not list(tmp_path.rglob(DECISIONS_FILE))
    move(built, tmp_path, 0)
    found = judged(built, tmp_path, table)
    assert found.follows is None
    assert {d.seen for d in found.decisions} == {1}


def test_other_rules_begin_afresh(built: MemoryVectorStore, tmp_path: Path) -> None:
    judged(built, tmp_path, parse(THRICE, "test"))
    move(built, tmp_path, 0)
    assert judged(built, tmp_path, parse(THRICE.replace("3", "2"), "test")).follows is None


def test_a_full_build_begins_afresh(built: MemoryVectorStore, tmp_path: Path) -> None:
    table = parse(THRICE, "test")
    judged(built, tmp_path, table)
    shards.refresh(built, tmp_path, "notes", anew=True)
    found = judged(built, tmp_path, table)
    assert (found.generation, found.compared_with, found.follows) == (2, None, None)


def test_rows_of_another_model_are_told_from_the_build_under_them(
    built: MemoryVectorStore, tmp_path: Path
) -> None:
    """A tenth of the rows, laid over in an increment: the store's mean moves, digests of moved rows say nothing."""
    judged(built, tmp_path, shipped())
    ids = np.array(sorted(built.rows), np.int64)[::10]
    turn = np.linalg.qr(np.random.default_rng(5).standard_normal((24, 24)))[0]
    rows = np.stack([built.rows[int(name)] for name in ids]).astype(np.float64)
    built.put(ids, unit(rows @ turn + 0.5))
    done = shards.refresh(built, tmp_path, "notes")
    assert done.how == "increment", done.why
    found = judged(built, tmp_path, shipped())
    assert found.compared_with == 1
    assert found.verdicts()["QUARANTINE"] == 0
    moved = [d for d in found.decisions if "store_moved" in str(d)]
    assert moved
    assert all(e.status == "OK" for d in moved for e in (d.pending or d.shown).evidence)


def test_decisions_that_are_not_json_name_the_file_and_the_remedy(
    built: MemoryVectorStore, tmp_path: Path
) -> None:
    judged(built, tmp_path, shipped())
    (kept,) = tmp_path.rglob(DECISIONS_FILE)
    kept.write_text("{")
    move(built, tmp_path, 0)
    with pytest.raises(SchemaError, match=r"decisions\.json cannot be read .* begin afresh"):
        judged(built, tmp_path, shipped())


def test_lists_that_searches_are_sent_to_in_vain_are_rebuilt_where_it_was_asked_for(
    built: MemoryVectorStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second generation on the centroids of two lists stand for each other's rows, which no row says of itself."""
    first = judged(built, tmp_path, shipped(), ask=True)
    assert first.probes is not None
    two = np.argsort(first.health.facts.size)[-3:-1].tolist()  # the largest has two humps
    sound = Shard.centroids

    def swapped(self: Shard) -> np.ndarray:
        found = sound(self).copy()
        if self.manifest.generation > 1:
            found[two] = found[two[::-1]]
        return found

    for at in range(2):
        move(built, tmp_path, at)
        with monkeypatch.context() as patched:
            patched.setattr(Shard, "centroids", swapped)
            found = judged(built, tmp_path, shipped(), ask=True)
    assert found.compared_with == 1
    said = {d.cluster: d.shown for d in found.decisions if d.verdict is Verdict.REBUILD}
    assert sorted(said) == sorted(two)
    assert all("wasted_probes" in str(each.evidence) for each in said.values())
    unasked = judged(built, tmp_path, shipped(), record=False)
    assert unasked.verdicts()["UNKNOWN"] == 0
    assert "probes" not in unasked.to_json()
