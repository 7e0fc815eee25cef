"""What a running fabric stands on: the folders and the lock that must stay the same files while it runs.

A process goes on writing into a deleted file and would acknowledge what nobody can ever read. So each of these is
known by device and inode from when it was first seen; another file under the same name is a loss as well. What
is to be said about it cannot be said in the home, which is gone: the last words lie in the system's temporary folder.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from fabric_pipelines.supervise.place import Place

HELD = ("journal", "postgres")  # folders of a home that hold what nothing else does
WORDS_BYTES_MAX = 4096


@dataclass(slots=True)
class Ground:
    place: Place
    _seen: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def lost(self) -> Path | None:
        """The first thing that is no longer what it was; what does not exist yet is not missed."""
        home = self.place.home
        held = [home / name for name in HELD]
        for path in (home, self.place.lock_path, *held):
            # an empty folder holds nothing yet: it may be replaced by one that is filled
            found = None if path in held and _is_empty(path) else _identity(path)
            if path in self._seen and found != self._seen[path]:
                return path
            if found is not None:
                self._seen[path] = found
        return None


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _is_empty(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is None
    except OSError:
        return True


def leave_words(place: Place, sentence: str) -> None:
    """For the next `fabric status` or `up`; the folder is shared, so the file must be new and ours alone."""
    with contextlib.suppress(OSError):
        forget_words(place)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        fd = os.open(_words_path(place), flags, 0o600)
        with os.fdopen(fd, "w") as words:
            words.write(sentence)


def last_words(place: Place) -> str:
    """What the last supervisor of this home had to say when it lost its home; "" if nothing."""
    try:
        fd = os.open(_words_path(place), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    with os.fdopen(fd, "rb") as words:
        found = os.fstat(words.fileno())
        ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
        return words.read(WORDS_BYTES_MAX).decode(errors="replace") if ours else ""


def forget_words(place: Place) -> None:
    with contextlib.suppress(OSError):
        _words_path(place).unlink(missing_ok=True)


def _words_path(place: Place) -> Path:
    return Path(tempfile.gettempdir()) / f"fabric-{os.geteuid()}-{place.mark}.words"
