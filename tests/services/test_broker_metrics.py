"""The broker's counters, as a scraper of another process reads them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fabric_pipelines import settings
from fabric_pipelines.broker.exporter import HELP
from fabric_pipelines.errors import SchemaError, WrongRole
from fabric_pipelines.supervise.table import free_port
from tests.support_broker import LANDED, completions, ids_of, submission_of, tasks_of
from tests.support_broker_process import Broker, attach

OPERATIONS = Path(__file__).parents[2] / "docs/operations.md"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    flags = {"home": tmp_path / "home", "metrics_port": free_port("127.0.0.1", 19_471)}
    made = Broker(settings.load(flags, {}, tmp_path))
    made.start()
    yield made
    if made.process is not None:
        made.kill()


def scraped(broker: Broker) -> dict[tuple[str, str], float]:
    """(name, label) to value. Fails on a type or format that is not what it says."""
    url = f"http://127.0.0.1:{broker.settings.metrics_port}/metrics"
    with urlopen(url, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            found[sample.name.removeprefix("fabric_broker_"), "".join(sample.labels.values())] = (
                sample.value
            )
    return found


def test_the_ledger_and_what_was_refused_are_scraped_as_they_are(broker: Broker) -> None:
    batches = [tasks_of([20] * 10)]
    with (
        broker.client("producer") as producer,
        broker.client("worker") as worker,
        broker.client("completion") as completion,
    ):
        producer.submit(submission_of(batches), batches)
        with pytest.raises(SchemaError):
            producer.submit(submission_of(batches, 1, vocab_size=2), batches)
        with pytest.raises(WrongRole):
            worker.retire([1], LANDED)
        attach(worker)
        lease = worker.lease(sequences=6, tokens=1 << 20, kv_tokens=None)
        assert lease is not None
        worker.computed(completions(ids_of(lease)[:4]))
        rows = completion.pull_computed(rows=3)
        completion.retire(rows.column("task_id"), LANDED)
        found = scraped(broker)
    tasks = {state: int(value) for (name, state), value in found.items() if name == "tasks"}
    assert tasks == {
        "ready": 4, "leased": 2, "computed": 1, "in_doubt": 0, "retired": 3, "dead": 0
    }  # fmt: skip
    assert found["tokens", "ready"] == 80
    assert found["enqueued_total", ""] == sum(tasks.values()) == 10
    assert (found["leases_total", ""], found["leased_tasks_total", ""]) == (1, 6)
    assert (found["consumers", ""], found["consumers_leased_tasks", ""]) == (1, 2)
    assert found["refusals_total", "SchemaError"] == 1
    assert found["refusals_total", "WrongRole"] == 1
    assert found["fsyncs_total", ""] >= 3
    assert 0 < found["journal_bytes", ""] < found["journal_high_water_bytes", ""]
    assert (found["balance_tasks", ""], found["fault", ""], found["up", ""]) == (0, 0, 1)
    assert found["upload_bytes", ""] == 0


def test_every_metric_is_on_the_operations_page(broker: Broker) -> None:
    """Counters of upkeep come and go with it; those that say how work passes are named one by one."""
    page, found = OPERATIONS.read_text(), {name for name, _ in scraped(broker)}
    named = {name for name in found if not name.endswith("_total")} | {
        f"{name}_total" for name in HELP
    }
    assert named - found == set()
    assert [name for name in sorted(named) if f"`{name}" not in page] == []


def test_counters_are_served_on_loopback_only_and_end_with_the_broker(broker: Broker) -> None:
    port = broker.settings.metrics_port
    others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), port)} - {"127.0.0.1"}
    for address in others:
        with pytest.raises(OSError, match=r"refused|unreachable"):
            socket.create_connection((address, port), timeout=2)
    assert broker.end(signal.SIGTERM) == (0, "")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=2)


def test_serve_says_that_it_is_ready_in_one_object(tmp_path: Path) -> None:
    found = settings.load({"home": tmp_path / "home"}, {}, tmp_path)
    serving = subprocess.Popen(
        [sys.executable, "-m", "fabric_pipelines", "broker", "serve", "--json"],
        env={**os.environ, **found.as_environment()},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert serving.stdout is not None
    said = json.loads(serving.stdout.readline())
    serving.send_signal(signal.SIGTERM)
    assert serving.wait(60) == 0
    assert serving.stdout.read() == ""
    serving.stdout.close()
    assert (said["ready"], said["pid"], said["tasks"]) == ([found.broker_endpoint], serving.pid, 0)


def test_a_taken_port_is_one_sentence(broker: Broker, tmp_path: Path) -> None:
    flags = {"home": tmp_path / "second", "metrics_port": broker.settings.metrics_port}
    done = subprocess.run(
        [sys.executable, "-m", "fabric_pipelines", "broker", "serve"],
        env={**os.environ, **settings.load(flags, {}, tmp_path).as_environment()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "FABRIC_METRICS_PORT" in done.stderr
