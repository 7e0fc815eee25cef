"""`fabric bench broker` over real processes: a small round of ours and of the peer that is always there."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from fabric_pipelines.cli import app


def test_the_benchmark_reports_ours_beside_a_peer_and_leaves_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    asked = ["bench", "broker", "--tasks", "600", "--rounds", "1", "--json"]
    asked += ["--system", "fabric", "--system", "sqlite"]
    done = CliRunner().invoke(app, ["--home", str(home), *asked])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert [row["name"] for row in report["systems"]] == ["fabric", "sqlite"]
    assert all(row["cycle_tasks_per_s"] > 0 for row in report["systems"])
    assert report["ratio_redis"] is None
    assert list(home.iterdir()) == []
