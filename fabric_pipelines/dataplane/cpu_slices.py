"""Bulk gives way for the CPU: how long its threads, and its backends on this machine, ask to run at a stretch, and where.

Since Linux 6.12 a task says how long a slice it wants, and one that wakes with a shorter slice interrupts one with a
longer at once, not at the next tick. So bulk asks for a long slice while it encodes and copies, which costs it
nothing of its share, and for the shortest while it commits, when everybody's commit waits for a lock that it holds.
Not by nice: that lock would then wait for a CPU behind everybody. And bulk keeps to half of the cores, so that who is
not bulk finds one whose cache and run queue bulk has not filled; half of a small machine is more than the governor
lets bulk have. Refuses nothing: elsewhere, or without the permission, all stays as it is.
"""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fabric_pipelines.dataplane.database import Connection

LONG_NS, SHORT_NS = 20_000_000, 100_000
SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
"""Numbers of the system call, which libc does not wrap."""
ATTRIBUTES = "<IIQiIQQQII"  # struct sched_attr: size, policy, flags, nice, priority, runtime (the slice), ...
CREDENTIALS = "3i"  # struct ucred: pid, uid, gid


def ask(slice_ns: int, pid: int = 0) -> bool:
    """Set the slice of process or thread `pid` (0: the calling thread); whether the kernel took the word. Nice value and
    share stay as they are."""
    number = SCHED_SETATTR.get(platform.machine()) if sys.platform == "linux" else None
    if number is None:
        return False
    try:
        if os.sched_getscheduler(pid) != os.SCHED_OTHER:
            return False
        nice = os.getpriority(os.PRIO_PROCESS, pid)
    except OSError:
        return False
    size = struct.calcsize(ATTRIBUTES)
    wanted = struct.pack(ATTRIBUTES, size, os.SCHED_OTHER, 0, nice, 0, slice_ns, 0, 0, 0, 0)
    failed: int = ctypes.CDLL(None).syscall(number, pid, ctypes.c_char_p(wanted), 0)
    return not failed


def keep_to_half(pid: int = 0, *, of: int = 0) -> bool:
    """Let process or thread `pid` (0: the calling thread) run on the upper half of the cores that process `of` (0: this
    one) may use, and no other; whether it does. With one core there is nothing to leave free."""
    if sys.platform != "linux":
        return False
    try:
        cores = _cores(of or os.getpid())
        os.sched_setaffinity(pid, cores[len(cores) // 2 :])
    except OSError:
        return False
    return len(cores) > 1


def give_way() -> None:
    """The calling thread is bulk's from now on."""
    ask(LONG_NS)
    keep_to_half()


@dataclass(frozen=True, slots=True)
class BackendSlice:
    """Of the server's process behind one connection. pid 0: it is elsewhere or not ours to move."""

    pid: int = 0

    @classmethod
    def of(cls, connection: Connection) -> BackendSlice:
        """Long from now on, on half of the server's cores, where that can be."""
        pid = connection.info.backend_pid
        listener = _listener(connection.fileno())
        if not listener or _parent(pid) != listener or not ask(LONG_NS, pid):
            return cls()
        keep_to_half(pid, of=listener)
        return cls(pid)

    @contextmanager
    def hurried(self) -> Iterator[None]:
        """Short within; a backend that ended meanwhile needs nothing any more."""
        if not self.pid:
            yield
            return
        ask(SHORT_NS, self.pid)
        try:
            yield
        finally:
            ask(LONG_NS, self.pid)


@cache
def _cores(pid: int) -> list[int]:
    """As they were at the first look: a process that keeps to half of them is not asked for a quarter at the next."""
    return sorted(os.sched_getaffinity(pid))


def _listener(descriptor: int) -> int:
    """Process that listens at the other end of a local socket; 0: it is none, or of another pid namespace."""
    if sys.platform != "linux":
        return 0
    with socket.socket(fileno=os.dup(descriptor)) as end:
        if end.family != socket.AF_UNIX:
            return 0
        found = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(CREDENTIALS))
    return int(struct.unpack(CREDENTIALS, found)[0])


def _parent(pid: int) -> int:
    """0 where nothing is seen. A backend's number means nothing in another pid namespace, hence the look."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(status.rpartition(")")[2].split()[1])
