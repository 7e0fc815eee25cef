"""The journal against the plainest twin there is: two lists, what was appended and what was acknowledged."""

from __future__ import annotations

import random
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fabric_pipelines.clock import Clock
from fabric_pipelines.journal import Journal
from fabric_pipelines.testing.sim_disk import SimDisk, crash_states

FOLDER = Path("/simulated/journal")
STILL = Clock(monotonic_s=lambda: 0.0, wall_us=lambda: 7)


class JournalMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.disk = SimDisk()
        self.journal: Journal
        self.appended: list[bytes] = []
        self.acked = 0
        self.needed_from = 1

    def _open(self) -> None:
        self.journal = Journal.open(FOLDER, segment_bytes=4096, clock=STILL, ops=self.disk)

    @initialize()
    def create(self) -> None:
        self._open()

    @rule(size=st.integers(0, 1500), fill=st.integers(0, 255))
    def append(self, size: int, fill: int) -> None:
        if self.journal._group_bytes + size > 3500:
            self.commit()
        lsn = self.journal.append(1, bytes([fill]) * size, rows=1, time_us=1)
        self.appended.append(bytes([fill]) * size)
        assert lsn == len(self.appended)

    @rule()
    def commit(self) -> None:
        self.acked = self.journal.commit()
        assert self.acked == len(self.appended)

    @rule()
    def write_without_sync(self) -> None:
        assert self.journal.write() == len(self.appended)
        self.acked = self.journal.durable_lsn

    @rule()
    def mark_durable(self) -> None:
        self.journal.mark_durable()
        self.acked = self.journal.durable_lsn

    @precondition(lambda self: self.acked == len(self.appended) > 3)
    @rule(share=st.floats(0, 1))
    def recycle(self, share: float) -> None:
        self.needed_from = max(self.needed_from, int(self.acked * share))
        self.journal.recycle_below(self.needed_from)

    @rule()
    def close_and_reopen(self) -> None:
        written = self.journal.write()
        self.journal.close()
        self._open()
        assert self.journal.durable_lsn == written
        self.acked = written

    @rule(seed=st.integers(0, 1000))
    def crash(self, seed: int) -> None:
        states = list(crash_states(self.disk, seed=seed, subsets=4))
        last = max(state.after_ops for state in states)  # what came later changed nothing
        states = [state for state in states if state.after_ops == last]
        self.journal._stopped = "crashed"
        self.journal.close()
        self.disk = SimDisk(random.Random(seed).choice(states).image)
        self._open()
        recovered = self.journal.durable_lsn
        assert self.acked <= recovered <= len(self.appended)
        self.appended = self.appended[:recovered]
        self.acked = recovered

    @precondition(lambda self: self.journal.first_lsn <= self.journal.durable_lsn)
    @rule(data=st.data())
    def read_any(self, data: st.DataObject) -> None:
        lsn = data.draw(st.integers(self.journal.first_lsn, self.journal.durable_lsn))
        assert bytes(self.journal.read(lsn).payload) == self.appended[lsn - 1]

    @invariant()
    def replay_is_the_list(self) -> None:
        if not hasattr(self, "journal"):
            return
        first = self.journal.first_lsn
        assert first <= max(self.needed_from, 1)
        found = [bytes(frame.payload) for frame in self.journal.replay()]
        written = self.journal.next_lsn - 1 - len(self.journal._group)
        assert found == self.appended[first - 1 : written]

    def teardown(self) -> None:
        if hasattr(self, "journal"):
            self.journal.close()


TestJournalMachine = JournalMachine.TestCase
TestJournalMachine.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
