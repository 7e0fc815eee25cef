"""The auditor of a simulated run: what must be true, worked out from the messages alone.

It never looks into a broker. It sees what producers sent, what leases brought, what was reported, landed and
confirmed, and which answers came; it keeps one row of plain columns a task, under the producer's own number.
Whatever it cannot forgive is a sentence in `faults`; the four counts must be 0.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fabric_pipelines.broker.replies import BrokerStatus
from fabric_pipelines.ledger import ZERO, Amount
from fabric_pipelines.records.task import token_counts

Rows = npt.NDArray[np.int64]
NOBODY = -1
UNSYNCED_S = 0.6  # leases leave before they are durable; the tick of half a second makes them so
FAULTS_MAX = 20  # sentences kept; counts go on


@dataclass(slots=True)
class Tally:
    """lost: acknowledged and never landed. doubled: two ids for a task, two tasks for an id, two outcomes, or
    held by two at once. reruns: leased again after its end was acknowledged. difference: audits at which the
    broker's ledger did not agree with itself or with the messages."""

    lost: int = 0
    doubled: int = 0
    reruns: int = 0
    difference: int = 0


class Auditor:
    def __init__(self, tasks: int, lease_s: float) -> None:
        """`tasks`: how many rows producers will send, numbered from 0; `lease_s`: how long a holder is safe."""
        count, self.lease_s = tasks, lease_s
        self.tally = Tally()
        self.faults: list[str] = []
        self.audits = self.enqueue_sent = self.enqueue_acked = 0
        self.settle_sent = self.settle_acked = 0
        self.length = np.zeros(count, np.int32)
        self.mark = np.zeros(count, np.uint32)  # first token
        self.sent = np.zeros(count, np.bool_)
        self.acked = np.zeros(count, np.bool_)
        self.task_id = np.full(count, -1, np.int64)
        self.row_of = np.full(count, -1, np.int64)  # by sequence number of the id
        self.ended = np.zeros(count, np.bool_)  # its last outcome was acknowledged
        self.landed = np.zeros(count, np.bool_)
        self.buried = np.zeros(count, np.bool_)
        self.confirmed = np.zeros(count, np.bool_)
        self.holder = np.full(count, NOBODY, np.int32)
        self.sessions: dict[str, int] = {}
        self.heard_s: list[float] = []  # last answered renewal, by session
        self.places: dict[str, set[str]] = {}  # sessions that came from them
        self._recent: deque[tuple[float, Rows]] = deque()
        self._lost_s = -1.0  # when the broker died last

    # -- what producers say and hear

    def submitted(self, rows: Rows, lengths: npt.NDArray[np.int64], marks: Rows) -> None:
        """A batch is on its way, perhaps not for the first time."""
        self.enqueue_sent += int((~self.sent[rows]).sum())
        self.sent[rows] = True
        self.length[rows], self.mark[rows] = lengths, marks

    def enqueued(self, rows: Rows) -> None:
        self.enqueue_acked += int((~self.acked[rows]).sum())
        self.acked[rows] = True

    # -- what workers say and hear

    def heard(self, session: str, now_s: float) -> int:
        """The broker answered: what this session holds is its own for a lease time."""
        at = self.sessions.setdefault(session, len(self.sessions))
        if at == len(self.heard_s):
            self.heard_s.append(now_s)
        self.heard_s[at] = now_s
        return at

    def leased(
        self, session: str, tasks: pa.RecordBatch, now_s: float, given_s: float | None = None
    ) -> None:
        """A lease was heard of; `given_s` is when the broker gave it, now if not told. A broker that died on
        the way of its answer may have forgotten it, just as one that dies later."""
        given_s = now_s if given_s is None else given_s
        rows = tasks.column("source_row").to_numpy()
        ids = tasks.column("task_id").to_numpy()
        self._same(rows, token_counts(tasks), _first_tokens(tasks))
        self._identity(rows, ids)
        self._count("reruns", self.ended[rows], rows, "leased after its end was acknowledged")
        mine = self.heard(session, now_s)
        others = self.holder[rows]
        held = (others != NOBODY) & (others != mine)
        if held.any():
            safe = np.array(self.heard_s)[others] + self.lease_s > now_s
            self._count("doubled", held & safe, rows, "leased while another session holds it")
        forgotten = given_s <= self._lost_s < given_s + UNSYNCED_S
        self.holder[rows] = NOBODY if forgotten else mine
        while self._recent and self._recent[0][0] <= now_s - 2 * UNSYNCED_S:
            self._recent.popleft()
        self._recent.append((given_s, rows))

    def attaching(self, session: str, held: Rows, place: str = "") -> None:
        """Whatever the session does not name may go to anybody from now on, and so may all that others from its
        place held."""
        before = self.places.setdefault(place, set()) if place else set()
        for name in before | {session}:
            at = self.sessions.get(name)
            if at is not None:
                mine = np.flatnonzero(self.holder == at)
                self.holder[np.setdiff1d(mine, held) if name == session else mine] = NOBODY
        before.add(session)

    def reporting(self, rows: Rows, failed: npt.NDArray[np.bool_]) -> None:
        """A report is on its way: what failed may go to anybody from now on."""
        self.holder[rows[failed]] = NOBODY

    def reported(self, rows: Rows, failed: npt.NDArray[np.bool_], late: int) -> None:
        """The broker took the report. Rows that somebody else has taken over meanwhile are not told apart."""
        if not late:
            self.ended[rows[~failed]] = True

    # -- what completion says and hears

    def pulled(self, rows: Rows, ids: Rows) -> None:
        self._identity(rows, ids)

    def landing(self, rows: Rows, dead: npt.NDArray[np.bool_]) -> None:
        """The sink has them for good, keyed by task id."""
        self.landed[rows[~dead]] = True
        self.buried[rows[dead]] = True
        self._count("doubled", self.landed[rows] & self.buried[rows], rows, "has two outcomes")

    def settling(self, rows: Rows) -> None:
        self.settle_sent += int((~self.confirmed[rows]).sum())
        self.confirmed[rows] = True

    def settled(self, count: int) -> None:
        self.settle_acked += count

    def broker_lost(self, now_s: float) -> None:
        """Connections broke: leases of the last moment may have been forgotten, as leases may."""
        self._lost_s = now_s
        for given_s, rows in self._recent:
            if given_s > now_s - UNSYNCED_S:
                self.holder[rows] = NOBODY
        self._recent.clear()

    # -- audits

    def audit(self, status: BrokerStatus, *, quiet: bool = False) -> None:
        """The broker's ledger against itself and against the messages; `quiet`: nothing is on its way."""
        self.audits += 1
        total = status.total
        done = total.retired.tasks + total.dead.tasks
        wrong = []
        if total.balance != ZERO:
            wrong.append(f"the ledger is off by {total.balance}")
        if not self.enqueue_acked <= total.enqueued.tasks <= self.enqueue_sent:
            wrong.append(
                f"{total.enqueued.tasks} enqueued, {self.enqueue_acked} acknowledged, {self.enqueue_sent} sent"
            )
        if not self.settle_acked <= done <= self.settle_sent:
            wrong.append(f"{done} settled, {self.settle_acked} heard of, {self.settle_sent} sent")
        if status.fault:
            wrong.append(status.fault)
        if quiet:
            wrong += self._unequal("retired", self.landed, total.retired)
            wrong += self._unequal("dead", self.buried, total.dead)
        self.tally.difference += bool(wrong)
        self._say(wrong)

    def finish(self) -> None:
        lost = np.flatnonzero(self.acked & ~self.landed & ~self.buried)
        self.tally.lost = len(lost)
        if len(lost):
            self._say(
                [f"{len(lost)} tasks were acknowledged and never landed, first row {lost[0]}"]
            )

    @property
    def clean(self) -> bool:
        return self.tally == Tally() and not self.faults

    def _unequal(self, name: str, chosen: npt.NDArray[np.bool_], theirs: Amount) -> list[str]:
        mine = Amount.of(self.task_id[chosen], self.length[chosen])
        return [] if mine == theirs else [f"{name}: the sink has {mine}, the broker says {theirs}"]

    def _same(self, rows: Rows, lengths: npt.NDArray[np.int64], marks: Rows) -> None:
        other = (self.length[rows] != lengths) | (self.mark[rows] != marks) | ~self.sent[rows]
        if other.any():
            self._say([f"row {rows[other][0]} was leased with other content than it was sent with"])

    def _identity(self, rows: Rows, ids: Rows) -> None:
        """One id a task and one task an id, for ever."""
        sequence = ids & ((1 << 40) - 1)
        known, owner = self.task_id[rows], self.row_of[sequence]
        wrong = ((known != -1) & (known != ids)) | ((owner != -1) & (owner != rows))
        self._count("doubled", wrong, rows, "has more than one id")
        self.task_id[rows], self.row_of[sequence] = ids, rows

    def _count(self, what: str, wrong: npt.NDArray[np.bool_], rows: Rows, says: str) -> None:
        if wrong.any():
            setattr(self.tally, what, getattr(self.tally, what) + int(wrong.sum()))
            self._say([f"row {rows[wrong][0]} {says}"])

    def _say(self, sentences: list[str]) -> None:
        self.faults += sentences[: max(0, FAULTS_MAX - len(self.faults))]


def _first_tokens(tasks: pa.RecordBatch) -> Rows:
    column = tasks.column("tokens")
    lengths = token_counts(tasks)
    starts = np.cumsum(lengths) - lengths
    first: Rows = column.flatten().to_numpy()[starts].astype(np.int64)
    return first
