"""`fabric health`: metrics and verdicts of a shard, from a store in memory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from fabric_pipelines import cli, shards
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.shards.judging import DECISIONS_FILE
from fabric_pipelines.testing.vector_store import MemoryVectorStore

COPIES = """
[[rule]]
name = "copies"
verdict = "DEDUPE"
when = [{ signal = "exact_duplicate_fraction", above = 0.3 }]
[[rule]]
name = "small"
verdict = "REVIEW"
consecutive = 2
when = [{ signal = "size", below = 60 }]
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shard of two lists: one of 80 rows in 40 pairs of copies, one of 50."""
    rng = np.random.default_rng(4)
    one, other = (
        np.repeat(rng.standard_normal((40, 12)) + 4, 2, axis=0),
        rng.standard_normal((50, 12)) - 4,
    )
    store = MemoryVectorStore()
    store.put(np.arange(130, dtype=np.int64), np.concatenate([one, other]))
    folder = tmp_path / "home"
    shards.build(store, folder / "shards", "notes", lists=2, seed=1, metric="l2", recipe={})
    (tmp_path / "rules.toml").write_text(COPIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FABRIC_HOME", str(folder))
    monkeypatch.setenv("FABRIC_HEALTH_RULES", "rules.toml")
    monkeypatch.setattr(Database, "of", lambda _: store)
    return folder


def health(*more: str) -> Result:
    return CliRunner().invoke(cli.app, ["health", "notes", *more])


def test_json_has_metrics_verdicts_and_what_they_rest_on(home: Path) -> None:
    found = json.loads(health("--json").stdout)
    assert (found["clusters"], len(found["metrics"]), found["generation"]) == (2, 38, 1)
    assert (found["compared_with"], found["follows"], found["recorded"]) == (None, None, False)
    assert {name: count for name, count in found["verdicts"].items() if count} == {
        "DEDUPE": 1,
        "KEEP": 1,
    }
    by_verdict = {each["verdict"]: each for each in found["decisions"]}
    assert by_verdict["DEDUPE"]["stands"]["evidence"] == [
        {
            "signal": "exact_duplicate_fraction",
            "value": 0.5,
            "status": "OK",
            "sense": "above",
            "threshold": 0.3,
        }
    ]
    kept = by_verdict["KEEP"]
    assert (kept["pending"]["verdict"], kept["seen"], kept["needed"]) == ("REVIEW", 1, 2)
    assert not list(home.rglob(DECISIONS_FILE))


def test_a_person_reads_one_line_a_cluster_that_is_not_plain(home: Path) -> None:
    said = " ".join(health().stdout.split())
    assert "DEDUPE by copies since 1: exact_duplicate_fraction 0.5 (above 0.3)" in said
    assert "KEEP; 1 of 2 towards REVIEW by small since 1: size 50 (below 60)" in said


def test_asked_for_its_own_rows_it_says_which_lists_gave_nothing(home: Path) -> None:
    found = json.loads(health("--probes", "--json").stdout)
    assert (found["probes"]["width"], found["probes"]["probe"]) == (2, [130, 130])
    assert sum(found["probes"]["wasted"]) == 130
    assert "probes" not in json.loads(health("--json").stdout)


def test_pictures_and_a_table_are_files_where_they_are_asked_for(home: Path) -> None:
    found = json.loads(health("--plots", "pictures", "--out", "health.parquet", "--json").stdout)
    names = [Path(each).name for each in found["plots"]]
    assert names == ["health_map.svg", "radii.svg", "margins.svg", "cluster_map.svg"]
    assert all(Path(each).read_text().startswith("<svg") for each in found["plots"])
    table = pq.read_table("health.parquet")
    assert table.num_rows == 2
    assert {"dip", "dip_status", "verdict", "rule"} <= set(table.column_names)
    assert len([name for name in table.column_names if name.endswith("_status")]) == 38
    again = health("--out", "health.parquet")
    assert again.exit_code == 2
    assert "health.parquet" in again.stderr
    assert health("--plots", "rules.toml").exit_code == 2


def test_verdicts_are_kept_when_asked_for(home: Path) -> None:
    found = json.loads(health("--record", "--json").stdout)
    (kept,) = home.rglob(DECISIONS_FILE)
    assert json.loads(kept.read_text())["decisions"] == found["decisions"]


def test_a_bad_rule_table_is_one_sentence_and_nothing_is_measured(home: Path) -> None:
    (home.parent / "rules.toml").write_text(COPIES.replace("below = 60", "belo = 60"))
    done = health()
    assert done.exit_code == 2
    assert "rules.toml, rule 2 (small) has 'belo'" in done.stderr
