"""The journal: an append-only log of frames that survives a crash at any instruction. Bytes only; knows no task.

One idea: an acknowledgement is a returned `commit()`, which returns only after `fdatasync` did. What the log
says is durable and unreadable is corruption and is refused; what it never called durable may be cut.
The bytes on disk are described in FORMAT.md, next to this file.
"""

from fabric_pipelines.journal.files import FileOps, OsFileOps
from fabric_pipelines.journal.frame import DATA_KIND_MAX, Frame
from fabric_pipelines.journal.journal import Journal
from fabric_pipelines.journal.life import Life
from fabric_pipelines.journal.recovery import RecoveryReport
from fabric_pipelines.journal.scrub import Damage, ScrubSlice
from fabric_pipelines.journal.segment import Holding
from fabric_pipelines.journal.store import ObjectStore
from fabric_pipelines.journal.stub import Stub

__all__ = [
    "DATA_KIND_MAX",
    "Damage",
    "FileOps",
    "Frame",
    "Holding",
    "Journal",
    "Life",
    "ObjectStore",
    "OsFileOps",
    "RecoveryReport",
    "ScrubSlice",
    "Stub",
]
