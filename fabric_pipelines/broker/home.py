"""Home: whether the journal that a running broker writes is still the one that its path names.

A process goes on writing into a folder that was moved or deleted, and would acknowledge what nobody finds again. So
folder and lock are known by device and inode from the start on; another one under the same name is a loss as well.
"""

from __future__ import annotations

from pathlib import Path

from fabric_pipelines.errors import HomeGone
from fabric_pipelines.journal.faults import LOCK

Identity = tuple[int, int] | None


class Home:
    """Made while the journal in `folder` is held."""

    def __init__(self, folder: Path) -> None:
        self._seen = {path: _identity(path) for path in (folder, folder / LOCK)}

    def lost(self) -> HomeGone | None:
        """Why nothing more may be acknowledged; None as long as all is well."""
        for path, seen in self._seen.items():
            found = _identity(path)
            if found != seen:
                how = "moved or deleted" if found is None else "replaced by another"
                return HomeGone(
                    f"{path} was {how} while the broker ran, so it stopped: put the folder back (what was "
                    "acknowledged is in it), then start the broker again"
                )
        return None


def _identity(path: Path) -> Identity:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
