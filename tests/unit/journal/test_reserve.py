"""A journal goes on while everything else of its process has used up the descriptors."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from fabric_pipelines.journal import Journal, files

SEGMENT_BYTES = 8 * 4096


@pytest.fixture
def hoard() -> Iterator[list[int]]:
    """Descriptors of others, up to a limit that is near; given back at the end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 64, hard))
    held: list[int] = []
    yield held
    for fd in held:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def take_all(held: list[int]) -> None:
    while True:
        try:
            held.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            return


def test_segments_roll_while_no_descriptor_is_left_to_others(
    tmp_path: Path, hoard: list[int]
) -> None:
    before, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Journal.open(tmp_path, segment_bytes=SEGMENT_BYTES) as journal:
        take_all(hoard)
        for n in range(200):
            journal.append(7, bytes([n]) * 3000, rows=1, time_us=n)
            journal.commit()
            take_all(hoard)
        assert len(journal.holdings) >= 20, "more than any reserve that is kept open"
        found = [bytes(journal.view(lsn)[0].payload[:1])[0] for lsn in range(1, 201)]
        assert found == list(range(200)), "each of them mapped, too"
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before, "the limit is as it was"
        for fd in hoard:
            os.close(fd)
        hoard.clear()


def test_where_the_limit_cannot_be_lifted_a_few_descriptors_are_kept(
    tmp_path: Path, hoard: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_limit_lifted", nullcontext)
    with Journal.open(tmp_path, segment_bytes=SEGMENT_BYTES) as journal:
        take_all(hoard)
        for n in range(30):
            journal.append(7, bytes([n]) * 3000, rows=1, time_us=n)
            journal.commit()
            take_all(hoard)
        for fd in hoard:
            os.close(fd)
        hoard.clear()
        assert len(list(tmp_path.glob("*.segment"))) >= 3
        assert [bytes(frame.payload)[0] for frame in journal.replay()] == list(range(30))
