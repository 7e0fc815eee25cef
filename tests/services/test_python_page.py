"""docs/python.md does what it says: its examples run in order against real broker, completion and Postgres.

The engines are scripted under the catalogue's names and the tokeniser is a stand-in, so no model file is needed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fabric_pipelines.api import Fabric
from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.errors import BrokerUnavailable
from fabric_pipelines.settings import Settings, load
from fabric_pipelines.testing.word_tokeniser import WordTokeniser
from tests.support import eventually

PAGE = Path(__file__).parents[2] / "docs/python.md"
ENGINES = [
    {"name": "all-minilm-l6-v2@onnxruntime-fp32", "kind": "embed", "dim": 384, "device": "cpu:0"},
    {"name": "smollm2-135m-instruct@ctranslate2-int8", "kind": "generate", "device": "cpu:1"},
    {
        "name": "smollm2-135m-instruct@onnxruntime-fp32",
        "kind": "hidden",
        "dim": 576,
        "device": "cpu:2",
    },
]
PROCESSES = [
    ["fabric_pipelines.broker"],
    ["fabric_pipelines.completion"],
    *(["fabric_pipelines.testing.scripted_worker", json.dumps(engine)] for engine in ENGINES),
]


@pytest.fixture
def running(database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """A home with everything but the models, as the environment of this process."""
    folder = Path(tempfile.mkdtemp(prefix="fabric-d-"))
    settings = load(
        {"home": folder, "segment_bytes": 1 << 20, "pg_url": database.url, "models": folder / "m"},
        {},
        folder,
    )
    for name, value in settings.as_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("fabric_pipelines.models.tokeniser", lambda *_: WordTokeniser())
    log = (folder / "log").open("wb")
    started = []
    try:
        for arguments in PROCESSES:
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", *arguments], env=dict(os.environ), stdout=log, stderr=log
                )
            )
            if len(started) == 1:
                eventually(lambda: _answers(settings), within_s=20, what="the broker answers")
        yield settings
        assert [process.poll() for process in started] == [None] * len(started), (
            folder / "log"
        ).read_text()
    finally:
        for process in started:
            process.kill()
            process.wait()
        log.close()
        shutil.rmtree(folder)


def _answers(settings: Settings) -> bool:
    try:
        with BrokerClient(settings.broker_endpoint, role="admin") as client:
            client.hello()
    except BrokerUnavailable:
        return False
    return True


def test_every_example_of_the_page_runs_in_order(running: Settings) -> None:
    examples = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert len(examples) >= 7
    names: dict[str, object] = {}
    for number, example in enumerate(examples, 1):
        exec(compile(example, f"{PAGE.name}, example {number}", "exec"), names)
    fabric = names["fabric"]
    assert isinstance(fabric, Fabric)
    assert fabric.settings.home == running.home
    assert fabric.results("hidden_states").num_rows == 2
