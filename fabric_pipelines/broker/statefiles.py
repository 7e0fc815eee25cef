"""The files that a running broker does not read and the next start does: identity, stubs, checkpoints.

What they hold is in memory as well, so damage in them costs nothing as long as somebody looks while the broker runs.
Identity and stubs are written again, being known byte by byte; in place of a damaged checkpoint a new one is taken. The
index file of a segment and the file that names its life are caches: a start without them reads the log itself.
"""

from __future__ import annotations

from fabric_pipelines.broker.checkpoint import Checkpoints
from fabric_pipelines.broker.replies import DamagedFrame
from fabric_pipelines.broker.upkeep import Upkeep
from fabric_pipelines.journal import Journal

REWRITTEN = (
    "the broker that runs knew its content and has written it again as it was, nothing is lost; look at the disk, and run "
    "`fabric broker scrub` again"
)
RENEWED = (
    "the broker that runs holds all that it stands for and takes a new checkpoint, from which the next start goes; look "
    "at the disk, and run `fabric broker scrub` again before you stop the broker"
)
BASE = f"{RENEWED}; the log began behind this one, and begins behind that one then"


class StateFiles:
    def __init__(self, journal: Journal, checkpoints: Checkpoints, upkeep: Upkeep) -> None:
        self._journal, self._checkpoints, self._upkeep = journal, checkpoints, upkeep

    def look(self) -> list[DamagedFrame]:
        """What is not as it was written, each told once it was seen to. StorageFailed as in `Journal.mend` and
        `Checkpoints.load`."""
        found = [
            _named(
                str(mended.path),
                mended.size,
                "is not what was written" if mended.size else "is missing",
                REWRITTEN,
            )
            for mended in self._journal.mend()
        ]
        base, damaged = self._upkeep.base, []
        for fact in self._upkeep.kept():
            if isinstance(said := self._checkpoints.load(fact), str):
                name, _, what = said.partition(" ")
                remedy = RENEWED
                if base is not None and fact.lsn == base.base:
                    what, remedy = f"{what}: the base of the log is lost", BASE
                    self._upkeep.base_is_lost = True
                path = str(self._journal.folder / name)
                damaged.append(_named(path, fact.size, what, remedy))
        if damaged:
            self._upkeep.begin_checkpoint()
        return found + damaged


def _named(path: str, size: int, what: str, remedy: str) -> DamagedFrame:
    """Of no LSN: no byte of the log is damaged, and no task lost."""
    return DamagedFrame(
        segment=path,
        offset=0,
        end=size,
        lsn=0,
        last_lsn=0,
        what=what,
        tasks=0,
        live=0,
        task_ids="none",
        remedy=remedy,
    )
