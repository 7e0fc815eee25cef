"""What waits is told with its reason and since when, also on a full disk; what was killed waits for nothing."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fabric_pipelines import answers, waits
from fabric_pipelines.waits import BLOCK_BYTES, REASON_CHARACTERS_MAX, Wait, Waits


def test_a_wait_begins_keeps_its_start_through_other_reasons_and_ends(tmp_path: Path) -> None:
    moments = iter([100.0, 200.0])
    with Waits(tmp_path, "completion", now_s=lambda: next(moments)) as mine:
        assert waits.read(tmp_path) == []
        for reason in ("no Postgres answers", "no Postgres answers", "the disk is full"):
            mine.tell(reason)
            assert waits.read(tmp_path) == [Wait("completion", os.getpid(), reason, 100.0)]
        mine.tell("")
        assert waits.read(tmp_path) == []
        mine.tell("again")
        assert [wait.since_s for wait in waits.read(tmp_path)] == [200.0]
    assert list(tmp_path.iterdir()) == []


def test_a_reason_of_any_length_and_alphabet_fits_its_block(tmp_path: Path) -> None:
    with Waits(tmp_path, "ein/Wärter") as mine:
        mine.tell("\U0001f4a5\u2028" * REASON_CHARACTERS_MAX)
        [file] = tmp_path.iterdir()
        [wait] = waits.read(tmp_path)
        assert file.stat().st_size == BLOCK_BYTES
        assert len(wait.reason) == REASON_CHARACTERS_MAX


def test_a_full_disk_takes_the_reason_into_the_block_it_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Waits(tmp_path, "completion") as mine:
        [file] = tmp_path.iterdir()
        before = (file.stat().st_ino, file.stat().st_blocks)

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "open", full)
        mine.tell("no space left")
        monkeypatch.undo()
        assert [wait.reason for wait in waits.read(tmp_path)] == ["no space left"]
        assert (file.stat().st_ino, file.stat().st_blocks) == before


def test_a_folder_that_takes_no_file_is_said_once_and_stops_nothing(tmp_path: Path) -> None:
    lines: list[str] = []
    with Waits(tmp_path / "gone" / "waits", "completion", say=lines.append) as mine:
        mine.tell("something")
    [line] = lines
    assert "cannot be written (No such file or directory); the work goes on" in line
    assert waits.read(tmp_path / "gone" / "waits") == []
    assert not (tmp_path / "gone").exists()


def test_a_block_read_while_it_is_written_is_not_believed(tmp_path: Path) -> None:
    with Waits(tmp_path, "completion") as mine:
        mine.tell("no Postgres answers")
        [file] = tmp_path.iterdir()
        whole = file.read_bytes()
        with file.open("r+b") as torn:
            torn.write(whole[:40].replace(b"completion", b"c0mpletion"))
        assert waits.read(tmp_path) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from fabric_pipelines.waits import Waits
with Waits(Path(sys.argv[1]), "killed") as waits:
    waits.tell("something")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_not_shown_and_the_next_one_sweeps_it(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    [left] = tmp_path.iterdir()
    assert b"something" in left.read_bytes()
    assert waits.read(tmp_path) == []
    with Waits(tmp_path, "next") as mine:
        mine.tell("else")
        assert [wait.name for wait in waits.read(tmp_path)] == ["next"]
        assert not left.exists()


def test_a_row_goes_by_the_supervisors_name_and_says_how_long() -> None:
    rows = answers.waiting(
        [Wait("m@r on cpu:0", 7, "no broker", 1_000.0), Wait("completion", 8, "full", 1_130.5)],
        [{"pid": 7, "name": "worker-0"}],
        now_s=1_165.5,
    )
    assert json.loads(json.dumps(rows)) == [
        {"name": "worker-0", "pid": 7, "for": "no broker", "since": "1970-01-01T00:16:40+00:00", "seconds": 165.5},
        {"name": "completion", "pid": 8, "for": "full", "since": "1970-01-01T00:18:50+00:00", "seconds": 35.0},
    ]  # fmt: skip
    assert answers.waits_for_a_person(rows) == {
        "worker-0 (7)": "for 2:45 min, since 1970-01-01T00:16:40+00:00: no broker",
        "completion (8)": "for 0:35 min, since 1970-01-01T00:18:50+00:00: full",
    }
    assert answers.waits_for_a_person([]) == "none"
