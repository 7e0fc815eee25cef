"""What a person sees in the Dagster UI after a quickstart: everything there, green, with its figures in place."""

from __future__ import annotations

import html
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fabric_pipelines.definitions import build_defs
from fabric_pipelines.workloads.corpus import BOOKS
from tests.browser.conftest import Look
from tests.support import eventually

pytestmark = [pytest.mark.browser, pytest.mark.slow]

GROUPS = ("embeddings", "hidden_states", "indexes", "probes", "synthetic")
LINEAGE = "/asset-groups?expanded=" + ",".join(f"global@global:{group}" for group in GROUPS)
ASSETS = """{ assetNodes {
  assetKey { path } description groupName isMaterializable
  assetMaterializations(limit: 1) { timestamp }
  partitionStats { numPartitions numMaterialized numFailed }
  assetChecksOrError { ... on AssetChecks { checks {
    name blocking executionForLatestMaterialization { status evaluation { success } }
  } } }
} }"""


OBSERVED = "indexes/source"


@pytest.fixture(scope="module")
def nodes(ask: Callable[[str], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {"/".join(node["assetKey"]["path"]): node for node in ask(ASSETS)["assetNodes"]}


def test_every_asset_is_materialised_in_all_its_partitions(nodes: dict[str, Any]) -> None:
    wanted = build_defs().resolve_asset_graph().get_all_asset_keys()
    assert set(nodes) == {"/".join(key.path) for key in wanted}
    for name, node in nodes.items():
        if name == OBSERVED:
            continue
        assert node["assetMaterializations"], name
        stats = node["partitionStats"]
        if stats is not None:
            wanted_partitions = 1 if name == "indexes/current" else len(BOOKS)
            assert stats["numMaterialized"] == stats["numPartitions"] == wanted_partitions, name
            assert stats["numFailed"] == 0, name


def test_every_check_ran_and_passed(nodes: dict[str, Any]) -> None:
    checks = {
        f"{name}:{check['name']}": check["executionForLatestMaterialization"]
        for name, node in nodes.items()
        for check in node["assetChecksOrError"]["checks"]
    }
    assert len(checks) == 9
    for name, latest in checks.items():
        assert latest is not None, name
        assert (latest["status"], latest["evaluation"]["success"]) == ("SUCCEEDED", True), name


def test_the_run_succeeded_and_the_sensor_is_on(ask: Callable[[str], dict[str, Any]]) -> None:
    answer = ask(
        """{ runsOrError { ... on Runs { results { status tags { key value } } } }
        workspaceOrError { ... on Workspace { locationEntries { name loadStatus
          locationOrLoadError { __typename ... on RepositoryLocation { repositories {
            sensors { name sensorState { status } } } } } } } } }"""
    )
    # other tests of this session may have started runs of their own beside the two quickstarts
    quickstarts = [
        run["status"]
        for run in answer["runsOrError"]["results"]
        if {"key": "fabric/run", "value": "quickstart"} in run["tags"]
    ]
    assert quickstarts == ["SUCCESS", "SUCCESS"]
    (location,) = answer["workspaceOrError"]["locationEntries"]
    assert location["name"] == "fabric"
    (repository,) = location["locationOrLoadError"]["repositories"]
    assert {
        sensor["name"]: sensor["sensorState"]["status"] for sensor in repository["sensors"]
    } == {"finished_submissions": "RUNNING", "moved_shards": "RUNNING"}


def test_the_lineage_is_drawn_and_green(look: Look) -> None:
    page = look(LINEAGE)
    for words in (*GROUPS, "submission", "results", "cluster_health", "near_duplicates", "receipt"):
        assert words in page
    graph = build_defs().resolve_asset_graph()
    cut = [key for key in graph.get_all_asset_keys() if graph.get(key).is_partitioned]
    assert page.count("Materialized") == len(graph.get_all_asset_keys()) - len(cut)
    assert page.count("100% filled") == len(cut) - 1  # one is observed
    for bad in ("Failed", "Overdue", "Unsynced", "Never materialized", "missing"):
        assert bad not in page


def test_the_page_of_an_asset_shows_its_figure_in_place(look: Look) -> None:
    page = html.unescape(look("/assets/probes/report?view=events"))
    for words in ("accuracy_by_layer", "best_accuracy", "control_accuracy", "bag_of_words"):
        assert words in page
    assert 'src="data:image/svg+xml' in page
    assert "Show Markdown" not in page


def test_the_checks_tab_shows_what_gates_the_index(look: Look) -> None:
    page = look("/assets/indexes/receipt?view=checks")
    for words in ("receipt_verifies", "blocking", "Passed", "receipt_id"):
        assert words in page


def test_the_partitions_are_the_books_and_all_there(look: Look) -> None:
    page = look("/assets/hidden_states/results?view=partitions")
    for words in (*BOOKS, f"Materialized ({len(BOOKS)})", "Missing (0)", "Failed (0)"):
        assert words in page


def test_a_picture_of_the_lineage_is_more_than_an_empty_page(look: Look, tmp_path: Path) -> None:
    drawn, empty = (tmp_path / f"{name}.png" for name in ("lineage", "nothing"))
    look("/assets/nothing", picture=empty)

    def more_is_drawn() -> bool:
        """A picture is taken after a time of the page's own, in which a busy machine may not have drawn yet."""
        look(LINEAGE, picture=drawn)
        assert drawn.read_bytes().startswith(b"\x89PNG")
        return drawn.stat().st_size > empty.stat().st_size

    eventually(more_is_drawn, within_s=120, what="the lineage in a picture")
