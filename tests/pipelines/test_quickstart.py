"""`fabric quickstart` for real: processes, models, Postgres, and the same again without doing anything twice."""

from __future__ import annotations

import dagster as dg
import pytest

from assets.automation import RESULTS_TAG
from assets.indexes import SHARD_KEY
from assets.lineage import latest, require_latest, results_key, submission_key
from assets.upkeep import CURRENT_KEY, SOURCE_KEY, observed_versions
from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.dataplane import results
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.definitions import build_defs
from fabric_pipelines.ledger import ZERO
from fabric_pipelines.quickstart import QUIET, RUN_TAGS
from fabric_pipelines.workloads.corpus import BOOKS
from tests.support_quickstart import Demo

pytestmark = pytest.mark.slow

CONTRACT = {
    "tasks", "retired", "dead", "balance", "tokens_in", "tokens_out", "rows_landed", "vectors",
    "receipt_id", "recall_at_10", "seconds",
}  # fmt: skip


@pytest.fixture
def demo(quickstarted: Demo) -> Demo:
    return quickstarted


def test_the_report_keeps_its_contract_and_loses_nothing(demo: Demo) -> None:
    report = demo.reports[0]
    assert set(report) >= CONTRACT
    assert report["retired"] == report["tasks"] == report["rows_landed"] == 1056
    assert (report["dead"], report["balance"]) == (0, 0)
    assert report["vectors"] == 800
    assert 0 < report["padding_waste"] < 0.2
    assert report["tokens_in"] > 20_000


def test_search_is_exact_and_the_receipt_verifies(demo: Demo) -> None:
    assert demo.reports[0]["recall_at_10"] == 1.0
    assert demo.reports[0]["receipt_ok"]


def test_the_model_spoke_and_the_probe_found_what_words_cannot_tell(demo: Demo) -> None:
    samples = demo.reports[0]["samples"]
    assert len(samples) == 10
    assert all(item["reply"].strip() for item in samples)
    assert demo.reports[0]["verifier_pass_rate"] > 0.1
    assert demo.reports[0]["probe_accuracy"] > 0.7


def test_running_it_again_submits_nothing_and_builds_nothing(demo: Demo) -> None:
    first, second = demo.reports
    assert (first["tasks_ran"], second["tasks_ran"]) == (first["tasks"], 0)
    same = ("receipt_id", "tokens_in", "tokens_out", "tasks", "rows_landed", "verifier_pass_rate")
    assert [first[name] for name in same] == [second[name] for name in same]
    with BrokerClient(demo.settings.broker_endpoint, role="admin") as client:
        total = client.status().total
        assert client.verify().differences == []
    assert total.balance == ZERO
    assert total.enqueued.tasks == total.retired.tasks >= first["tasks"]
    assert sum(results.counts(Database.of(demo.settings)).values()) == total.retired.tasks


def test_all_assets_are_materialised_on_the_persistent_instance(demo: Demo) -> None:
    graph = build_defs().resolve_asset_graph()
    with demo.instance() as instance:
        for key in set(graph.get_all_asset_keys()) - {CURRENT_KEY, SOURCE_KEY}:
            partition = BOOKS[0] if graph.get(key).is_partitioned else ""
            assert latest(instance, key, partition), key
        built = require_latest(instance, SHARD_KEY)
        current = require_latest(instance, CURRENT_KEY, built["shard"])
        assert instance.get_dynamic_partitions("shards") == [built["shard"]]
        assert (current["generation"], current["how"]) == (built["generation"], "none")
        assert current["manifest_sha256"] == built["manifest_sha256"]
        (once,) = instance.fetch_materializations(CURRENT_KEY, limit=9).records
        assert once.asset_key == CURRENT_KEY
        assert observed_versions(instance)[built["shard"]] == f"{built['generation']}-fresh"
        run = instance.get_run_by_id(demo.reports[1]["run_id"])
        for check in graph.asset_check_keys:
            record = instance.get_latest_asset_check_evaluation_record(check)
            assert record is not None, check
            assert record.evaluation is not None, check
            assert record.evaluation.passed, check
    assert run is not None
    assert run.status is dg.DagsterRunStatus.SUCCESS
    assert RUN_TAGS.items() <= run.tags.items()


def test_plain_dagster_dev_will_find_the_same_instance(demo: Demo) -> None:
    lines = (demo.folder / ".env").read_text().splitlines()
    assert f"DAGSTER_HOME={demo.settings.dagster_home}" in lines
    assert f"FABRIC_HOME={demo.settings.home}" in lines
    assert (demo.settings.dagster_home / "dagster.yaml").exists()


def test_a_run_submits_and_exits_and_the_sensor_fetches_what_finished(
    demo: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in demo.settings.as_environment().items():
        monkeypatch.setenv(name, value)
    defs = build_defs()
    job = defs.resolve_implicit_global_asset_job_def()
    small = {"config": {"entities": 6, "salt": "sensor", "topics": ["kinds"]}}
    config = {"ops": {"probes__submission": {"ops": {"tokenise_probes": small}}}}
    sensor = next(item for item in defs.sensors or [] if item.name == "finished_submissions")
    with demo.instance() as instance:
        job.execute_in_process(
            instance=instance,
            asset_selection=[submission_key("probes")],
            run_config={**QUIET, **config},
        )
        submitted = latest(instance, submission_key("probes"))
        assert submitted is not None
        with BrokerClient(demo.settings.broker_endpoint, role="producer") as client:
            assert client.wait(submitted["submission_id"], timeout_s=60).finished
        context = dg.build_sensor_context(
            instance=instance,
            definitions=defs,
            resources={"broker": (defs.resources or {})["broker"]},
        )
        (wanted,) = sensor.evaluate_tick(context).run_requests  # type: ignore[union-attr]
        assert wanted.tags[RESULTS_TAG] == "probes"
        job.execute_in_process(
            instance=instance,
            asset_selection=list(wanted.asset_selection),
            tags=wanted.tags,
            run_config=QUIET,
        )
        published = latest(instance, results_key("probes"))
    assert published is not None
    assert published["submission_id"] == submitted["submission_id"]
    assert published["dagster/row_count"] == 12
