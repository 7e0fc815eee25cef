"""A bit that flips in a file which only the next start reads is found while the broker that knows better still runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fabric_pipelines.broker.tiering import Water
from fabric_pipelines.testing.memory_store import MemoryStore
from tests.support_broker_disk import DiskBench
from tests.unit.broker.test_tiering import SEGMENT_BYTES, Later, freeze, run_all, scrub, submit

HOW: dict[str, Callable[[bytes], bytes | None]] = {
    "flipped": lambda good: good[:40] + bytes([good[40] ^ 1]) + good[41:],
    "cut": lambda good: good[:100],
    "deleted": lambda good: None,
}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[DiskBench]:
    made = DiskBench(
        folder=tmp_path / "journal",
        segment_bytes=SEGMENT_BYTES,
        store=MemoryStore(),
        water=Water(0, 0),
        porter=Later(),
    )
    yield made
    made.close()


def spoil(path: Path, how: str) -> bytes:
    good = path.read_bytes()
    bad = HOW[how](good)
    path.unlink()
    if bad is not None:
        path.write_bytes(bad)
    return good


def verified(bench: DiskBench) -> Any:
    return bench.owner.verify()


@pytest.mark.parametrize("look", [scrub, verified])
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("identity.json", "flipped"),
        ("identity.json", "cut"),
        ("identity.json", "deleted"),
        ("epoch-*.cold", "flipped"),  # one that is deleted ends the broker at once (test_watch)
        ("epoch-*.cold", "cut"),
    ],
)
def test_identity_and_stubs_are_named_and_written_again_by_whoever_looks(
    bench: DiskBench, name: str, how: str, look: Callable[[DiskBench], Any]
) -> None:
    away = submit(bench, 1)
    freeze(bench)
    path = min(bench.folder.glob(name))
    good = spoil(path, how)
    report = look(bench)
    (frame,) = report.damaged
    assert not report.ok
    assert frame.sentence.startswith(f"{path} is ")
    assert "the broker that runs knew its content and has written it again" in frame.sentence
    assert path.read_bytes() == good
    assert bench.owner.core.fault == ""
    assert look(bench).ok
    bench.crash()
    assert sorted(run_all(bench)) == away


@pytest.mark.parametrize("look", [scrub, verified])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("which", ["newest", "older"])
def test_a_damaged_checkpoint_is_named_and_another_one_taken(
    bench: DiskBench, which: str, how: str, look: Callable[[DiskBench], Any]
) -> None:
    tasks = submit(bench, 1)
    freeze(bench)
    upkeep = bench.owner.upkeep
    assert upkeep is not None
    fact = getattr(upkeep, which)
    path = bench.folder / f"checkpoint-{fact.lsn:016d}"
    spoil(path, how)
    report = look(bench)
    (frame,) = report.damaged
    assert not report.ok
    assert frame.sentence.startswith(f"{path} is ")
    assert "takes a new checkpoint, from which the next start goes" in frame.sentence
    bench.settle(4)
    assert upkeep.newest is not None
    assert upkeep.newest.lsn > fact.lsn
    assert bench.owner.core.fault == ""
    look(bench)
    bench.settle(4)
    assert look(bench).ok, "the damaged one is not kept as a spare either"
    bench.crash()
    assert bench.owner.restored.ignored == []
    assert sorted(run_all(bench)) == tasks
