"""The broker against a dictionary: whatever happens in whatever order, with crashes, both agree on every task.

The twin knows nothing of columns, accounts or logs. It keeps one small object per task, remembers what was
committed, and goes back to that at a crash.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from fabric_pipelines.broker import space
from fabric_pipelines.broker.core import Limits
from fabric_pipelines.errors import SubmissionConflict, UsageError
from fabric_pipelines.ids import task_id
from fabric_pipelines.ledger import Amount
from fabric_pipelines.records.batch import Budget
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.testing.sim_disk import SimDisk
from tests.support_broker import (
    BURIED,
    EMBED,
    GENERATE,
    LARGE,
    PROFILE,
    Bench,
    ids_of,
    submission_of,
    tasks_of,
)
from tests.support_broker_disk import DiskBench

SESSIONS = ("w1", "w2", "w3")
CLASS_OF = {"w1": PROFILE, "w2": PROFILE, "w3": LARGE}
ATTEMPTS_MAX = 2
LEASE_S = 10.0


@dataclass
class TwinTask:
    tokens: tuple[int, ...]
    state: str = "ready"
    attempts: int = 0
    holder: str = ""
    good: bool = False
    refused: frozenset[Profile] = frozenset()  # classes that found it too large
    suspect: bool = False  # was held when a worker ended, and was not reported on since


@dataclass
class Twin:
    tasks: dict[int, TwinTask] = field(default_factory=dict)
    uploaded: dict[int, int] = field(default_factory=dict)  # rows of each submission
    abandoned: set[int] = field(default_factory=set)

    def ids(self, state: str, holder: str | None = None) -> list[int]:
        return [
            at
            for at, task in self.tasks.items()
            if task.state == state and holder in (None, task.holder)
        ]


def batches_of(mark: int) -> list[Any]:
    """The content of submission `mark`: always the same, of one to three batches."""
    sizes = [(mark * 7 + i * 5) % 6 + 1 for i in range(mark % 3 + 1)]
    return [
        tasks_of([(mark * 31 + i * 17 + j * 3) % 60 + 1 for j in range(size)], seed=mark * 10 + i)
        for i, size in enumerate(sizes)
    ]


class BrokerMachine(RuleBasedStateMachine):
    leases = Bundle("leases")

    def make_bench(self) -> Bench:
        return Bench(Limits(lease_s=LEASE_S, attempts_max=ATTEMPTS_MAX))

    @initialize()
    def begin(self) -> None:
        self.bench = self.make_bench()
        self.incarnation = self.bench.owner.core.state.incarnation
        self.twin = Twin()
        self.attached: dict[str, float] = {}
        self.lost: dict[Profile, float] = {}  # classes that may come back, until when
        self.grace_s = 0.0
        self.commit()

    def known(self) -> set[Profile]:
        return {CLASS_OF[name] for name in self.attached} | set(self.lost)

    def commit(self) -> None:
        self.bench.owner.commit()
        self.committed = copy.deepcopy(self.twin)

    # -- producers

    @rule(mark=st.integers(1, 5), until=st.integers(0, 3))
    def upload(self, mark: int, until: int) -> None:
        """Send a submission, or send it again, perhaps stopping after a few batches."""
        batches = batches_of(mark)
        header = submission_of(batches, mark, sampling=EMBED if mark % 2 else GENERATE)
        if mark in self.twin.abandoned:
            with pytest.raises(SubmissionConflict, match="abandoned"):
                self.bench.owner.open_submission(header)
            return
        self.bench.owner.open_submission(header)
        self.twin.uploaded.setdefault(mark, 0)
        first = 0
        for batch in batches[:until]:
            self.bench.upload(header, first, batch)
            known = self.twin.uploaded.get(mark, 0)
            for row in batch.to_pylist()[max(known - first, 0) :]:
                self.twin.tasks[task_id(self.incarnation, len(self.twin.tasks))] = TwinTask(
                    tuple(row["tokens"])
                )
            first += batch.num_rows
            self.twin.uploaded[mark] = max(known, first)
        if self.twin.uploaded.get(mark) == header.tasks:
            assert self.bench.owner.close_submission(header.submission_id).closed
        self.commit()

    @rule(mark=st.integers(1, 5))
    def abandon(self, mark: int) -> None:
        """Whatever came of it stays as it is, and nothing more comes."""
        batches, owner = batches_of(mark), self.bench.owner
        rows, total = self.twin.uploaded.get(mark), sum(batch.num_rows for batch in batches)
        if rows is None or rows == total:
            with pytest.raises(
                UsageError,
                match="is known to this broker" if rows is None else "nothing to abandon",
            ):
                owner.abandon_submission(f"{mark:064x}")
            return
        state = owner.abandon_submission(f"{mark:064x}")
        assert (state.closed, state.abandoned, state.enqueued) == (True, True, rows)
        self.twin.abandoned.add(mark)
        self.commit()

    # -- consumers

    @rule(name=st.sampled_from(SESSIONS), keep=st.integers(0, 3), data=st.data())
    def attach(self, name: str, keep: int, data: st.DataObject) -> None:
        """A session comes (back) and names some of what it held, some of what it never held, or nothing."""
        held = self.twin.ids("leased", name) + self.twin.ids("in_doubt", name)
        named = held[:: keep + 1] if keep < 3 else []
        if self.twin.tasks:
            named = [*named, data.draw(st.sampled_from(sorted(self.twin.tasks)))]
        reply = self.bench.attach(name, held=named, profile=CLASS_OF[name])
        self.lost.pop(CLASS_OF[name], None)
        expected = []
        for at in sorted(set(named)):
            task = self.twin.tasks[at]
            own = task.state in ("leased", "in_doubt") and task.holder == name
            if own or task.state == "ready":
                task.state, task.holder = "leased", name
                expected.append(at)
        for at in set(held) - set(named):
            self.twin.tasks[at].state = "ready"
        assert list(reply.accepted) == expected
        assert set(reply.lost) == set(named) - set(expected)
        self.attached[name] = self.bench.time.seconds + LEASE_S
        self.commit()

    @precondition(lambda self: self.attached)
    @rule(
        target=leases,
        sequences=st.integers(1, 6),
        tokens=st.integers(1, 200),
        data=st.data(),
        durable=st.booleans(),
    )
    def lease(self, sequences: int, tokens: int, data: st.DataObject, durable: bool) -> Any:
        name = data.draw(st.sampled_from(sorted(self.attached)))
        held = [self.twin.tasks[at] for at in self.twin.ids("leased", name)]
        lease, held_back = self.bench.owner.lease(name, Budget(sequences, tokens, None), -1)
        self.attached[name] = self.bench.time.seconds + LEASE_S
        if lease is None:
            ready = [self.twin.tasks[at] for at in self.twin.ids("ready")]
            mine = [task for task in ready if CLASS_OF[name] not in task.refused]
            if held_back:
                assert held
                assert any(task.suspect for task in [*held, *mine])
            else:
                assert mine == []
            return multiple()
        assert not any(task.suspect for task in held)
        ids = ids_of(lease)
        rows = lease.tasks.to_pylist()
        assert len(ids) <= sequences
        cost = sum(lease.aligned_length or len(row["tokens"]) for row in rows)
        assert cost <= tokens or len(ids) == 1
        for row in rows:
            task = self.twin.tasks[row["task_id"]]
            assert task.state == "ready"
            assert CLASS_OF[name] not in task.refused
            assert not (task.suspect and held), "a suspect goes out by itself"
            assert (tuple(row["tokens"]), row["attempts"]) == (task.tokens, task.attempts)
            task.state, task.holder = "leased", name
        if durable:
            self.commit()
        return (name, ids)

    @rule(
        lease=leases,
        status=st.sampled_from(["ok", "ok", "refused", "failed", "oversized"]),
        reporter=st.sampled_from(["holder", *SESSIONS]),
    )
    def report(self, lease: tuple[str, list[int]], status: str, reporter: str) -> None:
        """By the holder or by somebody else, for the first time or again, before or after the lease ran out."""
        name, ids = lease
        name = name if reporter == "holder" else reporter
        ids = [at for at in ids if at in self.twin.tasks]
        if not ids:
            return
        reply = self.bench.report(ids, status, name)
        taken = 0
        for at in ids:
            task = self.twin.tasks[at]
            open_states = (
                ("leased", "in_doubt", "ready") if status == "ok" else ("leased", "in_doubt")
            )
            if task.holder != name or task.state not in open_states:
                continue
            taken += 1
            task.suspect = False
            if status == "failed":
                task.attempts += 1
            retry = status == "failed" and task.attempts < ATTEMPTS_MAX
            if status == "oversized" and name in self.attached:
                mine = {CLASS_OF[name]}
                retry = self.grace_s > 0 or bool(self.known() - mine - task.refused)
                task.refused |= mine if retry else set()
            task.state = "ready" if retry else "computed"
            task.good = status == "ok"
        assert reply.accepted == taken
        assert reply.accepted + reply.duplicates + reply.late == len(ids)
        self.commit()

    @rule(lease=consumes(leases), attempted=st.booleans())
    def nack(self, lease: tuple[str, list[int]], attempted: bool) -> None:
        name, ids = lease
        mine = [at for at in ids if at in self.twin.ids("leased", name)]
        assert self.bench.owner.nack(name, np.array(ids), "test", attempted) == len(mine)
        for at in mine:
            self.come_back(at, suspect=attempted, blame=attempted and len(mine) == 1)
        self.commit()

    # -- completion

    @rule(rows=st.integers(1, 10))
    def land(self, rows: int) -> None:
        pulled = self.bench.owner.pull("c", rows)
        if pulled is None:
            return
        good = [r["task_id"] for r in pulled.to_pylist() if r["status"] == "ok"]
        bad = [r["task_id"] for r in pulled.to_pylist() if r["status"] != "ok"]
        rounds = {r["task_id"]: r["requeues"] for r in pulled.to_pylist()}

        def bury(ids: list[int]) -> int:
            counts = np.array([rounds[at] for at in ids], np.uint8)
            return self.bench.owner.settle(np.array(ids), BURIED, dead=True, requeues=counts)

        for ids, settle, state in ((good, self.bench.retire, "retired"), (bad, bury, "dead")):
            if ids:
                assert settle(ids) == len(ids)
                assert settle(ids) == 0
            for at in ids:
                assert self.twin.tasks[at].state == "computed"
                assert self.twin.tasks[at].good == (state == "retired")
                self.twin.tasks[at].state = state
        self.commit()

    @precondition(lambda self: self.twin.ids("dead"))
    @rule(data=st.data())
    def requeue(self, data: st.DataObject) -> None:
        """Some dead tasks, and one that may be anything, are tried again; the second time changes nothing."""
        dead = data.draw(st.lists(st.sampled_from(self.twin.ids("dead")), min_size=1, unique=True))
        named = np.array([*dead, data.draw(st.sampled_from(sorted(self.twin.tasks)))], np.int64)
        now_dead = {at for at in named.tolist() if self.twin.tasks[at].state == "dead"}
        reply = self.bench.owner.requeue(named, "test")
        assert reply.requeued + reply.gone == len(now_dead)
        assert self.bench.owner.requeue(named, "test").requeued == 0
        for at, state in zip(named.tolist(), self.bench.owner.states(named), strict=True):
            task = self.twin.tasks[at]
            if at in now_dead and state == "ready":
                self.twin.tasks[at] = TwinTask(task.tokens)
        if not isinstance(self.bench, DiskBench):
            assert reply.gone == 0
        self.commit()

    @rule(rows=st.integers(1, 4))
    def pull_and_forget(self, rows: int) -> None:
        self.bench.pull(rows)
        self.bench.owner.release_pulled("c")
        self.commit()

    # -- the world

    def come_back(self, at: int, *, suspect: bool, blame: bool) -> None:
        """An attempt is counted only for a task that was all its session held."""
        task = self.twin.tasks[at]
        task.attempts += blame
        task.state = "computed" if blame and task.attempts >= ATTEMPTS_MAX else "ready"
        task.suspect = task.state == "ready" and (suspect or task.suspect)

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        self.bench.time.seconds += seconds
        now = self.bench.time.seconds
        waiting = self.twin.ids("ready")
        for name in [n for n, deadline in self.attached.items() if deadline < now]:
            del self.attached[name]
            if CLASS_OF[name] not in {CLASS_OF[other] for other in self.attached}:
                self.lost[CLASS_OF[name]] = now + 4 * LEASE_S
            held = self.twin.ids("leased", name)
            unclaimed = self.twin.ids("in_doubt", name)
            for at in held + unclaimed:
                in_hand = at in held
                blame = in_hand and len(held + unclaimed) == 1
                self.come_back(at, suspect=in_hand, blame=blame)
        if now >= self.grace_s:
            self.grace_s = 0.0
            for at in self.twin.ids("in_doubt"):
                self.twin.tasks[at].state = "ready"
        self.lost = {kind: until for kind, until in self.lost.items() if until > now}
        for at in [] if self.grace_s else waiting:
            task = self.twin.tasks[at]
            if task.refused and self.known() and self.known() <= task.refused:
                task.state, task.suspect = "computed", False
        self.bench.owner.tick()
        self.commit()

    @rule()
    def crash(self) -> None:
        self.bench.crash()
        self.twin = copy.deepcopy(self.committed)
        for at in self.twin.ids("leased"):
            self.twin.tasks[at].state = "in_doubt"
        self.attached, self.lost = {}, {}
        lived = self.bench.owner.core.state.frames > 0
        self.grace_s = self.bench.time.seconds + LEASE_S if lived else 0.0
        self.commit()

    # -- what must hold

    @invariant()
    def the_ledger_is_that_of_the_twin(self) -> None:
        if not hasattr(self, "bench"):
            return
        total = self.bench.owner.core.state.total()
        total.require_balanced("everything")
        for state in ("ready", "leased", "computed", "in_doubt", "retired", "dead"):
            ids = self.twin.ids(state)
            lengths = [len(self.twin.tasks[at].tokens) for at in ids]
            expected = Amount.of(np.array(ids, np.int64), np.array(lengths, np.int64))
            assert getattr(total, state) == expected, state
        assert self.bench.owner.core.stranded() == []
        assert self.bench.owner.core.state.audit() == []

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            assert self.bench.owner.verify().differences == []


TestBroker = BrokerMachine.TestCase
TestBroker.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


class UpkeepMachine(BrokerMachine):
    """The same over a journal on a simulated disk, whose front is cleared and copied forward all the time."""

    def make_bench(self) -> Bench:
        limits = Limits(lease_s=LEASE_S, attempts_max=ATTEMPTS_MAX)
        return DiskBench(limits, ops=SimDisk(), segment_bytes=5 * 4096, high_water=1 << 17)

    @rule(ticks=st.integers(1, 6), hurry=st.booleans())
    def keep_up(self, ticks: int, hurry: bool) -> None:
        upkeep = self.bench.owner.upkeep
        assert upkeep is not None
        if hurry:
            self.bench.owner.commit()
            self.bench.owner.journal.roll()  # type: ignore[attr-defined]
            upkeep._share = space.UNDER_PRESSURE
        upkeep.begin_checkpoint()
        for _ in range(ticks):
            upkeep.tick()
        self.commit()

    @rule()
    def verify(self) -> None:
        assert self.bench.owner.verify().differences == []
        self.commit()  # verify commits first, leases too that nobody waited for


TestBrokerWithUpkeep = UpkeepMachine.TestCase
TestBrokerWithUpkeep.settings = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
