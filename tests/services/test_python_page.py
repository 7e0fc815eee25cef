"""docs/python.md does what it says: its examples run in order against real broker, completion and Postgres.

The engines are scripted under the catalogue's names and the tokeniser is a stand-in, so no model file is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fabric_pipelines.api import Fabric
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.settings import Settings
from fabric_pipelines.testing.word_tokeniser import WordTokeniser
from tests.support_stage import stage

PAGE = Path(__file__).parents[2] / "docs/python.md"
ENGINES: list[dict[str, Any]] = [
    {"name": "all-minilm-l6-v2@onnxruntime-fp32", "kind": "embed", "dim": 384, "device": "cpu:0"},
    {"name": "smollm2-135m-instruct@ctranslate2-int8", "kind": "generate", "device": "cpu:1"},
    {
        "name": "smollm2-135m-instruct@onnxruntime-fp32",
        "kind": "hidden",
        "dim": 576,
        "device": "cpu:2",
    },
]


@pytest.fixture
def running(database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """A home with everything but the models, as the environment of this process."""
    with stage(pg_url=database.url) as on:
        for name, value in on.settings.as_environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("fabric_pipelines.models.tokeniser", lambda *_: WordTokeniser())
        on.spawn("fabric_pipelines.completion")
        for engine in ENGINES:
            on.start_worker(**engine)
        yield on.settings


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
