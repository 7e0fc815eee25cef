"""Keeper: whether somebody sees to it that the broker of this home comes back.

A supervisor holds a lock as long as it lives, and starts a broker that died again; who holds that lock is the truth,
and a socket file on the disk is none: a power cut leaves one as well. A broker of another machine has its keeper there.
"""

from __future__ import annotations

import fcntl
import os

from fabric_pipelines.broker.transport import TLS
from fabric_pipelines.settings import SUPERVISOR_LOCK, Settings

SUPERVISED = "`fabric up` of this home starts it again"


def keeper_of(settings: Settings) -> str:
    """Who starts the broker again, as words for a person; "" when nobody does."""
    if settings.broker_endpoint.startswith(TLS):
        return ""
    try:
        fd = os.open(settings.runtime_dir / SUPERVISOR_LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        # shared: two that look at once do not take each other for the supervisor
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return SUPERVISED
    finally:
        os.close(fd)
    return ""
