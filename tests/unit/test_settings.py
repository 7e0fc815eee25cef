"""Flags, then environment, then fabric.toml, then defaults, and `origin` says which won."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from fabric_pipelines import settings
from fabric_pipelines.errors import Refused, SettingsError


def test_each_source_beats_the_next(tmp_path: Path) -> None:
    (tmp_path / "fabric.toml").write_text('ui_port = 1\nlease_ms = 2000\ntenant = "toml"\n')
    loaded = settings.load(
        {"tenant": "flag"}, {"FABRIC_TENANT": "env", "FABRIC_LEASE_MS": "3000"}, tmp_path
    )
    assert (loaded.tenant, loaded.lease_ms, loaded.ui_port) == ("flag", 3000, 1)
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


TREE = Path(__file__).parents[2]
KNOWN = [item for item in fields(settings.Settings) if item.name != "origin"]
NUMBERS = [item for item in KNOWN if isinstance(item.metadata["within"], settings.Range)]
WRONG_TEXT: dict[str, tuple[Any, ...]] = {
    "health_rules": ["a\x00b"],
    "home": (5, True, "a\0b", "a\nb"),
    "models": (5, "a\0b"),
    "pg_url": (5, "db.example", "mysql://h/d", "postgresql://h/d\n"),
    "lake": (5, "gs://bucket", "s3://", "https://s3.example/b", "a\0b"),
    "broker_cold": (5, "gs://bucket", "s3:///key"),
    "broker_url": (5, "/run/broker.sock", "http://h:1", "grpc://", "grpc+unix:///a\nb"),
    "broker_listen": (5, "0.0.0.0:8471", "tls://h:1"),
    "tls_ca": (5, "a\0b"),
    "tls_cert": (5, "a\0b"),
    "tls_key": (5, "a\0b"),
    "tenant": (5, "a/b", "*", "-a", "a" * 65, "\ud800"),
    "ui_host": (5, "http://h", "a b", "h/x"),
}


def out_of(within: settings.Range) -> list[Any]:
    beside = [within.least - 1, within.most + 1] + [within.least + 1] * (within.step > 1)
    return [
        *beside,
        1.5,
        float(within.least),
        True,
        float("nan"),
        "soon",
        "1.5",
        "1e3",
        [],
        1 << 70,
    ]


@pytest.mark.parametrize("item", KNOWN, ids=lambda item: item.name)
def test_a_value_out_of_a_setting_s_range_is_refused_by_name_value_and_range(
    tmp_path: Path, item: Any
) -> None:
    within = item.metadata["within"]
    number = isinstance(within, settings.Range)
    for value in out_of(within) if number else WRONG_TEXT[item.name]:
        with pytest.raises(SettingsError) as refused:
            settings.load({item.name: value}, {}, tmp_path)
        said = str(refused.value)
        assert said.startswith(f"setting {item.name} is {value!r}"[:50])
        assert said.endswith(f"; it must be {within}")
        with pytest.raises(SettingsError):
            replace(settings.Settings(), **{item.name: value})
    assert item.default in within if not isinstance(item.default, Path) else True


@pytest.mark.parametrize("item", NUMBERS, ids=lambda item: item.name)
def test_both_ends_of_a_range_are_taken_from_every_source(tmp_path: Path, item: Any) -> None:
    within = item.metadata["within"]
    low = {"broker_hot_low_water_bytes": "0"}
    for number in (within.least, within.most // within.step * within.step):
        beside = low if item.name == "broker_hot_high_water_bytes" else {}
        if item.name == "broker_hot_low_water_bytes":
            beside = {"broker_hot_high_water_bytes": str(within.most)}
        (tmp_path / "fabric.toml").write_text(f"{item.name} = {number}\n")
        variable = {f"FABRIC_{item.name.upper()}": str(number)}
        for loaded in (
            settings.load({item.name: str(number), **beside}, {}, tmp_path),
            settings.load(beside, variable, tmp_path),
            settings.load(beside, {}, tmp_path),
        ):
            assert getattr(loaded, item.name) == number


def test_a_low_water_mark_above_the_high_one_is_refused_with_both(tmp_path: Path) -> None:
    flags = {"broker_hot_low_water_bytes": 11, "broker_hot_high_water_bytes": 10}
    with pytest.raises(
        SettingsError, match=r"low_water_bytes is 11; .*high_water_bytes, which is 10"
    ):
        settings.load(flags, {}, tmp_path)


def test_a_path_is_taken_for_every_setting_that_may_hold_one(tmp_path: Path) -> None:
    place = tmp_path / "here"
    names = ("home", "models", "lake", "broker_cold", "tls_ca", "tls_cert", "tls_key")
    loaded = settings.load(dict.fromkeys(names, place), {}, tmp_path)
    assert {str(getattr(loaded, name)) for name in names} == {str(place)}


def test_no_key_of_fabric_toml_is_rounded_or_spelled_out(tmp_path: Path) -> None:
    for line in (
        "lease_ms = 1500.5",
        "attempts_max = true",
        "tenant = 5",
        "home = 5",
        "threads = []",
    ):
        (tmp_path / "fabric.toml").write_text(line + "\n")
        with pytest.raises(SettingsError, match=f"^setting {line.split()[0]} is "):
            settings.load({}, {}, tmp_path)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"FABRIC_THREDS": "1"}, "variable FABRIC_THREDS; did you mean FABRIC_THREADS?"),
        ({"FABRIC_LEASE": "1", "FABRIC_HOMES": ""}, "FABRIC_HOMES, FABRIC_LEASE"),
        ({"FABRIC_DEBUGG": "1"}, "did you mean FABRIC_DEBUG?"),
        ({"FABRIC_XYZZY": "1"}, "; known are FABRIC_ATTEMPTS_MAX, "),
        ({"FABRIC_": "1"}, "variable FABRIC_; known are"),
        ({"FABRIC_UI_PRT": "3000"}, "did you mean FABRIC_UI_PORT?"),
    ],
)
def test_a_variable_that_nothing_reads_is_refused_with_the_nearest_name(
    tmp_path: Path, given: dict[str, str], sentence: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        settings.load({}, given, tmp_path)
    assert sentence in str(refused.value)
    assert str(refused.value).endswith("correct the name or unset it")


def test_variables_that_are_no_settings_and_those_of_a_service_pass(tmp_path: Path) -> None:
    others = dict.fromkeys(settings.OTHER_VARIABLES, "1")
    of_a_service = {
        "FABRIC_SERVICE_HOST": "10.0.0.1",
        "FABRIC_BROKER_SERVICE_PORT_GRPC": "8471",
        "FABRIC_PORT": "tcp://10.0.0.1:8471",
        "FABRIC_BROKER_PORT_8471_TCP_ADDR": "10.0.0.1",
    }
    loaded = settings.load({}, {**others, **of_a_service, "PATH": "/bin"}, tmp_path)
    assert set(loaded.origin.values()) == {"default"}


def test_every_variable_that_the_repository_names_is_a_setting_or_declared() -> None:
    """A name that is read somewhere and declared nowhere would end every command in its shell."""
    known = {f"FABRIC_{item.name.upper()}" for item in KNOWN} | set(settings.OTHER_VARIABLES)
    kinds = ("*.py", "*.md", "*.toml", "*.yaml", "*.sql", "Makefile")
    files = [path for kind in kinds for path in TREE.rglob(kind)] + [TREE / ".ci" / "run"]
    here = {Path(__file__), TREE / "tests" / "unit" / "test_cli.py"}  # wrong names on purpose
    read: dict[str, set[str]] = {}
    for path in files:
        if path not in here and ".git" not in path.relative_to(TREE).parts:
            for name in re.findall(r"FABRIC_[A-Z0-9_]*[A-Z0-9]", path.read_text()):
                read.setdefault(name, set()).add(path.name)
    assert len(read) > 30
    # shown in docs as what Kubernetes sets
    assert sorted(set(read) - known - {"FABRIC_SERVICE_HOST", "FABRIC_PORT"}) == []
    assert sorted(set(settings.OTHER_VARIABLES) - set(read)) == []
