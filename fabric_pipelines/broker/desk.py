"""The desk: hands requests of many threads to the one owner, and lets answers leave once they are durable.

Requests that arrive together form a group and share one fsync. Within a group acknowledgements come before
leases and leases before new tasks, so that a full broker empties first. While more requests wait, a helper
syncs group n as the owner builds group n + 1; when none waits, the owner syncs itself, which spares a hop.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

from fabric_pipelines.broker.owner import Fatal, Owner
from fabric_pipelines.errors import (
    BrokerUnavailable,
    FabricError,
    StorageFailed,
    storage_failed,
)

T = TypeVar("T")
GROUP_MAX = 256
DIRTY_WAIT_S = 0.005
IDLE_WAIT_S = 0.05
BUSY_S = 0.5


class Rank(IntEnum):
    ACKNOWLEDGE = 0
    LEASE = 1
    QUESTION = 2
    ENQUEUE = 3


@dataclass(slots=True)
class _Request:
    act: Callable[[Owner], Any]
    rank: Rank
    durable: bool
    answer: Future[Any]


class Desk(threading.Thread):
    """`on_fatal` gets the error when the owner cannot go on; it should end the process."""

    def __init__(self, owner: Owner, on_fatal: Callable[[FabricError], None]) -> None:
        super().__init__(name="broker-owner", daemon=True)
        self._owner, self._on_fatal = owner, on_fatal
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._stopping = False
        self._waiting: list[tuple[_Request, Any]] = []
        self._syncer = _Syncer(owner, self._fail)
        self._marked = False
        self.news = threading.Condition()  # notified when something became computed or ready

    def ask(self, act: Callable[[Owner], T], rank: Rank, *, durable: bool = True) -> Future[T]:
        """Run `act` in the owner's thread. With `durable` the answer waits for the commit."""
        answer: Future[T] = Future()
        if self._stopping:
            answer.set_exception(BrokerUnavailable("the broker is stopping"))
        else:
            self._requests.put(_Request(act, rank, durable, answer))
        return answer

    @property
    def acknowledged(self) -> list[Any]:
        """[journal id, LSN, life]: what any answer given from now on may rely on."""
        journal = self._owner.journal
        return [journal.journal_id, journal.durable_lsn, journal.life.name]

    def require_kept(self, journal_id: str, lsn: int, life: str = "") -> None:
        """CorruptionFound if a caller was acknowledged more than the journal holds."""
        self._owner.require_kept(journal_id, lsn, life)

    def stop(self) -> None:
        """Finish what was asked, commit, and end."""
        self._stopping = True
        self._requests.put(None)
        self.join()
        with self.news:
            self.news.notify_all()

    def run(self) -> None:
        group: list[_Request] = []
        self._syncer.start()
        try:
            going = True
            while going:
                group = []
                going = self._collect(group)
                self._serve(group)
            self._syncer.finish()
            self._owner.idle()
        except Exception as fault:  # noqa: BLE001 - whatever it is, this process must end and say why
            self._fail(group, fault)
        finally:
            self._syncer.finish()
            self._refuse_rest()

    def _collect(self, group: list[_Request]) -> bool:
        """Fill the group with what is there, waiting a little for the first. False: stop was asked. Leases that
        nobody's acknowledgement took along are synced soon; the mark that all is durable costs a sync more and
        waits until nothing was asked for a while."""
        owner = self._owner
        try:
            wait_s = DIRTY_WAIT_S if owner.dirty else IDLE_WAIT_S
            request = self._requests.get(timeout=wait_s)
            self._marked = False
            while request is not None:
                group.append(request)
                if len(group) == GROUP_MAX:
                    return True
                request = self._requests.get_nowait()
        except queue.Empty:
            if not group and owner.dirty:
                owner.commit()
            elif not group and not self._marked:
                owner.idle()
                self._marked = True
            return True
        return False

    def _serve(self, group: list[_Request]) -> None:
        owner = self._owner
        begin_s = time.monotonic()
        self._waiting = []
        for request in sorted(group, key=lambda item: item.rank):
            try:
                result = request.act(owner)
            except FabricError as fault:
                request.answer.set_exception(fault)
            else:
                if request.durable:
                    self._waiting.append((request, result))
                else:
                    request.answer.set_result(result)
        if (busy_s := time.monotonic() - begin_s) > BUSY_S:
            owner.core.forgive(busy_s)
        owner.tick()
        if self._waiting and (self._syncer.busy or not self._requests.empty()):
            owner.write()
            self._syncer.take(self._waiting)
        elif self._waiting:
            owner.commit()
            _answer(self._waiting)
        if any(request.rank is not Rank.QUESTION for request in group):
            with self.news:
                self.news.notify_all()

    def _fail(self, group: Sequence[_Request], fault: Exception) -> None:
        self._stopping = True
        typed = reason_of(fault)
        for request in group:
            if not request.answer.done():
                request.answer.set_exception(
                    StorageFailed(f"the broker stopped before it could acknowledge: {typed}")
                )
        self._on_fatal(typed)

    def _refuse_rest(self) -> None:
        self._stopping = True
        while True:
            try:
                request = self._requests.get_nowait()
            except queue.Empty:
                return
            if request is not None:
                request.answer.set_exception(BrokerUnavailable("the broker is stopping"))


def reason_of(fault: Exception) -> FabricError:
    """What ended the owner, as one of the errors that have a sentence and an exit code."""
    if isinstance(fault, Fatal):
        cause = fault.__cause__
        return cause if isinstance(cause, FabricError) else FabricError(str(fault))
    if isinstance(fault, FabricError):
        return fault
    if isinstance(fault, OSError):
        return storage_failed(fault)
    return FabricError(
        f"this is a fault of the broker itself ({type(fault).__name__}: {fault}): start it again; what was "
        "acknowledged is kept"
    )


Waiting = list[tuple[_Request, Any]]


def _answer(waiting: Waiting) -> None:
    for request, result in waiting:
        request.answer.set_result(result)


class _Syncer(threading.Thread):
    """Syncs what the owner wrote and sends the answers that waited for it, in order. Groups that pile up during one
    fsync share the next."""

    def __init__(self, owner: Owner, fail: Callable[[Sequence[_Request], Exception], None]) -> None:
        super().__init__(name="broker-syncer", daemon=True)
        self._owner, self._fail = owner, fail
        self._groups: queue.SimpleQueue[Waiting | None] = queue.SimpleQueue()
        self._open = 0  # groups taken; only the owner's thread counts up
        self._done = 0  # groups answered; only this thread does

    @property
    def busy(self) -> bool:
        """Answers are under way; later ones must not overtake them."""
        return self._done < self._open

    def take(self, waiting: Waiting) -> None:
        """These were written; answer them once they are durable."""
        self._open += 1
        self._groups.put(waiting)

    def finish(self) -> None:
        """Answer what was taken, and end. Idempotent."""
        self._groups.put(None)
        if self.is_alive():
            self.join()

    def run(self) -> None:
        going = True
        while going:
            groups: list[Waiting] = []
            going = self._collect(groups)
            waiting = [item for group in groups for item in group]
            try:
                self._owner.sync()
            except Exception as fault:  # noqa: BLE001 - whatever it is, this process must end and say why
                self._fail([request for request, _ in waiting], fault)
                return
            _answer(waiting)
            self._done += len(groups)

    def _collect(self, groups: list[Waiting]) -> bool:
        """All groups that are there, waiting for the first. False: there will be no more."""
        group = self._groups.get()
        while group is not None:
            groups.append(group)
            try:
                group = self._groups.get_nowait()
            except queue.Empty:
                return True
        return False
