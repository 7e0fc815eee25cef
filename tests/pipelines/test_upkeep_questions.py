"""What a tick of `moved_shards` asks of Dagster's storage does not grow with the number of shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import dagster as dg
import pytest
import sqlalchemy

from assets import upkeep
from assets.upkeep import CURRENT_KEY, HEAD_TAG, REFRESH_TAG, SOURCE_KEY, VERSION_TAG
from fabric_pipelines.dataplane.staleness import Staleness


def stale(shard: str, verdict: str = "changed", generation: int = 1) -> Staleness:
    return Staleness(
        shard=shard,
        generation=generation,
        relation="fabric.embed",
        receipt_id=None,
        log="complete",
        rows=100,
        inserted=0,
        updated=10,
        deleted=0,
        truncated=False,
        moved=10,
        moved_fraction=0.1,
        deleted_fraction=0.0,
        age_s=1.0,
        recall=None,
        last_change_at=datetime(2026, 1, 1, tzinfo=UTC),
        verdict=verdict,
        due=verdict != "fresh",
    )


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.instance_for_test() as instance:
        yield instance


@contextmanager
def statements() -> Iterator[list[str]]:
    seen: list[str] = []

    def note(*args: object) -> None:
        if str(args[2]).lstrip().startswith("SELECT"):
            seen.append(str(args[2]))

    sqlalchemy.event.listen(sqlalchemy.Engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        sqlalchemy.event.remove(sqlalchemy.Engine, "before_cursor_execute", note)


def known_to_lineage(instance: dg.DagsterInstance, shard: str, generation: int = 1) -> None:
    instance.report_runless_asset_event(
        dg.AssetMaterialization(CURRENT_KEY, partition=shard, metadata={"generation": generation})
    )
    instance.report_runless_asset_event(
        dg.AssetObservation(SOURCE_KEY, partition=shard, tags={VERSION_TAG: f"{generation}-fresh"})
    )


def run(instance: dg.DagsterInstance, item: Staleness, status: dg.DagsterRunStatus) -> None:
    instance.add_run(
        dg.DagsterRun(
            job_name="refresh",
            status=status,
            tags={REFRESH_TAG: item.shard, HEAD_TAG: upkeep._head(item)},
        )
    )


def asked_for(instance: dg.DagsterInstance, found: list[Staleness]) -> tuple[int, set[str]]:
    """Statements of one look, and the shards that it asks a run for."""
    with statements() as seen:
        upkeep.observations(instance, found)
        wanted = upkeep._wanted(instance, found, upkeep.heard(instance))
    return len(seen), {str(request.partition_key) for request in wanted}


def test_a_tick_over_a_hundred_shards_asks_as_often_as_one_over_three(
    instance: dg.DagsterInstance,
) -> None:
    found = [stale(f"s{number:03d}") for number in range(100)]
    for item in found[:3]:
        known_to_lineage(instance, item.shard)
    few, wanted = asked_for(instance, found[:3])
    assert wanted == {"s000", "s001", "s002"}
    for item in found[3:]:
        known_to_lineage(instance, item.shard)
        run(instance, item, dg.DagsterRunStatus.STARTED)
    many, wanted = asked_for(instance, found)
    assert wanted == {"s000", "s001", "s002"}
    assert many == few <= 10


def test_lineage_is_read_in_pages_and_the_newest_event_of_each_shard_counts(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("assets.lineage.PAGE", 4)
    names = [f"s{number}" for number in range(10)]
    for generation in (1, 2):
        for name in names:
            known_to_lineage(instance, name, generation)
    assert {
        name: item["generation"] for name, item in upkeep.heard(instance).items()
    } == dict.fromkeys(names, 2)
    assert upkeep.observed_versions(instance) == dict.fromkeys(names, "2-fresh")
    found = [stale(name, "fresh", 3 if name == "s7" else 2) for name in names]
    assert asked_for(instance, found)[1] == {"s7"}


def test_a_failure_holds_its_own_shard_and_state_only(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [stale(name) for name in ("a", "b", "c")]
    for item in found:
        known_to_lineage(instance, item.shard)
    for _ in range(upkeep.FAILURES_COUNTED + 2):
        run(instance, found[0], dg.DagsterRunStatus.FAILURE)
    run(instance, stale("b", generation=7), dg.DagsterRunStatus.FAILURE)  # another state of b
    assert asked_for(instance, found)[1] == {"b", "c"}
    now_s = upkeep.now_s()
    longest_s = upkeep.FIRST_WAIT_S * 2 ** (upkeep.FAILURES_COUNTED - 1)
    monkeypatch.setattr(upkeep, "now_s", lambda: now_s + longest_s - 20)
    assert asked_for(instance, found)[1] == {"b", "c"}
    monkeypatch.setattr(upkeep, "now_s", lambda: now_s + longest_s + 20)
    assert asked_for(instance, found)[1] == {"a", "b", "c"}
