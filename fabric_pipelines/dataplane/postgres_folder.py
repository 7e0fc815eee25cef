"""Postgres data folder: made once by initdb, beside and then renamed, owned by the server's own user.

Also the small program through which root becomes that user. Refuses to work without a user to drop to.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fabric_pipelines.dataplane.postgres_binaries import PostgresBinaries, make_folder
from fabric_pipelines.errors import SettingsError, StorageFailed

SUPERUSER = "postgres"
SERVER_UID = 65531
"""Owner of data folders made by root: in the range 65520-65533, which no distribution hands out, so nothing
else on the machine runs as it. It needs no passwd entry."""

FULL = re.compile(
    # a write that was cut short is how the last bytes of a disk are met
    r"No space left on device|Disk quota exceeded|wrote only \d+ of \d+ bytes"
)
WRONG = re.compile(r"(?:FATAL|PANIC|error): +(.*)")

Say = Callable[[str], None]


def initialise(data: Path, binaries: PostgresBinaries, *, durable: bool, say: Say) -> None:
    """initdb beside, then rename: a folder that exists is complete."""
    say(f"making the data folder of Postgres {binaries.version}")
    login = _initdb_user()
    make_folder(data.parent)
    with _beside(data) as fresh:
        inner = fresh / "data"
        inner.mkdir(mode=0o700)
        _give(fresh, login.pw_uid)
        _run_initdb(binaries, inner, durable=durable)
        if os.geteuid() == 0:
            _give(inner, SERVER_UID)
        if data.is_dir():
            data.rmdir()
        inner.rename(data)


@contextmanager
def _beside(data: Path) -> Iterator[Path]:
    for left in data.parent.glob(f".{data.name}-new-*"):
        shutil.rmtree(left)  # of a start that was killed; the lock is ours
    fresh = Path(tempfile.mkdtemp(dir=data.parent, prefix=f".{data.name}-new-"))
    try:
        yield fresh
    finally:
        shutil.rmtree(fresh)


def _run_initdb(binaries: PostgresBinaries, folder: Path, *, durable: bool) -> None:
    arguments = [
        str(binaries.initdb), "-D", str(folder), "-U", SUPERUSER, "-A", "trust", "-E", "UTF8",
        "--locale=C", "--data-checksums", *([] if durable else ["--no-sync"]),
    ]  # fmt: skip
    ids = ids_arguments(folder.stat(), die_with_parent=False)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", SHIM, *ids, *arguments],
        capture_output=True,
        text=True,
        env=server_environment(),
        check=False,
    )
    if done.returncode:
        # the folder that stays: its neighbour, in which this one was made, is gone with the answer
        home = folder.parent.parent
        why = why_ended((done.stderr or done.stdout).splitlines(), home)
        raise StorageFailed(f"Postgres cannot make its data folder in {home}: {why}")


def why_ended(lines: Sequence[str], folder: Path) -> str:
    """What a program of Postgres said when it ended, as part of one sentence: the first thing that went wrong, since
    what follows comes of it. A full disk is told with its remedy."""
    said = [line.strip() for line in lines if line.strip()]
    if any(FULL.search(line) for line in said):
        return f"the disk of {folder} is full: free some space, then run the same command again"
    wrong = [found[1] for line in said if (found := WRONG.search(line))]
    return (wrong or said[-1:] or ["it said nothing"])[0].rstrip(".")


def _initdb_user() -> pwd.struct_passwd:
    """initdb insists on a passwd entry; the server does not, which is why root hands the folder on."""
    if os.geteuid() != 0:
        try:
            return pwd.getpwuid(os.geteuid())
        except KeyError as fault:
            raise SettingsError(
                f"user id {os.geteuid()} has no passwd entry, without which Postgres makes no data "
                "folder: add one, or set FABRIC_PG_URL"
            ) from fault
    for name in ("nobody", "postgres", "daemon"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise SettingsError(
        "Postgres refuses to run as root, and no user nobody, postgres or daemon exists to drop to: "
        "run as an ordinary user, or set FABRIC_PG_URL"
    )


def _give(folder: Path, uid: int) -> None:
    """Make `uid` the owner of all of it; nothing to do for an ordinary user, who owns it already."""
    if uid == os.geteuid():
        return
    try:
        for path in [folder, *folder.rglob("*")]:
            os.chown(path, uid, uid, follow_symlinks=False)
    except OSError as fault:
        raise SettingsError(
            f"Postgres refuses to run as root, and this root may not hand files to user {uid} "
            f"({fault.strerror}): run as an ordinary user, or set FABRIC_PG_URL"
        ) from fault


# Started as root, this small program gives up root, asks the kernel to end it with its parent (SIGINT is
# Postgres' fast shutdown) and becomes the server. A preexec_fn would run Python between fork and exec of a
# process that has Arrow's threads.
SHIM = """
import ctypes, os, signal, sys
parent, uid, gid = (int(word) for word in sys.argv[1:4])
if uid != os.geteuid():
    os.setgroups([]); os.setgid(gid); os.setuid(uid)
if parent:
    ctypes.CDLL(None).prctl(1, signal.SIGINT, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)
os.umask(0o077)
os.chdir("/")
os.execv(sys.argv[4], sys.argv[4:])
"""


def ids_arguments(owner: os.stat_result, *, die_with_parent: bool = True) -> list[str]:
    return [str(os.getpid() if die_with_parent else 0), str(owner.st_uid), str(owner.st_gid)]


def server_environment() -> dict[str, str]:
    """Nothing of ours: no PG* variable of the caller may steer the server."""
    return {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}
