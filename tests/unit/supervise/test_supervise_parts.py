"""The parts of the supervisor that need no process."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from pathlib import Path

import pytest

from fabric_pipelines.errors import StartFailed, UsageError
from fabric_pipelines.settings import load
from fabric_pipelines.supervise import DEFAULT_ENGINES, Backoff, ProcessSpec, Ready, child
from fabric_pipelines.supervise.child import http_answers, last_lines, rotate
from fabric_pipelines.supervise.spec import levels
from fabric_pipelines.supervise.table import free_port, process_table


def spec(name: str, *depends_on: str) -> ProcessSpec:
    return ProcessSpec(name, ("true",), depends_on=depends_on)


def test_levels_put_everything_behind_what_it_needs() -> None:
    table = [spec("ui", "broker"), spec("broker", "store"), spec("store"), spec("worker", "broker")]
    assert levels(table) == [["store"], ["broker"], ["ui", "worker"]]


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ([spec("a"), spec("a")], "not unique"),
        ([spec("a", "b")], "unknown"),
        ([spec("a", "b"), spec("b", "a")], "wait for each other"),
        ([spec("../a")], "cannot name a log file"),
    ],
)
def test_an_impossible_table_is_refused(table: list[ProcessSpec], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        levels(table)


def test_a_spec_survives_json() -> None:
    made = ProcessSpec(
        "a", ("x", "y"), Ready("r"), ("b",), {"K": "v"}, Backoff(0.5, 3.0, 9.0), 2, 1.0, 2.0, 7
    )
    assert ProcessSpec.from_json(json.loads(json.dumps(made.as_json()))) == made


def test_backoff_doubles_up_to_its_bound() -> None:
    backoff = Backoff(first_s=0.1, most_s=1.0)
    assert [backoff.wait_s(crashes) for crashes in (1, 2, 3, 4, 5, 5000)] == [
        0.1,
        0.2,
        0.4,
        0.8,
        1.0,
        1.0,
    ]


def test_a_large_log_is_rotated_at_the_start_and_three_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "LOG_BYTES_MAX", 4)
    log = tmp_path / "a.log"
    for content in ("first", "second", "third", "fourth", "tiny"[:3]):
        log.write_text(content)
        rotate(log)
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"a.log": "tin", "a.log.1": "fourth", "a.log.2": "third", "a.log.3": "second"}


def test_last_lines_are_those_of_the_last_start(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("--- one\nold\n--- two\nnew\nnewer\n")
    assert last_lines(log) == "new\nnewer"
    assert last_lines(log, 1) == "newer"


def test_a_taken_port_is_passed_over_and_none_free_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_port("127.0.0.1", port) > port
        monkeypatch.setattr("fabric_pipelines.supervise.table.PORTS_TRIED", 1)
        with pytest.raises(StartFailed, match=r"no free port .*FABRIC_UI_PORT"):
            free_port("127.0.0.1", port)


def test_a_url_answers_only_with_status_200() -> None:
    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/up" else 503)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        base = f"http://127.0.0.1:{server.server_port}"
        assert http_answers(f"{base}/up")
        assert not http_answers(f"{base}/starting")
        server.shutdown()
        thread.join(timeout=60)
    assert not http_answers(f"{base}/up")


def test_the_table_has_every_organ_and_no_postgres_where_a_server_is_given(tmp_path: Path) -> None:
    settings = load({"home": tmp_path}, environ={}, folder=tmp_path)
    table, url = process_table(settings, ui=True, engines=DEFAULT_ENGINES)
    assert [item.name for item in table] == [
        "postgres",
        "broker",
        "completion",
        "worker-0",
        "worker-1",
        "worker-2",
        "dagster-webserver",
        "dagster-daemon",
    ]
    assert url.startswith("http://127.0.0.1:")
    assert (settings.dagster_home / "dagster.yaml").exists()
    given = load({"home": tmp_path, "pg_url": "postgresql://h/d"}, environ={}, folder=tmp_path)
    table, url = process_table(given, ui=False, engines=())
    assert ([item.name for item in table], url) == (["broker", "completion"], "")
    assert len(levels(table)) == 2


def test_default_engines_are_those_of_the_registry() -> None:
    from fabric_pipelines.worker.engines.registry import ENGINES

    assert tuple(ENGINES) == DEFAULT_ENGINES
