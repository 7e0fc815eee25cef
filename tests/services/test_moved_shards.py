"""Dagster over a real Postgres: the sensor asks for exactly the moved shards, and what follows turns stale."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.definitions.data_version import CachingStaleStatusResolver, StaleStatus
from dagster._core.definitions.observe import observe
from dagster._core.definitions.partitions.context import partition_loading_context
from dagster._core.loader import LoadingContextForTest

from assets import upkeep
from assets.lineage import require_latest
from assets.upkeep import CURRENT_KEY, REFRESH_TAG, REPORT_TAG, SOURCE_KEY, moved_shards, source
from fabric_pipelines import receipts, shards
from fabric_pipelines.dataplane import staleness
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.writer import Writer
from fabric_pipelines.definitions import build_defs
from resources.database import DatabaseResource
from resources.shards import ShardsResource
from tests.support_completions import pulled_batch

ROWS, DIM = 200, 8
NAMES = ("alpha", "beta", "gamma")
SUBMISSIONS = dict(zip(NAMES, "456", strict=True))


class Fabric:
    def __init__(self, database: Database, root: Path) -> None:
        self.database, self.instance = database, dg.DagsterInstance.ephemeral()
        self.defs = build_defs()
        self.resources = {"database": DatabaseResource(), "shards": ShardsResource()}
        self.skipped: str | None = None

    def move(self, name: str, rows: int = 20) -> None:
        with self.database.session() as connection:
            connection.execute(
                "update fabric.embed set vector = "
                "(select vector from fabric.embed where submission_id = %(s)s and source_row % 200 = 199) "
                "where submission_id = %(s)s and source_row % 200 < %(rows)s".replace(
                    " % 200", " %% 200"
                ),
                {"s": SUBMISSIONS[name] * 64, "rows": rows},
            )

    def require_recall(self, name: str, least: float) -> None:
        """A bound, and a receipt for every generation that says less."""
        staleness.set_policy(self.database, name, {"min_recall": least})
        with self.database.session() as connection:
            connection.execute(
                "create or replace function public.half() returns trigger language plpgsql as $$ begin "
                "new.statement := jsonb_set(new.statement, '{predicate,quality,recall_at_10_probed}', '0.5'); "
                "return new; end $$"
            )
            connection.execute(
                "create or replace trigger half before insert on fabric.receipt for each row "
                "execute function public.half()"
            )
        receipts.issue(self.database, ShardsResource().root, name)

    def tick(self) -> list[dg.RunRequest]:
        """One tick, with what the daemon does about its result."""
        context = dg.build_sensor_context(
            instance=self.instance, resources={"database": DatabaseResource()}
        )
        found = moved_shards(context)
        assert isinstance(found, dg.SensorResult)
        self.skipped = found.skip_reason and found.skip_reason.skip_message
        for request in found.dynamic_partitions_requests or []:
            self.instance.add_dynamic_partitions("shards", list(request.partition_keys))
        for event in found.asset_events:
            self.instance.report_runless_asset_event(event)
        return list(found.run_requests or [])

    def run(self, request: dg.RunRequest) -> dg.ExecuteInProcessResult:
        job = self.defs.resolve_implicit_global_asset_job_def()
        return job.execute_in_process(
            run_config={"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}},
            instance=self.instance,
            asset_selection=list(request.asset_selection or []),
            partition_key=request.partition_key,
            tags=dict(request.tags),
        )

    def status(self, name: str) -> StaleStatus:
        graph = self.defs.resolve_asset_graph()
        return CachingStaleStatusResolver(
            self.instance, graph, LoadingContextForTest(self.instance)
        ).get_status(CURRENT_KEY, name)

    def observations(self) -> int:
        return len(self.instance.fetch_observations(SOURCE_KEY, limit=100).records)


@pytest.fixture
def fabric(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fabric]:
    monkeypatch.setenv("FABRIC_HOME", str(tmp_path))
    monkeypatch.setenv("FABRIC_PG_URL", database.url)
    writer = Writer(database)
    root = ShardsResource().root
    root.mkdir(parents=True)
    for at, name in enumerate(NAMES):
        more = {"first": at * ROWS, "submission_id": SUBMISSIONS[name] * 64}
        writer.land(pulled_batch(ROWS, function="embed", dim=DIM, **more))  # type: ignore[arg-type]
        shards.build(
            database,
            root,
            name,
            submission_id=SUBMISSIONS[name] * 64,
            lists=4,
            seed=3,
            metric="cosine",
            recipe={"engine": "e"},
        )
    writer.close()
    fabric = Fabric(database, root)
    assert fabric.tick() == []
    for wanted in fabric.tick():  # lineage hears of what was published
        assert fabric.run(wanted).success
    yield fabric
    fabric.instance.dispose()


def requested(requests: list[dg.RunRequest]) -> list[str | None]:
    return sorted(request.partition_key for request in requests)  # type: ignore[type-var]


def test_exactly_the_moved_shards_are_requested_until_they_are_built(fabric: Fabric) -> None:
    assert fabric.tick() == []
    assert fabric.instance.get_dynamic_partitions("shards") == list(NAMES)
    fabric.move("alpha")
    fabric.move("gamma")
    for _ in range(2):  # level-triggered: a tick that led to nothing is made good by the next
        requests = fabric.tick()
        assert requested(requests) == ["alpha", "gamma"]
        assert {request.run_key for request in requests} == {None}
    for request in requests:
        assert fabric.run(request).success
    assert fabric.tick() == []
    rows = {
        name: shards.open_generation(fabric.database, ShardsResource().root, name) for name in NAMES
    }
    assert {name: item.number for name, item in rows.items()} == {"alpha": 2, "beta": 1, "gamma": 2}


def test_a_tick_that_asks_for_nothing_says_why_in_counts(
    fabric: Fabric, empty_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabric.tick()
    assert fabric.skipped == "3 shards, none moved"
    fabric.move("alpha")
    assert fabric.tick() != []
    assert fabric.skipped is None
    fabric.instance.create_run_for_job(
        job_def=fabric.defs.resolve_implicit_global_asset_job_def(),
        tags={REFRESH_TAG: "alpha"},
        status=dg.DagsterRunStatus.STARTED,
    )
    fabric.tick()
    assert fabric.skipped == "3 shards, 1 moved and in a run, or waiting after one that failed"
    fabric.instance.delete_dynamic_partition("shards", "beta")
    with dg.build_sensor_context(
        instance=fabric.instance, resources={"database": DatabaseResource()}
    ) as context:
        ticked = moved_shards.evaluate_tick(context)
    assert ticked.skip_message == f"{fabric.skipped}, 1 new, looked at by the next tick"
    monkeypatch.setenv("FABRIC_PG_URL", empty_database.url)
    empty_database.migrate()
    fabric.tick()
    assert fabric.skipped == "no shard is published yet"


def test_what_follows_turns_stale_with_the_verdict_and_fresh_with_the_build(fabric: Fabric) -> None:
    fabric.tick()
    assert {fabric.status(name) for name in NAMES} == {StaleStatus.FRESH}
    fabric.move("beta")
    (request,) = fabric.tick()
    assert [fabric.status(name) for name in NAMES] == [
        StaleStatus.FRESH, StaleStatus.STALE, StaleStatus.FRESH,
    ]  # fmt: skip
    fabric.run(request)
    fabric.tick()
    assert {fabric.status(name) for name in NAMES} == {StaleStatus.FRESH}


def test_an_observation_is_kept_only_when_the_verdict_changes(fabric: Fabric) -> None:
    for _ in range(3):
        fabric.tick()
    assert fabric.observations() == len(NAMES)
    fabric.move("alpha", rows=5)  # 2.5 %: below the policy's line
    fabric.tick()
    assert fabric.observations() == len(NAMES)
    for rows in (15, 20, 25):
        fabric.move("alpha", rows=rows)
        fabric.tick()
    assert fabric.observations() == len(NAMES) + 1


def test_a_shard_whose_run_is_under_way_is_not_asked_for_again(fabric: Fabric) -> None:
    fabric.tick()
    fabric.move("alpha")
    fabric.move("beta")
    fabric.instance.create_run_for_job(
        job_def=fabric.defs.resolve_implicit_global_asset_job_def(),
        tags={REFRESH_TAG: "alpha"},
        status=dg.DagsterRunStatus.STARTED,
    )
    assert requested(fabric.tick()) == ["beta"]


def test_a_move_during_the_build_shows_again_at_the_next_tick(fabric: Fabric) -> None:
    fabric.tick()
    fabric.move("alpha")
    (request,) = fabric.tick()
    fabric.run(request)
    fabric.move("alpha", rows=60)
    assert requested(fabric.tick()) == ["alpha"]


def test_observing_by_hand_gives_the_same_versions(fabric: Fabric) -> None:
    fabric.move("beta")
    observed = observe(
        [source], instance=fabric.instance, resources={"database": DatabaseResource()}
    )
    assert observed.success
    assert fabric.observations() == len(NAMES) + 1
    assert requested(fabric.tick()) == ["beta"]
    assert fabric.observations() == len(NAMES) + 1


def test_a_published_shard_is_reported_once_and_nothing_is_built(fabric: Fabric) -> None:
    """The fixture's shards were built by a call, so lineage first heard of them from the sensor."""
    for name in NAMES:
        found = require_latest(fabric.instance, CURRENT_KEY, name)
        built = shards.open_generation(fabric.database, ShardsResource().root, name)
        assert (found["generation"], found["how"], found["rows_moved"]) == (1, "none", 0)
        assert found["manifest_sha256"] == built.manifest_sha256
        assert built.number == 1
    assert fabric.tick() == []
    assert len(fabric.instance.fetch_materializations(CURRENT_KEY, limit=99).records) == len(NAMES)


def test_what_a_command_publishes_is_reported_and_what_the_policy_leaves_is_left(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FABRIC_SHARD_GENERATIONS_KEPT", "1")
    fabric.move("alpha")
    shards.refresh(fabric.database, ShardsResource().root, "alpha")
    fabric.move("alpha", rows=1)  # moved, and below the policy's line
    (wanted,) = fabric.tick()
    assert wanted.partition_key == "alpha"
    assert fabric.run(wanted).success
    found = require_latest(fabric.instance, CURRENT_KEY, "alpha")
    assert (found["generation"], found["how"]) == (2, "none")
    # an increment needs the full build that it was laid over
    first = shards.open_generation(fabric.database, ShardsResource().root, "alpha", 1)
    assert (found["generations_pruned"], found["bytes_freed"], first.number) == (0, 0, 1)
    shards.refresh(fabric.database, ShardsResource().root, "alpha", anew=True)
    (wanted,) = fabric.tick()
    assert fabric.run(wanted).success
    found = require_latest(fabric.instance, CURRENT_KEY, "alpha")
    assert (found["generation"], found["generations_pruned"]) == (3, 2)
    assert found["bytes_freed"] > 0
    assert shards.open_generation(fabric.database, ShardsResource().root, "alpha").number == 3
    assert fabric.tick() == []


def test_a_new_shard_is_a_partition_first_and_has_runs_from_the_next_tick_on(
    fabric: Fabric,
) -> None:
    """As the daemon evaluates it, which refuses a whole tick for one partition that is not there."""
    fabric.move("alpha")
    with dg.instance_for_test() as fresh, partition_loading_context(dynamic_partitions_store=fresh):
        context = dg.build_sensor_context(
            instance=fresh, definitions=fabric.defs, resources={"database": DatabaseResource()}
        )
        first = moved_shards.evaluate_tick(context)
        (added,) = first.dynamic_partitions_requests or []
        assert list(added.partition_keys) == list(NAMES)
        assert not first.run_requests
        fresh.add_dynamic_partitions("shards", list(added.partition_keys))
        second = moved_shards.evaluate_tick(context)
    assert not second.dynamic_partitions_requests
    assert requested(list(second.run_requests or [])) == list(NAMES)


def test_catching_up_without_a_daemon_is_a_tick(fabric: Fabric) -> None:
    fabric.move("gamma")
    fresh = dg.DagsterInstance.ephemeral()
    requests = upkeep.catch_up(fresh, DatabaseResource())
    assert requested(requests) == list(NAMES)
    assert [REPORT_TAG in item.tags for item in requests] == [True, True, False]
    assert fresh.get_dynamic_partitions("shards") == list(NAMES)
    assert upkeep.observed_versions(fresh) == {
        "alpha": "1-fresh",
        "beta": "1-fresh",
        "gamma": "1-changed",
    }
    fresh.dispose()


def test_without_a_database_the_sensor_skips_and_says_so(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FABRIC_PG_URL", f"postgresql://postgres@/fabric?host={tmp_path}")
    context = dg.build_sensor_context(
        instance=fabric.instance, resources={"database": DatabaseResource()}
    )
    found = moved_shards(context)
    assert isinstance(found, dg.SkipReason)
    assert "Postgres" in str(found.skip_message)


def test_what_failed_is_tried_again_after_a_wait_that_doubles(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabric.tick()
    fabric.move("alpha")
    (request,) = fabric.tick()
    clock = [time.time()]
    monkeypatch.setattr(upkeep, "now_s", lambda: clock[0])
    for wait_s in (60, 120, 240):
        fabric.instance.create_run_for_job(
            job_def=fabric.defs.resolve_implicit_global_asset_job_def(),
            tags=dict(request.tags),
            status=dg.DagsterRunStatus.FAILURE,
        )
        clock[0] = time.time()
        assert fabric.tick() == []
        clock[0] += wait_s - 20
        assert fabric.tick() == []
        clock[0] += 40
        assert requested(fabric.tick()) == ["alpha"]
    clock[0] = time.time()
    fabric.move("alpha", rows=30)  # something else to build: asked for at once
    assert requested(fabric.tick()) == ["alpha"]


def test_a_bound_that_new_lists_do_not_reach_is_tried_once_and_said(fabric: Fabric) -> None:
    """A full build at every tick, for ever, until it was."""
    fabric.require_recall("alpha", 0.9999999)
    (wanted,) = fabric.tick()
    assert fabric.run(wanted).success
    left = require_latest(fabric.instance, CURRENT_KEY, "alpha")
    assert (left["generation"], "lower the bound" in left["still_stale"]) == (2, True)
    for _ in range(2):
        assert fabric.tick() == []
        assert fabric.skipped is not None
        assert fabric.skipped.startswith(
            "3 shards, 1 stale as a refresh left it. alpha: recall 0.5"
        )
    fabric.move("alpha", rows=1)  # below the policy's line, and no reason for another full build
    assert fabric.tick() == []
    fabric.require_recall("alpha", 0.999)  # another bound
    assert requested(fabric.tick()) == ["alpha"]


def test_rows_that_nobody_can_watch_are_compared_once_and_then_once_a_day(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fabric.database.session() as connection:
        connection.execute("create view public.seen as select * from fabric.embed")
    shards.build(
        fabric.database, ShardsResource().root, "view", relation="public.seen", lists=4, seed=3,
        metric="cosine", recipe={"engine": "e"},
    )  # fmt: skip
    fabric.tick()
    (wanted,) = fabric.tick()
    assert (wanted.partition_key, REPORT_TAG in wanted.tags) == ("view", False)
    assert fabric.run(wanted).success
    assert fabric.tick() == []
    assert fabric.skipped is not None
    assert "`fabric receipt audit view` compares the rows, at times of your own" in fabric.skipped
    monkeypatch.setattr(upkeep, "now_s", lambda: time.time() + 86_401)
    assert requested(fabric.tick()) == ["view"]


def test_what_a_refresh_settles_is_asked_for_as_often_as_it_comes_back(fabric: Fabric) -> None:
    """An audit that found nothing leaves nothing that a later one would be held for."""
    for _ in range(2):
        with fabric.database.session() as connection:
            connection.execute("vacuum full fabric.embed")
        requests = fabric.tick()
        assert requested(requests) == list(NAMES)
        for wanted in requests:
            assert fabric.run(wanted).success
        assert fabric.tick() == []
