"""Writing the instance's folder and the .env by which `dagster dev` finds it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fabric_pipelines.dagster_home import clear_env_file, ensure_dagster_home, write_env_file
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


def test_clearing_takes_out_what_was_written_and_nothing_else(tmp_path: Path) -> None:
    settings = load(environ={}, folder=tmp_path)
    path = tmp_path / ".env"
    path.write_text("# mine\nTOKEN=abc")
    write_env_file(settings, tmp_path)
    assert clear_env_file(settings, tmp_path) == path
    assert path.read_text() == "# mine\nTOKEN=abc\n"
    assert clear_env_file(settings, tmp_path) is None


def test_a_file_of_our_lines_only_goes_and_one_of_another_home_stays(tmp_path: Path) -> None:
    settings = load(environ={}, folder=tmp_path)
    other = load({"home": tmp_path / "other"}, environ={}, folder=tmp_path)
    path = write_env_file(other, tmp_path)
    before = path.read_text()
    assert clear_env_file(settings, tmp_path) is None
    assert path.read_text() == before
    assert clear_env_file(other, tmp_path) == path
    assert not path.exists()
    assert clear_env_file(other, tmp_path) is None


def test_an_env_file_that_cannot_be_read_is_named_with_its_lines(tmp_path: Path) -> None:
    settings = load(environ={}, folder=tmp_path)
    (tmp_path / ".env").write_bytes(b"\xff")
    with pytest.raises(
        StorageFailed, match=r"take these lines out of it: DAGSTER_HOME=.*FABRIC_HOME="
    ):
        clear_env_file(settings, tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = load({"home": str(tmp_path / "file")}, environ={}, folder=tmp_path)
    with pytest.raises(StorageFailed, match="FABRIC_HOME"):
        ensure_dagster_home(settings)
