"""submission and results: submit and exit, wait, ask again; checks that stop what follows; the sensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest

from assets.automation import RANGE_END, RANGE_START, RESULTS_TAG, contiguous
from assets.flow import WAIT_TAG
from assets.lineage import latest, results_key, submission_key
from fabric_pipelines.definitions import build_defs
from fabric_pipelines.workloads.catalogue import WORKLOADS
from fabric_pipelines.workloads.corpus import BOOKS
from resources.database import DatabaseResource
from tests.pipelines.stand_ins import (
    BROKERS,
    MadeUpCompletion,
    MemoryBroker,
    MemoryBrokerResource,
    PlainLakeResource,
    WordWorkerResource,
)

QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}


class Fabric:
    """Definitions over stand-ins, and an instance of their own."""

    def __init__(self, name: str, *, lose_rows: int = 0) -> None:
        self.broker = BROKERS[name] = MemoryBroker()
        broker = MemoryBrokerResource(name=name)
        self.defs = build_defs(
            {
                "broker": broker,
                "gpu_worker": WordWorkerResource(),
                "lake": PlainLakeResource(database=DatabaseResource()),
                "completion": MadeUpCompletion(
                    name=name, broker=broker, database=DatabaseResource(), lose_rows=lose_rows
                ),
            }
        )
        self.instance = dg.DagsterInstance.ephemeral()

    def run(self, *keys: dg.AssetKey, **tags: str) -> dg.ExecuteInProcessResult:
        job = self.defs.resolve_implicit_global_asset_job_def()
        return job.execute_in_process(
            run_config=QUIET,
            instance=self.instance,
            asset_selection=list(keys),
            tags=tags,
            raise_on_error=False,
        )

    def latest(self, key: dg.AssetKey, partition: str = "") -> dict[str, object]:
        return dict(latest(self.instance, key, partition) or {})

    def tick(self) -> dg.SensorResult | list[dg.RunRequest] | object:
        context = dg.build_sensor_context(
            instance=self.instance,
            definitions=self.defs,
            resources={"broker": self.defs.resources["broker"]},  # type: ignore[index]
        )
        sensor = next(iter(self.defs.sensors or []))
        assert isinstance(sensor, dg.SensorDefinition)
        return sensor.evaluate_tick(context)


@pytest.fixture
def fabric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Fabric]:
    monkeypatch.setenv("FABRIC_HOME", str(tmp_path / "home"))
    fabric = Fabric(request.node.name)
    yield fabric
    fabric.instance.dispose()


PROBES = (submission_key("probes"), results_key("probes"), dg.AssetKey(["probes", "report"]))
ALL_BOOKS = {RANGE_START: BOOKS[0], RANGE_END: BOOKS[-1]}


def test_by_default_a_run_submits_and_exits(fabric: Fabric) -> None:
    done = fabric.run(*PROBES)
    assert done.success
    assert fabric.latest(submission_key("probes"))["tasks_submitted"] == 160
    assert fabric.latest(results_key("probes")) == {}
    assert len(done.get_step_skipped_events()) >= 2


def test_a_waiting_run_publishes_with_the_standard_metadata(fabric: Fabric) -> None:
    assert fabric.run(*PROBES, **{WAIT_TAG: "true"}).success
    found = fabric.latest(results_key("probes"))
    assert (found["tasks_submitted"], found["tasks_retired"], found["tasks_lost"]) == (160, 160, 0)
    assert Path(str(found["dagster/uri"])).exists()
    assert {
        "tokens_in",
        "tokens_out",
        "tokens_per_s",
        "padding_ratio",
        "engine_fingerprint",
    } <= set(found)
    assert "data:image/svg+xml" in str(fabric.latest(dg.AssetKey(["probes", "report"])))


def test_asking_again_submits_nothing_new_and_publishes_the_same_bytes(fabric: Fabric) -> None:
    fabric.run(*PROBES, **{WAIT_TAG: "true"})
    first = fabric.latest(results_key("probes"))
    fabric.run(*PROBES, **{WAIT_TAG: "true"})
    second = fabric.latest(results_key("probes"))
    assert len(fabric.broker.submissions) == 1
    assert (first["submission_id"], first["sha256"]) == (second["submission_id"], second["sha256"])


def test_one_run_covers_a_range_of_partitions_each_with_its_own_record(fabric: Fabric) -> None:
    keys = (submission_key("hidden_states"), results_key("hidden_states"))
    assert fabric.run(*keys, **{WAIT_TAG: "true"}, **ALL_BOOKS).success
    ids = {str(fabric.latest(keys[1], book)["submission_id"]) for book in BOOKS}
    assert len(ids) == len(BOOKS) == len(fabric.broker.submissions)


def test_a_lost_row_fails_the_blocking_check_and_nothing_downstream_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FABRIC_HOME", str(tmp_path / "home"))
    fabric = Fabric("lossy", lose_rows=1)
    done = fabric.run(*PROBES, **{WAIT_TAG: "true"})
    (check,) = done.get_asset_check_evaluations()
    assert not done.success
    assert (check.passed, check.metadata["tasks_lost"].value) == (False, 1)
    assert fabric.latest(dg.AssetKey(["probes", "report"])) == {}


def test_a_broken_balance_fails_the_check(fabric: Fabric) -> None:
    fabric.broker.off = 1
    assert not fabric.run(*PROBES, **{WAIT_TAG: "true"}).success


def test_results_without_a_submission_say_what_to_do(fabric: Fabric) -> None:
    done = fabric.run(results_key("probes"))
    (failure,) = (event for event in done.all_events if event.is_step_failure)
    assert "materialise probes/submission first" in str(failure.step_failure_data.error)


# The sensor


def test_the_sensor_asks_for_finished_work_until_it_is_published(fabric: Fabric) -> None:
    fabric.run(submission_key("probes"))
    assert fabric.tick().run_requests == []  # type: ignore[attr-defined]
    fabric.broker.finish()
    for _ in range(2):  # level-triggered: a tick that led to nothing is made good by the next
        (wanted,) = fabric.tick().run_requests  # type: ignore[attr-defined]
        assert set(wanted.asset_selection) == set(PROBES[1:])
        assert wanted.tags[RESULTS_TAG] == "probes"
        assert wanted.run_key is None
    assert fabric.run(*wanted.asset_selection, **wanted.tags).success
    assert fabric.tick().run_requests == []  # type: ignore[attr-defined]


def test_what_was_abandoned_is_not_published_as_if_it_were_whole(fabric: Fabric) -> None:
    fabric.run(submission_key("probes"))
    fabric.broker.finish()
    for key, state in fabric.broker.submissions.items():
        fabric.broker.submissions[key] = replace(state, abandoned=True, enqueued=3, retired=3)
    assert fabric.tick().run_requests == []  # type: ignore[attr-defined]
    done = fabric.run(results_key("probes"))
    (failure,) = (event for event in done.all_events if event.is_step_failure)
    assert "was abandoned with 3 of its" in str(failure.step_failure_data.error)
    assert fabric.latest(results_key("probes")) == {}


def test_the_sensor_does_not_ask_twice_while_a_run_is_on_it(fabric: Fabric) -> None:
    fabric.run(submission_key("probes"))
    fabric.broker.finish()
    dg.DagsterInstance.create_run_for_job(
        fabric.instance,
        job_def=fabric.defs.resolve_implicit_global_asset_job_def(),
        tags={RESULTS_TAG: "probes"},
        status=dg.DagsterRunStatus.STARTED,
    )
    assert fabric.tick().run_requests == []  # type: ignore[attr-defined]


def test_finished_partitions_go_out_as_ranges(fabric: Fabric) -> None:
    fabric.run(submission_key("hidden_states"), **ALL_BOOKS)
    fabric.broker.finish()
    (wanted,) = fabric.tick().run_requests  # type: ignore[attr-defined]
    assert {RANGE_START, RANGE_END} <= set(wanted.tags)
    assert (wanted.tags[RANGE_START], wanted.tags[RANGE_END]) == (BOOKS[0], BOOKS[-1])


def test_without_a_broker_the_sensor_skips_and_says_so(fabric: Fabric) -> None:
    fabric.run(submission_key("probes"))
    fabric.broker.away = True
    assert "fabric up" in str(fabric.tick().skip_message)  # type: ignore[attr-defined]


def test_scattered_partitions_are_cut_where_neighbours_are_missing() -> None:
    assert contiguous(["a", "b", "d"], ["a", "b", "c", "d"]) == [["a", "b"], ["d"]]
    assert contiguous([], ["a"]) == []
    assert [name for name in WORKLOADS if len(WORKLOADS[name].partitions) > 1] == ["hidden_states"]
