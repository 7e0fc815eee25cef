"""Finds and ends what outlived whoever started it, however deep and in whatever session.

Every supervised process inherits a mark in its environment, its children too. A pid in a file may be somebody
else's by now; a mark is not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import psutil

from fabric_pipelines.supervise.place import MARK_NAME, STARTER_NAME


def marked(mark: str) -> list[psutil.Process]:
    """Live processes of this user that carry `mark`; never this one nor what it descends from."""
    return _carrying(MARK_NAME, mark)


def left_by(starter: str) -> list[psutil.Process]:
    """Live processes that one supervised process started, itself and its children's children included."""
    return _carrying(STARTER_NAME, starter)


def end_marked(mark: str, *, grace_s: float) -> int:
    """Terminate them, kill what is left after `grace_s`; returns how many there were."""
    found = marked(mark)
    ask_to_end(found)
    _, alive = psutil.wait_procs(found, timeout=grace_s)
    # the ones that were asked may have started others meanwhile
    stubborn = {process.pid: process for process in [*alive, *(marked(mark) if found else [])]}
    ask_to_end(list(stubborn.values()), kill=True)
    psutil.wait_procs(list(stubborn.values()), timeout=grace_s)
    return len(found)


def ask_to_end(processes: Sequence[psutil.Process], *, kill: bool = False) -> None:
    for process in processes:
        try:
            if kill:
                process.kill()
            else:
                process.terminate()
        except psutil.NoSuchProcess:
            continue


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that still run; one that nobody has reaped does not."""
    return [process for process in processes if _runs(process)]


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _carrying(name: str, value: str) -> list[psutil.Process]:
    spared = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid in spared or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(name) == value:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found
