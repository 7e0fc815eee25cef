"""The seam to the real file system makes the system call that it is named for; a simulated disk stands in for it elsewhere."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from fabric_pipelines.folders import OsFolders
from fabric_pipelines.journal.files import OsFileOps


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Every sync that reaches the kernel: which, and of which file."""
    found: list[tuple[str, Any]] = []
    for name in ("fsync", "fdatasync"):
        real = getattr(os, name)

        def spy(fd: int, name: str = name, real: Any = real) -> None:
            real(fd)
            found.append((name, str(Path(f"/proc/self/fd/{fd}").readlink())))

        monkeypatch.setattr(os, name, spy)
    return found


@pytest.mark.parametrize("name", ["fsync", "fdatasync"])
def test_a_sync_of_a_file_reaches_the_kernel(
    tmp_path: Path, called: list[tuple[str, Any]], name: str
) -> None:
    ops = OsFileOps()
    fd = ops.open(tmp_path / "segment", create=True)
    ops.pwritev(fd, [b"content"], 0)
    getattr(ops, name)(fd)
    ops.close(fd)
    assert called == [(name, str(tmp_path / "segment"))]
    with pytest.raises(OSError, match="Bad file descriptor") as fault:
        getattr(ops, name)(fd)
    assert fault.value.errno == errno.EBADF


def test_a_sync_of_a_folder_reaches_the_kernel(
    tmp_path: Path, called: list[tuple[str, Any]]
) -> None:
    OsFolders().fsync_folder(tmp_path)
    assert called == [("fsync", str(tmp_path))]
