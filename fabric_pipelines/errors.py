"""Every failure the fabric reports on purpose, as one tree; imports nothing of the fabric.

    FabricError
    ├── TransientError          may be retried: the world was busy, gone or full for now
    │   ├── BrokerUnavailable       no broker answers at the endpoint
    │   │   ├── NotAttached             it answers but does not know this session: attach again
    │   │   └── NotTrusted              TLS: one side does not take the other's certificate, until it is renewed
    │   ├── DatabaseUnavailable     Postgres is away or still recovering
    │   ├── Backpressure            a high-water mark was reached; carries `retry_after_s`
    │   │   └── NotFetched              rows lie in the cold tier and are on their way
    │   ├── EngineBusy              the engine takes no more work right now
    │   ├── SourceUnreachable       a model's source (index, repository, path) did not deliver
    │   └── StoreUnreachable        the object store of the cold tier does not answer
    └── TerminalError           a retry changes nothing
        ├── UsageError              the caller's input is wrong
        │   ├── SettingsError           a setting is missing, unknown or unreadable
        │   ├── SchemaError             an Arrow batch is not what its schema module says
        │   ├── SubmissionConflict      same submission id, other content
        │   └── ModelMissing            the model is not in the cache; names the pull command
        ├── Refused                 a fail-closed rule said no (exit code 4)
        │   ├── AlreadyRunning          a second supervisor, broker or worker on the same thing
        │   ├── IncarnationMismatch     journal and database do not know each other
        │   ├── ManifestRefused         engine manifest is missing a field, or contradicts itself
        │   ├── DigestMismatch          bytes are not those of the pinned sha256
        │   ├── VersionRefused          a server or file format outside the supported range
        │   ├── DeviceRefused           no CUDA device, no cubin for it, or too little memory on it
        │   ├── WrongRole               this caller may not make this call
        │   ├── WrongTenant             a task or submission of another tenant
        │   ├── HomeGone                a folder or segment under a running process was moved, deleted, replaced or cut
        │   └── FencingLost             a newer token exists; this holder may not publish
        ├── MissingDependency       an optional package is not installed; names the command
        ├── CheckFailed             a check found a difference (exit code 3)
        │   └── BalanceBroken           enqueued != ready + in flight + retired + dead
        ├── StorageFailed           a write or fsync failed, a disk is full or read-only
        ├── CorruptionFound         bytes at or below the durable mark do not match their CRC (exit code 4)
        │   └── ColdLost                an object of the cold tier is missing or was changed
        ├── EngineFailed            the engine itself failed; the batch is nacked
        ├── StartFailed             a process of `fabric up` did not come up; carries its sentence and exit code
        └── Interrupted             the user stopped it; says what was kept (exit code 130)

Only the class decides whether something may be retried. Every message names the thing and the remedy
in one sentence. `exit_code` is the contract of `fabric` for scripts (docs/operations.md).
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from typing import Any

FULL = (errno.ENOSPC, errno.EDQUOT)
NOT_OURS = (errno.EROFS, errno.EACCES, errno.EPERM)


class FabricError(Exception):
    """Root of the tree. `code` is the stable machine name that travels in records and over the wire."""

    exit_code = 1
    submission_id = ""
    accepted_tasks = 0
    submission_tasks = 0

    def leave(self, submission_id: str, accepted: int, tasks: int, *, at_least: bool) -> None:
        """This error ended a submission of which the broker has `accepted` tasks, which run: say so in the sentence
        and for a program in `submission_id`, `accepted_tasks` and `submission_tasks`."""
        self.submission_id = submission_id
        self.accepted_tasks, self.submission_tasks = accepted, tasks
        count = f"{'at least ' if at_least else ''}{accepted:,} of {tasks:,} tasks"
        rest = (
            "the rest was not taken"
            if isinstance(self, UsageError)
            else "submit the same once more to send the rest"
        )
        self.args = (
            f"{self}; {count} of submission {submission_id[:12]} were accepted before and run: {rest}",
            *self.args[1:],
        )

    @property
    def code(self) -> str:
        return type(self).__name__


class TransientError(FabricError):
    """May be retried."""


class BrokerUnavailable(TransientError):
    pass


class NotAttached(BrokerUnavailable):
    """The broker restarted, or gave this session up; `attach` with the ids still held goes on."""


class NotTrusted(BrokerUnavailable):
    """Not terminal: a worker keeps what it computed while somebody renews a certificate."""


class DatabaseUnavailable(TransientError):
    pass


class Backpressure(TransientError):
    """The other side holds as much as it may; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineBusy(TransientError):
    pass


class SourceUnreachable(TransientError):
    pass


class StoreUnreachable(TransientError):
    pass


class NotFetched(Backpressure):
    pass


class TerminalError(FabricError):
    """A retry changes nothing."""


class UsageError(TerminalError):
    exit_code = 2


class SettingsError(UsageError):
    pass


class SchemaError(UsageError):
    pass


class SubmissionConflict(UsageError):
    pass


class ModelMissing(UsageError):
    pass


class Refused(TerminalError):
    exit_code = 4


class AlreadyRunning(Refused):
    pass


class IncarnationMismatch(Refused):
    pass


class ManifestRefused(Refused):
    """Names every field at fault in `fields`."""

    def __init__(self, message: str, fields: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.fields = fields


class DigestMismatch(Refused):
    pass


class VersionRefused(Refused):
    pass


class DeviceRefused(Refused):
    pass


class WrongRole(Refused):
    pass


class WrongTenant(Refused):
    pass


class HomeGone(Refused):
    pass


class FencingLost(Refused):
    pass


class MissingDependency(TerminalError):
    """An optional package is absent: the message carries the install command."""

    def __init__(self, package: str, extra: str, why: str) -> None:
        super().__init__(
            f"{why} needs the package {package!r}, which is not installed: "
            f'run `pip install "fabric-pipelines[{extra}]"`'
        )
        self.package = package
        self.extra = extra


class CheckFailed(TerminalError):
    exit_code = 3


class BalanceBroken(CheckFailed):
    pass


class StorageFailed(TerminalError):
    pass


class CorruptionFound(TerminalError):
    """Exits as a fail-closed refusal does: another start changes nothing. `places`: where, as values of JSON: `segment`,
    `offset`, `end`, `lsn`, `last_lsn` (None: to the end of the log) each and, once a broker had a look, `tasks`, `live`,
    `task_ids`, `rows` (of their submissions, the first few) and `remedy`; a refused start adds `bound`, whether that is
    "exact", "at least" or "about". Empty where no place is known."""

    exit_code = 4

    def __init__(self, message: str, places: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(message)
        self.places = tuple(places)


class ColdLost(CorruptionFound):
    pass


class EngineFailed(TerminalError):
    pass


class StartFailed(TerminalError):
    """Ends `fabric` with the exit code of the error that kept the process from coming up."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Interrupted(TerminalError):
    exit_code = 130


def by_code(code: str) -> type[FabricError]:
    """The class that `code` names, so that an error keeps its type across a socket; FabricError if unknown."""
    pending: list[type[FabricError]] = [FabricError]
    while pending:
        cls = pending.pop()
        if cls.__name__ == code:
            return cls
        pending.extend(cls.__subclasses__())
    return FabricError


def storage_failed(fault: OSError) -> StorageFailed:
    """An OSError that nobody expected, with the file it names and what to do about it."""
    why = fault.strerror or str(fault)
    where = f"{fault.filename}: {why}" if fault.filename else why
    if fault.errno in FULL:
        return StorageFailed(f"{where}: free some space, then run the same command again")
    if fault.errno in NOT_OURS:
        return StorageFailed(
            f"{where}: make it writable, or choose another folder with FABRIC_HOME"
        )
    return StorageFailed(where)


def as_line(fault: FabricError) -> str:
    """The last line of a process that `fault` ended, so that who started it can tell it on."""
    return f"{fault.code}: {' '.join(str(fault).split())}"


def from_line(line: str) -> tuple[type[FabricError], str] | None:
    """Class and sentence of a line that `as_line` made; None for any other line."""
    code, colon, sentence = line.partition(": ")
    cls = by_code(code)
    return (cls, sentence) if colon and cls.__name__ == code else None
