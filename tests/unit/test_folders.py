"""Every level above a folder is synced on a real disk, whoever made it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fabric_pipelines import settings
from fabric_pipelines.folders import OS_FOLDERS, FolderOps, OsFolders, make_folders, published
from fabric_pipelines.journal import OsFileOps
from fabric_pipelines.supervise.place import Place


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders that the kernel was asked to sync."""
    found: list[Path] = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: found.append(Path(f"/proc/self/fd/{fd}").readlink())
    )
    return found


def way(folder: Path) -> list[Path]:
    """Every parent on the same mount."""
    above = [folder, *folder.parents]
    mount = next(at for at, level in enumerate(above) if level.is_mount())
    return above[1 : mount + 1]


@pytest.mark.parametrize("ops", [OS_FOLDERS, OsFileOps()], ids=["fabric", "journal"])
@pytest.mark.parametrize("found", ["", "home", "home/broker/journal"])
def test_every_level_is_synced_whether_it_was_made_now_or_found(
    tmp_path: Path, synced: list[Path], ops: FolderOps, found: str
) -> None:
    (tmp_path / found).mkdir(parents=True, exist_ok=True)
    folder = tmp_path / "home" / "broker" / "journal"
    make_folders(folder, ops)
    assert folder.is_dir()
    assert synced == way(folder)
    assert len(synced) >= 3


def test_the_way_leads_through_what_a_link_stands_for(tmp_path: Path, synced: list[Path]) -> None:
    (tmp_path / "disk" / "fabric").mkdir(parents=True)
    (tmp_path / "home").symlink_to(tmp_path / "disk" / "fabric")
    make_folders(tmp_path / "home" / "journal")
    assert synced[:3] == [tmp_path / "disk" / "fabric", tmp_path / "disk", tmp_path]


class Closed(OsFolders):
    """A folder that may not be opened; it can be asked even by root."""

    def __init__(self, closed: Path) -> None:
        self.closed = closed

    def _opened(self, folder: Path) -> int:
        if folder == self.closed:
            raise PermissionError(13, "Permission denied", str(folder))
        return super()._opened(folder)


def test_a_folder_of_others_that_may_not_be_opened_is_passed_over(
    tmp_path: Path, synced: list[Path]
) -> None:
    folder = tmp_path / "theirs" / "home" / "journal"
    folder.parent.mkdir(parents=True)
    make_folders(folder, Closed(tmp_path / "theirs"))
    assert synced == [path for path in way(folder) if path != tmp_path / "theirs"]


def test_an_entry_of_ours_that_cannot_be_made_durable_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PermissionError, match=str(tmp_path)):
        make_folders(tmp_path / "home" / "journal", Closed(tmp_path))


def test_a_file_in_the_place_of_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    with pytest.raises(FileExistsError):
        make_folders(tmp_path / "home")


def test_the_home_that_a_supervisor_makes_outlives_a_power_cut(
    tmp_path: Path, synced: list[Path]
) -> None:
    home = tmp_path / "new" / "home"
    place = Place.of(settings.load({"home": home}, {}, tmp_path))
    place.make()
    for made in (home, place.runtime_dir, place.log_dir):
        assert made.is_dir()
        assert set(way(made)) <= set(synced)


def _made(target: Path, content: str, fails: bool = False) -> None:
    with published(target) as folder:
        (folder / "file").write_text(content)
        if fails:
            raise ValueError("at the end")


def test_a_published_folder_takes_the_place_of_what_was_there_or_leaves_it(tmp_path: Path) -> None:
    target = tmp_path / "part"
    _made(target, "first")
    with pytest.raises(ValueError, match="at the end"):
        _made(target, "second", fails=True)
    assert (target / "file").read_text() == "first"
    _made(target, "third")
    assert (target / "file").read_text() == "third"
    assert [path.name for path in tmp_path.iterdir()] == ["part"], "nothing is left beside"


def test_a_published_folder_outlives_a_power_cut(tmp_path: Path, synced: list[Path]) -> None:
    with published(tmp_path / "model") as folder:
        (folder / "weights").write_bytes(b"w")
        assert tmp_path not in synced
    assert synced[-1] == tmp_path, "the new name is an entry of the folder above"


def test_a_folder_that_cannot_take_the_place_gives_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "part"
    _made(target, "first")
    real = Path.rename

    def rename(self: Path, to: Path) -> Path:
        if to == target and not self.name.endswith("-old"):
            raise OSError("not now")
        return real(self, to)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="not now"):
        _made(target, "second")
    assert (target / "file").read_text() == "first"
