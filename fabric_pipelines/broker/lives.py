"""Whether what a client was told is durable still is, in whatever life of the broker it was told.

A restart may take damage to the last group for a torn tail, and its first fact then takes the LSN that was lost. So a
client presents the life beside the LSN: what a life acknowledged is kept if no later one began below it.
"""

from __future__ import annotations

from collections.abc import Sequence

from fabric_pipelines.broker.recovery import Log
from fabric_pipelines.errors import CorruptionFound
from fabric_pipelines.journal import Life


def require_kept(journal: Log, lives: Sequence[Life], lsn: int, life: str) -> None:
    """`lives`: those that STARTED facts tell of; `life`: name of the one that acknowledged `lsn`, "" if the client does
    not say. CorruptionFound if that was lost, ValueError if `life` is no name."""
    mine, durable = journal.life, journal.durable_lsn
    kept, of = durable, "ends at"
    if life and life != mine.name:
        opens, opened_us = map(int, life.split("-"))
        known = {each.opens: each for each in (*lives, mine)}
        same = known.get(opens)
        if opens > mine.opens or (same is not None and same.opened_us != opened_us):
            raise _lost(f"this journal has not had the life {life}", lsn)
        later = [each.after for each in known.values() if each.opens > opens]
        if later and min(later) < durable:
            kept, of = min(later), "went on after a restart from"
    if lsn > kept:
        raise _lost(f"this journal {of} LSN {kept}", lsn)


def _lost(what: str, lsn: int) -> CorruptionFound:
    return CorruptionFound(
        f"{what}, but its client was acknowledged up to {lsn}: acknowledged work was lost; stop the broker and restore "
        "the journal folder from a copy"
    )
