"""Flags, then environment, then fabric.toml, then defaults, and `origin` says which won."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fabric_pipelines import settings
from fabric_pipelines.errors import Refused, SettingsError


def test_each_source_beats_the_next(tmp_path: Path) -> None:
    (tmp_path / "fabric.toml").write_text('ui_port = 1\nlease_ms = 2\ntenant = "toml"\n')
    loaded = settings.load(
        {"tenant": "flag"}, {"FABRIC_TENANT": "env", "FABRIC_LEASE_MS": "3"}, tmp_path
    )
    assert (loaded.tenant, loaded.lease_ms, loaded.ui_port) == ("flag", 3, 1)
    assert loaded.attempts_max == settings.Settings().attempts_max
    assert [loaded.origin[n] for n in ("tenant", "lease_ms", "ui_port", "attempts_max")] == [
        "flag",
        "environment",
        "fabric.toml",
        "default",
    ]


def test_an_unknown_key_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "fabric.toml").write_text("lease = 2\n")
    with pytest.raises(SettingsError, match=r"\['lease'\]"):
        settings.load({}, {}, tmp_path)


@pytest.mark.parametrize("value", ["soon", "-1", "1.5"])
def test_a_number_that_is_none_is_refused_by_name(tmp_path: Path, value: str) -> None:
    with pytest.raises(SettingsError, match="lease_ms"):
        settings.load({}, {"FABRIC_LEASE_MS": value}, tmp_path)


def test_a_broken_toml_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "fabric.toml").write_text("lease_ms = \n")
    with pytest.raises(SettingsError, match=r"fabric\.toml cannot be read"):
        settings.load({}, {}, tmp_path)


def test_a_child_process_loads_equal_settings(tmp_path: Path) -> None:
    parent = settings.load({"home": tmp_path / "h", "threads": 2}, {}, tmp_path)
    child = settings.load({}, parent.as_environment(), Path("/"))
    assert {**parent.as_environment()} == {**child.as_environment()}


def test_a_deep_home_gets_a_short_runtime_folder(tmp_path: Path) -> None:
    deep = settings.load({"home": tmp_path / ("x" * 120)}, {}, tmp_path)
    assert (
        len(str(deep.runtime_dir / "postgres" / ".s.PGSQL.65432")) <= settings.UNIX_PATH_BYTES_MAX
    )
    other = settings.load({"home": tmp_path / ("y" * 120)}, {}, tmp_path)
    assert other.runtime_dir != deep.runtime_dir


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:secret@db/x", "postgresql://me:***@db/x"),
        ("postgresql://me@db/x", "postgresql://me@db/x"),
        ("/plain/folder", "/plain/folder"),
        ("postgresql://me:p@ss@db/x", "postgresql://me:***@db/x"),
    ],
)
def test_a_password_is_never_shown(url: str, shown: str) -> None:
    assert settings.redact(url) == shown


def test_a_space_or_a_comma_in_the_home_moves_only_the_sockets(tmp_path: Path) -> None:
    for name in ("a b", "a,b", "a%20b", "ü"):
        made = settings.load({"home": tmp_path / name}, {}, tmp_path)
        assert settings.PLAIN_PATH.fullmatch(str(made.runtime_dir))
        assert made.journal_dir == tmp_path / name / "journal"


def test_a_user_without_a_home_folder_is_told_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # as in a container: no passwd entry
    with pytest.raises(SettingsError, match="set HOME or FABRIC_MODELS"):
        settings.load({}, {}, tmp_path)


def test_a_folder_in_the_place_of_fabric_toml_is_named(tmp_path: Path) -> None:
    (tmp_path / "fabric.toml").mkdir()
    with pytest.raises(SettingsError, match=r"fabric\.toml cannot be read"):
        settings.load({}, {}, tmp_path)


def test_a_runtime_folder_that_another_user_could_write_to_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    settings.make_runtime_folder(shared / "mine")
    assert stat.S_IMODE((shared / "mine").stat().st_mode) == 0o700
    settings.make_runtime_folder(shared / "mine")

    (shared / "open").mkdir()
    (shared / "open").chmod(0o777)
    (shared / "link").symlink_to(shared / "mine")
    for planted in ("open", "link"):
        with pytest.raises(Refused, match="only this user may write to"):
            settings.make_runtime_folder(shared / planted)
