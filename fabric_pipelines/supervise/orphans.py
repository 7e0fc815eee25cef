"""Finds and ends what an earlier supervisor left behind, however deep and in whatever session.

Every supervised process inherits a mark in its environment, its children too. A pid in a file may be somebody
else's by now; a mark is not.
"""

from __future__ import annotations

import os

import psutil

from fabric_pipelines.supervise.place import MARK_NAME


def marked(mark: str) -> list[psutil.Process]:
    """Live processes of this user that carry `mark`; never this one nor what it descends from."""
    spared = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid in spared or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(MARK_NAME) == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def end_marked(mark: str, *, grace_s: float) -> int:
    """Terminate them, kill what is left after `grace_s`; returns how many there were."""
    found = marked(mark)
    for process in found:
        _send(process, kill=False)
    _, alive = psutil.wait_procs(found, timeout=grace_s)
    # the ones that were asked may have started others meanwhile
    stubborn = {process.pid: process for process in [*alive, *(marked(mark) if found else [])]}
    for process in stubborn.values():
        _send(process, kill=True)
    psutil.wait_procs(list(stubborn.values()), timeout=grace_s)
    return len(found)


def _send(process: psutil.Process, *, kill: bool) -> None:
    try:
        if kill:
            process.kill()
        else:
            process.terminate()
    except psutil.NoSuchProcess:
        return
