"""Writing the instance's folder and the .env by which `dagster dev` finds it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fabric_pipelines.dagster_home import ensure_dagster_home, write_env_file
from fabric_pipelines.errors import StorageFailed
from fabric_pipelines.settings import load


def test_the_instance_config_is_written_once_and_kept(tmp_path: Path) -> None:
    settings = load(environ={}, folder=tmp_path)
    config = ensure_dagster_home(settings) / "dagster.yaml"
    assert yaml.safe_load(config.read_text())["telemetry"] == {"enabled": False}
    assert "location_name: fabric" in (config.parent / "workspace.yaml").read_text()
    config.write_text("# mine\n")
    ensure_dagster_home(settings)
    assert config.read_text() == "# mine\n"


def test_env_file_sets_two_paths_and_leaves_the_rest(tmp_path: Path) -> None:
    settings = load(environ={}, folder=tmp_path)
    path = tmp_path / ".env"
    path.write_text("TOKEN=abc\nFABRIC_HOME=/elsewhere\n")
    for _ in range(2):
        write_env_file(settings, tmp_path)
    assert path.read_text().splitlines() == [
        "TOKEN=abc",
        f"DAGSTER_HOME={tmp_path}/.fabric/dagster",
        f"FABRIC_HOME={tmp_path}/.fabric",
    ]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = load({"home": str(tmp_path / "file")}, environ={}, folder=tmp_path)
    with pytest.raises(StorageFailed, match="FABRIC_HOME"):
        ensure_dagster_home(settings)
