"""A file that a user named appears whole, under a name that was free, and what a killed writer left goes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fabric_pipelines import named_file
from fabric_pipelines.errors import StorageFailed, UsageError


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_that_appears_meanwhile_stays_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "x"

    def write() -> None:
        with named_file.beside(path) as made:
            made.write_text("ours")
            path.write_text("theirs")

    with pytest.raises(UsageError, match="there already"):
        write()
    assert (path.read_text(), _names(tmp_path)) == ("theirs", ["x"])


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_of_two_that_write_one_name_at_once_one_wins_and_the_other_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "x"
    first, second = named_file.beside(path), named_file.beside(path)
    one, two = first.__enter__(), second.__enter__()
    one.write_text("first")
    two.write_text("second")
    assert one != two
    second.__exit__(None, None, None)
    with pytest.raises(UsageError, match="--replace"):
        first.__exit__(None, None, None)
    assert (path.read_text(), _names(tmp_path)) == ("second", ["x"])


def test_a_file_that_is_there_is_replaced_on_purpose_only(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    with pytest.raises(UsageError, match="there already"):
        named_file.beside(path).__enter__()
    with named_file.beside(path, replace=True) as made:
        made.write_text("new")
        assert path.read_text() == "old"
    assert (path.read_text(), _names(tmp_path)) == ("new", ["x"])


def test_what_a_killed_writer_left_goes_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    killed = (
        "import os, sys; from pathlib import Path; from fabric_pipelines import named_file\n"
        "named_file.beside(Path(sys.argv[1])).__enter__().write_text('half'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", killed, str(tmp_path / "x")], check=False)
    (left,) = _names(tmp_path)
    with named_file.beside(tmp_path / "y") as living, named_file.beside(tmp_path / "x") as made:
        assert sorted([living.name, made.name]) == _names(tmp_path)
    assert left not in _names(tmp_path)
    assert _names(tmp_path) == ["x", "y"]


def test_a_folder_that_takes_no_file_and_a_name_that_no_file_has_are_one_sentence(
    tmp_path: Path,
) -> None:
    for path in (tmp_path / "missing" / "x", tmp_path / ("n" * 300)):
        with pytest.raises(StorageFailed, match="cannot be written"), named_file.beside(path):
            pass
    assert _names(tmp_path) == []
