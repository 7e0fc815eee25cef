"""The command without services: JSON shapes, exit codes, one sentence an error, and how fast help is."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner, Result

from fabric_pipelines import cli
from fabric_pipelines.dagster_home import write_env_file
from fabric_pipelines.errors import (
    AlreadyRunning,
    ColdLost,
    CorruptionFound,
    DigestMismatch,
    FabricError,
    Interrupted,
    MissingDependency,
    StorageFailed,
    TransientError,
    VersionRefused,
)
from fabric_pipelines.settings import OTHER_VARIABLES, Settings, load
from fabric_pipelines.supervise import doctor, reset

OPERATIONS = Path(__file__).parents[2] / "docs/operations.md"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FABRIC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FABRIC_MODELS", str(tmp_path / "models"))
    return tmp_path / "home"


def fabric(*arguments: str, text: str | None = None) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), input=text)


def answer_of(done: Result) -> dict[str, Any]:
    """The one JSON object on stdout."""
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.output
    answer = json.loads(lines[0])
    assert isinstance(answer, dict)
    return answer


def sentence_of(done: Result) -> str:
    """The one sentence on stderr; on stdout nothing or, with --json, the same as an object; no traceback."""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    if done.stdout:
        error = answer_of(done)["error"]
        assert set(error) == {"kind", "message", "transient", "exit_code"}
        assert (error["message"], error["exit_code"]) == (lines[0], done.exit_code)
    return lines[0]


def commands() -> dict[str, Any]:
    """Every command by its full name, for example "broker verify"."""
    found: dict[str, Any] = {}

    def walk(node: Any, path: tuple[str, ...]) -> None:
        for name, child in getattr(node, "commands", {}).items():
            walk(child, (*path, name))
        if not hasattr(node, "commands"):
            found[" ".join(path)] = node

    walk(get_command(cli.app), ())
    return found


def test_config_show_names_value_and_origin_of_every_setting(home: Path) -> None:
    answer = answer_of(fabric("--set", "lease_ms=1234", "config", "show", "--json"))
    rows = {row["name"]: row for row in answer["settings"]}
    assert (rows["lease_ms"]["value"], rows["lease_ms"]["origin"]) == ("1234", "flag")
    assert (rows["home"]["value"], rows["home"]["origin"]) == (str(home), "environment")
    assert rows["tenant"]["origin"] == "default"


def test_a_flag_beats_the_environment(home: Path, tmp_path: Path) -> None:
    answer = answer_of(fabric("--home", str(tmp_path / "other"), "config", "show", "--json"))
    assert answer["home"] == str(tmp_path / "other")


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--set", "leese_ms=1", "config", "show"], 2, r"no settings \['leese_ms'\]"),
        (["--set", "lease_ms", "config", "show"], 2, "NAME=VALUE"),
        (["--set", "lease_ms=soon", "config", "show"], 2, "whole number"),
        (["broker", "status", "--json"], 1, r"broker\.sock"),
        (["broker", "verify", "--json"], 1, r"broker\.sock"),
        (["db", "status", "--json"], 1, "database|Postgres"),
        (["models", "pull", "nothing"], 2, "nothing"),
        (["submit", "none.txt", "--function", "f", "--engine", "e"], 2, "No such file"),
    ],
)
def test_an_error_is_one_sentence_and_the_exit_code_of_its_class(
    home: Path, arguments: list[str], code: int, sentence: str
) -> None:
    done = fabric(*arguments)
    assert done.exit_code == code, done.output
    assert re.search(sentence, sentence_of(done))


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (
            AlreadyRunning(
                "a supervisor already runs on this home (pid 7): `fabric down` stops it"
            ),
            4,
        ),
        (VersionRefused("the server is Postgres 14; the fabric needs 15 or newer"), 4),
        (DigestMismatch("model.gguf is not the file that was pinned: pull it again"), 4),
        (MissingDependency("tokenizers", "embedded", "tokenising text"), 1),
        (CorruptionFound("journal segment 000003.log is damaged at lsn 17"), 4),
        (ColdLost("object /mnt/cold/1.segment is missing"), 4),
        (StorageFailed("the disk of the journal is full: free some space"), 1),
        (FabricError("no port from 3000 to 3019 is free: set FABRIC_UI_PORT"), 1),
        (Interrupted("nothing was deleted"), 130),
        (OSError(30, "Read-only file system", "settings"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_what_an_owner_raises_comes_out_unchanged(
    home: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException, code: int
) -> None:
    def fail(ctx: typer.Context) -> Settings:
        raise fault

    monkeypatch.setattr(cli, "_settings", fail)
    done = fabric("config", "show", "--json")
    assert done.exit_code == code
    plainly = fabric("config", "show")
    assert (plainly.stdout, plainly.exit_code) == ("", code)
    assert plainly.stderr == done.stderr
    said = sentence_of(done)
    error = answer_of(done)["error"]
    if isinstance(fault, FabricError):
        assert said == str(fault)
        assert error["kind"] == type(fault).__name__
        assert error["transient"] == isinstance(fault, TransientError)
    elif isinstance(fault, OSError):
        assert said.startswith("settings: Read-only file system: make it writable")
    else:
        assert "run the same command again" in said


def test_every_command_with_json_that_fails_says_why_in_json(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its settings cannot be read, or its command line: the first thing that can go wrong is the same for all."""
    monkeypatch.setenv("FABRIC_LEASE_MS", "soon")
    told = {
        name
        for name, command in commands().items()
        if any("--json" in getattr(item, "opts", ()) for item in command.params)
    }
    assert len(told) > 35
    for name in sorted(told):
        done = fabric(*name.split(), "--no-such-option", "--json")
        assert (done.exit_code, answer_of(done)["error"]["kind"]) == (2, "UsageError"), name
        assert answer_of(done)["error"]["message"] == done.stderr.strip()
        assert fabric(*name.split(), "--no-such-option").stdout == "", name
    for name in ("status", "broker verify", "doctor", "db status", "receipt list", "up", "reset"):
        done = fabric(*name.split(), "--json")
        assert (done.exit_code, answer_of(done)["error"]["kind"]) == (2, "SettingsError"), name


def test_what_a_command_found_out_before_it_failed_stands_beside_its_error(home: Path) -> None:
    done = fabric("status", "--json")
    answer = answer_of(done)
    assert (answer["ready"], answer["lanes"]) == (None, [])
    assert (answer["error"]["kind"], answer["error"]["transient"]) == ("BrokerUnavailable", True)
    assert done.exit_code == answer["error"]["exit_code"] == 1


def test_an_error_of_one_call_is_not_told_by_the_next(home: Path) -> None:
    assert "error" in answer_of(fabric("status", "--json"))
    assert "error" not in answer_of(fabric("config", "show", "--json"))
    assert fabric("--set", "lease_ms=soon", "config", "show").stdout == ""


def test_with_fabric_debug_the_trace_is_kept(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FABRIC_DEBUG", "1")
    done = fabric("--set", "lease_ms=soon", "config", "show")
    assert isinstance(done.exception, FabricError)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("no-such-command",), "No such command 'no-such-command': `fabric --help` shows"),
        (("broker", "juggle"), "No such command 'juggle': `fabric broker --help` shows"),
        (("status", "--nope"), "No such option: --nope: `fabric status --help` shows"),
        (
            ("--nope", "status"),
            "No such option: --nope (Possible options: --home): `fabric --help` shows",
        ),
        (("results",), "Missing argument 'FUNCTION': `fabric results --help` shows"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(words: tuple[str, ...], said: str) -> None:
    done = fabric(*words)
    assert done.exit_code == 2
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1


def test_every_reading_command_takes_json() -> None:
    writing = {"down", "worker run", "broker serve"}
    missing = [
        name
        for name, command in commands().items()
        if name not in writing
        and not any("--json" in getattr(item, "opts", ()) for item in command.params)
    ]
    assert missing == []


def test_every_command_and_exit_code_is_in_the_operations_page() -> None:
    page = OPERATIONS.read_text()
    absent = [name for name in commands() if f"`fabric {name}" not in page]
    assert absent == []
    rows = dict(re.findall(r"^\| (\d+) \|[^|]*\|([^|]*)\|[^|]*\|$", page, re.M))
    assert list(rows) == ["0", "1", "2", "3", "4", "5", "130"]
    told = {
        kind: int(code) for code, kinds in rows.items() for kind in re.findall(r"`(\w+)`", kinds)
    }
    kinds, pending = {}, [FabricError]
    while pending:
        cls = pending.pop()
        kinds[cls.__name__] = cls.exit_code
        pending += [sub for sub in cls.__subclasses__() if sub.__module__ == cls.__module__]
    del kinds["StartFailed"]  # ends with the code of what kept the process from coming up
    assert told == kinds


def test_the_settings_table_of_the_operations_page_is_the_settings() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| `(FABRIC_\w+)` \| (.*?) \| (.*?) \| (.*?) \|$",
        OPERATIONS.read_text(),
        re.M,
    )
    wanted = [
        (
            row["name"],
            f"FABRIC_{row['name'].upper()}",
            f"`{row['value']}`" if row["value"] else "",
            row["range"],
            row["doc"],
        )
        for row in Settings().described()
    ]
    assert rows == wanted


def test_the_other_variables_of_the_operations_page_are_those_that_are_let_pass() -> None:
    rows = re.findall(r"^\| `(FABRIC_\w+)` \| (.*?) \|$", OPERATIONS.read_text(), re.M)
    assert rows == list(OTHER_VARIABLES.items())


def test_config_show_names_every_setting_as_it_is_typed(home: Path) -> None:
    lines = fabric("config", "show").stdout.splitlines()
    names = [line.split()[0] for line in lines]
    assert names == [row["name"] for row in Settings().described()]
    for name, value in (("lease_ms", "1234"), ("pg_url", "postgresql://h/d")):
        shown = fabric("--set", f"{name}={value}", "config", "show").stdout
        assert re.search(rf"^{name} +{value}  \(from flag\)$", shown, re.M)


def test_a_misspelt_variable_ends_a_command_with_the_nearest_name(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FABRIC_THREDS", "1")
    done = fabric("config", "show")
    assert done.exit_code == 2
    assert "FABRIC_THREDS; did you mean FABRIC_THREADS?" in sentence_of(done)


def test_doctor_tells_each_check_and_a_remedy_for_each_fault(home: Path) -> None:
    done = fabric("doctor", "--json")
    answer = json.loads(done.stdout)
    checks = {item["check"] for item in answer["findings"]}
    assert {"python", "home", "disk", "packages", "postgres", "port"} <= checks
    assert all(item["fix"] for item in answer["findings"] if item["status"] != "ok")
    assert done.exit_code == (0 if answer["ok"] else 3)


def test_doctor_fails_for_a_python_out_of_range_and_warns_for_models_not_pulled(
    home: Path, tmp_path: Path
) -> None:
    assert doctor.check_python((3, 10)).status == "fail"
    assert doctor.check_python((3, 12)).status == "ok"
    found = list(doctor.check_models(tmp_path / "empty"))
    assert {item.status for item in found} == {"warn"}
    assert all("fabric models pull" in item.fix for item in found)


def test_certificates_for_a_lan_are_made_with_one_command(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "papers"
    made = answer_of(
        fabric("broker", "certificates", "--out", str(folder), "--host", "h", "--json")
    )
    names = {row["name"]: row["names"] for row in made["certificates"]}
    assert names == {
        "ca": [],
        "broker": ["h", "localhost", "127.0.0.1"],
        "consumer": ["fabric://*/consumer"],
        "completion": ["fabric://*/completion"],
        "admin": ["fabric://*/admin"],
        "default-producer": ["fabric://default/producer"],
    }
    again = fabric("broker", "certificates", "--out", str(folder), "--client", "acme/owner")
    assert again.exit_code == 2


def test_models_list_knows_the_catalogue_and_counts_what_is_there(home: Path) -> None:
    answer = answer_of(fabric("models", "list", "--json"))
    rows = {row["name"]: row for row in answer["models"]}
    assert rows["smollm2-135m-instruct"]["parts"] == 0
    assert rows["smollm2-135m-instruct"]["licence"] == "Apache-2.0"


def test_db_url_is_the_embedded_socket_unless_a_server_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fabric("db", "url").stdout.startswith("postgresql://")
    monkeypatch.setenv("FABRIC_PG_URL", "postgresql://u:p@h/d")
    assert answer_of(fabric("db", "url", "--json")) == {"url": "postgresql://u:p@h/d"}


def test_reset_removes_what_the_fabric_made_and_nothing_else(
    home: Path, home_settings: Settings
) -> None:
    for name in ("journal", "lake", "mine"):
        (home / name).mkdir(parents=True)
        (home / name / "file").write_bytes(b"x" * 1000)
    found = reset.contents(Settings(home=home))
    assert (found.size, found.foreign) == (2000, ("mine",))
    reset.remove(found)
    assert [path.name for path in home.iterdir()] == ["mine"]


def test_reset_takes_its_lines_out_of_the_env_file(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    settings = load(environ={"FABRIC_HOME": str(home)}, folder=here)
    (home / "journal").mkdir(parents=True)
    (here / ".env").write_text("TOKEN=abc\n")
    write_env_file(settings, here)
    write_env_file(settings, home.parent)
    answer = answer_of(fabric("reset", "--yes", "--json"))
    assert answer["env"] == [str(here / ".env"), str(home.parent / ".env")]
    assert (here / ".env").read_text() == "TOKEN=abc\n"
    assert not (home.parent / ".env").exists()
    assert answer_of(fabric("reset", "--yes", "--json"))["env"] == []


def test_reset_asks_and_a_no_keeps_everything(home: Path) -> None:
    (home / "journal").mkdir(parents=True)
    (home / "journal" / "segment").write_bytes(b"x" * 3000)
    done = fabric("reset", text="n\n")
    assert done.exit_code == 130
    assert "2.9 KiB" in done.stderr
    assert (home / "journal" / "segment").exists()


def test_help_is_instant_and_loads_no_heavy_package() -> None:
    program = (
        "import sys, time\n"
        "from fabric_pipelines import cli\n"
        "try: cli.app(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'dagster', 'pyarrow', 'numpy', 'psycopg', 'polars'} & set(sys.modules)\n"
        "print(time.process_time(), sorted(heavy), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    seconds, heavy = done.stderr.strip().split(" ", 1)
    assert heavy == "[]"
    assert float(seconds) < 1.0


def _float_options() -> list[tuple[tuple[str, ...], str]]:
    """Every option of every command that takes a number with a fraction: (command, option)."""
    found = []

    def look(command: Any, path: tuple[str, ...]) -> None:
        for name, inner in getattr(command, "commands", {}).items():
            look(inner, (*path, name))
        if not hasattr(command, "commands"):
            hints = get_type_hints(inspect.unwrap(command.callback))
            named = {param.name: param.opts[0] for param in command.params}
            found.extend(
                (path, named[name]) for name, kind in hints.items() if kind in (float, float | None)
            )

    look(get_command(cli.app), ())
    return found


def test_no_option_takes_what_is_no_number_or_has_no_end_or_is_below_nothing() -> None:
    """`fabric receipt stale --wait nan` never came back: nan is below no bound and above none."""
    options = [item for item in _float_options() if item[1] != "--aim"]  # refused by name later
    assert (("receipt", "stale"), "--wait") in options
    for path, option in options:
        for value in ("nan", "inf", "-inf", "-1", "1e400"):
            refused = CliRunner().invoke(cli.app, [*path, option, value])
            assert refused.exit_code == 2, (path, option, value)
            assert f"Invalid value for '{option}'" in re.sub(r"[│\s]+", " ", refused.stderr)


@pytest.mark.parametrize(
    "words", [("receipt", "show"), ("broker", "dead", "accept"), ("submit",), ("--no-such",), ()]
)
def test_an_argument_that_is_no_utf8_is_one_sentence_whatever_the_command(
    home: Path, words: tuple[str, ...]
) -> None:
    done = fabric(*words, "a\udcff", "--json")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert json.loads(done.stdout)["error"]["kind"] == "UsageError"
    assert "'a\\udcff' is not UTF-8" in done.stderr
