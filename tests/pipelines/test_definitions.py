"""The code location: it loads, cheaply, and its lineage is the one on record."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import dagster as dg

from fabric_pipelines.definitions import OWNER, build_defs
from fabric_pipelines.workloads.catalogue import WORKLOADS
from tests.support import skip_or_fail

LINEAGE = """
embeddings/results <- embeddings/submission
embeddings/submission <-
hidden_states/results <- hidden_states/submission
hidden_states/submission <-
indexes/cluster_health <- indexes/shard
indexes/current <- indexes/source
indexes/near_duplicates <- indexes/shard
indexes/receipt <- indexes/cluster_health
indexes/shard <- embeddings/results
indexes/source <-
probes/report <- probes/results
probes/results <- probes/submission
probes/submission <-
synthetic/results <- synthetic/submission
synthetic/submission <-
"""
BLOCKING = {
    "embeddings/results:balance",
    "hidden_states/results:balance",
    "indexes/receipt:receipt_verifies",
    "probes/results:balance",
    "synthetic/results:balance",
}
WARNING_OR_ERROR = {
    "indexes/cluster_health:lists_are_sound",
    "indexes/near_duplicates:known_near_duplicates_found",
    "indexes/shard:exact_search_is_exact",
    "synthetic/results:verifier_pass_rate",
}


def test_the_location_loads() -> None:
    defs = build_defs()
    dg.Definitions.validate_loadable(defs)
    assert defs.get_repository_def().name


def test_dg_checks_the_definitions_from_the_checkout_with_no_setting() -> None:
    """A new reader's first command: no DAGSTER_HOME, no FABRIC_ variable, no flag."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME")}
    dg_cli = Path(sys.executable).with_name("dg")
    if not dg_cli.exists():
        skip_or_fail("dagster-dg-cli is not installed: pip install -e '.[dev]'")
    done = subprocess.run(
        [str(dg_cli), "check", "defs"],
        cwd=Path(__file__).parents[2],
        env=kept,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "All definitions loaded successfully" in done.stdout + done.stderr


def test_lineage_is_the_one_on_record() -> None:
    graph = build_defs().resolve_asset_graph()
    lines = [
        f"{key.to_user_string()} <- "
        + ", ".join(sorted(parent.to_user_string() for parent in graph.get(key).parent_keys))
        for key in sorted(graph.get_all_asset_keys(), key=lambda key: key.path)
    ]
    assert [line.strip() for line in lines] == LINEAGE.split("\n")[1:-1]


def test_checks_that_gate_what_follows_are_blocking() -> None:
    specs = [spec for check in build_defs().asset_checks or [] for spec in check.check_specs]
    names = {
        blocking: {
            f"{spec.asset_key.to_user_string()}:{spec.name}"
            for spec in specs
            if spec.blocking is blocking
        }
        for blocking in (True, False)
    }
    assert names == {True: BLOCKING, False: WARNING_OR_ERROR}


def test_every_asset_has_an_owner_a_group_kinds_and_a_code_version() -> None:
    for asset in build_defs().assets or []:
        if isinstance(
            asset, dg.SourceAsset
        ):  # only observed: it takes neither owner nor code version
            assert (asset.group_name, bool(asset.description)) == (asset.key.path[0], True)
            continue
        assert isinstance(asset, dg.AssetsDefinition)
        for spec in asset.specs:
            assert spec.owners == [OWNER]
            assert spec.group_name == spec.key.path[0]
            assert spec.kinds
            assert spec.code_version
            assert spec.description


def test_each_workload_is_there_as_submission_and_results() -> None:
    keys = build_defs().resolve_asset_graph().get_all_asset_keys()
    for name in WORKLOADS:
        assert {dg.AssetKey([name, "submission"]), dg.AssetKey([name, "results"])} <= keys


def test_loading_imports_no_device_library_and_draws_nothing() -> None:
    """A spawned step must be cheap, and must never create a CUDA context."""
    code = (
        "import sys, fabric_pipelines.definitions as d; d.build_defs();"
        "print(sorted({'torch','cupy','tensorrt','ctranslate2','onnxruntime','matplotlib',"
        "'reasoning_gym'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_two_sensors_run_and_one_schedule_waits_to_be_switched_on() -> None:
    defs = build_defs()
    sensors, schedules = list(defs.sensors or []), list(defs.schedules or [])
    assert [sensor.name for sensor in sensors] == ["finished_submissions", "moved_shards"]
    assert [schedule.name for schedule in schedules] == ["nightly_submissions"]
    assert {sensor.default_status for sensor in sensors} == {dg.DefaultSensorStatus.RUNNING}
    assert schedules[0].default_status is dg.DefaultScheduleStatus.STOPPED


def test_no_value_can_reach_the_pickling_io_manager() -> None:
    resources = build_defs().resources or {}
    assert resources["io_manager"] is resources["intermediates"]
