"""A broker whose files go away under it ends with one sentence: it acknowledges nothing that no restart finds."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fabric_pipelines import settings
from fabric_pipelines.errors import (
    BrokerUnavailable,
    FabricError,
    HomeGone,
    StorageFailed,
    from_line,
)
from fabric_pipelines.journal import OsFileOps
from fabric_pipelines.journal.identity import read_identity
from tests.support_broker import submission_of, tasks_of
from tests.support_broker_process import Broker

SEGMENT_BYTES = 1 << 16


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    flags = {"home": tmp_path / "home", "segment_bytes": SEGMENT_BYTES}
    made = Broker(settings.load(flags, {}, tmp_path))
    made.start()
    yield made
    if made.process is not None:
        made.kill()


def submit(broker: Broker, mark: int, batches: int = 1) -> int:
    made = [tasks_of([60] * 20, seed=100 * mark + at) for at in range(batches)]
    with broker.client("producer") as client:
        return client.submit(submission_of(made, mark), made).enqueued


def move(path: Path) -> None:
    path.rename(path.with_suffix(".aside"))


def replace(path: Path) -> None:
    shutil.copyfile(path, path.with_suffix(".copy"))
    path.with_suffix(".copy").rename(path)


def cut(path: Path) -> None:
    os.truncate(path, 8192)


HOW: dict[str, tuple[Callable[[Path], None], str]] = {
    "deleted": (Path.unlink, "was deleted while"),
    "cut": (cut, rf"was cut short to \d+ of its {SEGMENT_BYTES} bytes while"),
    "replaced": (replace, "was replaced by another while"),
    "moved": (move, "was moved or deleted while"),
}


def ended(broker: Broker) -> str:
    """What the broker said as it ended, by itself."""
    assert broker.process is not None
    _, errors = broker.process.communicate(timeout=30)
    assert broker.process.returncode == HomeGone.exit_code == 4
    broker.process = None
    (line,) = errors.splitlines()
    kind, sentence = from_line(line) or (None, "")
    assert kind is HomeGone
    return sentence


@pytest.mark.parametrize("which", ["sealed", "active"])
@pytest.mark.parametrize("how", HOW)
def test_a_segment_that_goes_away_under_an_idle_broker_ends_it(
    broker: Broker, how: str, which: str
) -> None:
    assert submit(broker, 1, batches=12) == 240
    paths = sorted(broker.settings.journal_dir.glob("*.segment"))
    sealed = sorted(
        path.with_suffix(".segment") for path in broker.settings.journal_dir.glob("*.index")
    )
    path = sealed[0] if which == "sealed" else paths[len(sealed)]
    act, word = HOW[how]
    act(path)
    sentence = ended(broker)
    assert re.match(f"{re.escape(str(path))} {word}", sentence)
    assert "which are acknowledged, lie in it" in sentence
    assert "put the file back or restore it from a copy" in sentence
    if how == "moved":
        path.with_suffix(".aside").rename(path)
        broker.start()
        with broker.client("admin") as client:
            assert client.status().total.ready.tasks == 240
            assert client.verify().ok


@pytest.mark.parametrize("how", ["deleted", "cut"])
def test_not_one_task_more_is_acknowledged_into_a_deleted_or_cut_file(
    broker: Broker, how: str
) -> None:
    submit(broker, 1)
    path = min(  # those behind it are held for what is promised
        path
        for path in broker.settings.journal_dir.glob("*.segment")
        if not path.with_suffix(".index").exists()
    )
    with broker.client("admin") as client:
        durable = client.status().journal["durable_lsn"]
    HOW[how][0](path)
    with pytest.raises(FabricError) as told:
        submit(broker, 2)
    assert isinstance(told.value, StorageFailed | BrokerUnavailable | HomeGone)
    sentence = ended(broker)
    (last,) = re.findall(r"LSN \d+\.\.(\d+), which are acknowledged", sentence)
    assert int(last) <= durable + 1, "but for a mark that the broker makes by itself"
    assert read_identity(OsFileOps(), broker.settings.journal_dir) is not None


@pytest.mark.parametrize("ask", ["verify", "scrub"])
def test_whoever_asks_for_verify_or_scrub_is_not_told_that_all_is_well(
    broker: Broker, ask: str
) -> None:
    submit(broker, 1, batches=12)
    path = min(broker.settings.journal_dir.glob("*.segment"))
    with broker.client("admin") as client:
        move(path)
        with pytest.raises(FabricError) as told:
            getattr(client, ask)()
    assert isinstance(told.value, StorageFailed | BrokerUnavailable | HomeGone)
    assert ended(broker).startswith(f"{path} was moved or deleted")
