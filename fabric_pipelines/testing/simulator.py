"""A seeded world around one broker: producers, workers, completion, a bad network and kills, in simulated time.

    python -m fabric_pipelines.testing.simulator --tasks 5000000 --seed 1

The broker is the real one (`Owner` over a real journal with checkpoints, syncs left out); everything around it
is an actor that sends a message, waits for an answer that may never come, and may be killed at any moment. The
same seed gives the same run. `auditor.py` judges it. Syncs are left out because a killed process keeps its
page cache: what a missing sync costs is shown by the enumeration of crash states, not here.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fabric_pipelines.broker.checkpoint import Checkpoints
from fabric_pipelines.broker.core import Limits
from fabric_pipelines.broker.owner import Owner
from fabric_pipelines.clock import Clock
from fabric_pipelines.errors import FabricError
from fabric_pipelines.journal import Journal, OsFileOps
from fabric_pipelines.testing.actors import Actor, Completion, Producer, Worker
from fabric_pipelines.testing.auditor import Auditor

LATENCY_S, GROUP_S, TIMEOUT_S = 0.0005, 0.003, 2.0
LOST, DOUBLED = 0.01, 0.01  # of requests; answers are lost as often
TICK_S, AUDIT_S, STALLED_S = 0.5, 5.0, 300.0
SHOW_S = 10.0
AWAY_S = (0.5, 6.0)  # how long a killed process stays away


@dataclass(frozen=True, slots=True)
class Plan:
    """tasks: in all; kills: of any kind, spread evenly over the work and drawn from the seed."""

    tasks: int = 100_000
    seed: int = 1
    kills: int = 30
    producers: int = 3
    workers: int = 4
    completions: int = 1
    upload_rows: int = 1000
    submission_tasks: int = 20_000
    lease_s: float = 10.0
    segment_bytes: int = 16 << 20
    checkpoint_bytes: int = 96 << 20


@dataclass(slots=True)
class Outcome:
    """What a run came to; times in seconds, `simulated_s` of the simulated clock."""

    plan: Plan
    lost: int
    doubled: int
    reruns: int
    difference: int
    audits: int
    kills: dict[str, int]
    messages: int
    dropped: int
    repeated: int
    retired: int
    dead: int
    counters: dict[str, int]
    simulated_s: float
    cpu_s: float
    faults: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.lost or self.doubled or self.reruns or self.difference or self.faults)

    def table(self) -> str:
        counters = ("leases", "lane_switches", "duplicates", "late_acks", "expired", "claimed")
        rows = [
            ("tasks", self.plan.tasks),
            ("retired / dead", f"{self.retired} / {self.dead}"),
            ("lost", self.lost),
            ("doubled", self.doubled),
            ("finished work run again", self.reruns),
            ("audits / with a difference", f"{self.audits} / {self.difference}"),
            ("kills", ", ".join(f"{name} {count}" for name, count in self.kills.items())),
            ("messages / lost / doubled", f"{self.messages} / {self.dropped} / {self.repeated}"),
            *((name.replace("_", " "), self.counters[name]) for name in counters),
            ("checkpoints", self.counters["checkpoints"]),
            ("segments dropped", self.counters["segments_dropped"]),
            ("simulated time", f"{self.simulated_s:.0f} s"),
            ("CPU", f"{self.cpu_s:.0f} s"),
        ]
        return "\n".join(f"{name:<28} {value}" for name, value in rows)


class KilledFiles(OsFileOps):
    """Files that a process may leave behind without a word: `kill` closes its descriptors. Nothing is synced."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def lock(self, path: Path) -> int:
        fd = super().lock(path)
        self._open.add(fd)
        return fd

    def open(self, path: Path, *, create: bool = False) -> int:
        fd = super().open(path, create=create)
        self._open.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self._open.discard(fd)
        super().close(fd)

    def fdatasync(self, fd: int) -> None:
        pass

    def fsync(self, fd: int) -> None:
        pass

    def fsync_folder(self, folder: Path) -> None:
        pass

    def forget_cache(self, fd: int) -> None:
        pass

    def kill(self) -> None:
        while self._open:
            os.close(self._open.pop())


class World:
    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.now_s = 1000.0
        self.draw = np.random.default_rng(plan.seed)
        self.auditor = Auditor(plan.tasks, plan.lease_s - 0.5)  # answers are heard a little late
        self.kills: dict[str, int] = {"broker": 0, "worker": 0, "completion": 0, "producer": 0}
        self.messages = self.dropped = self.repeated = 0
        self.counters: dict[str, int] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._answers: list[Callable[[], None]] = []  # wait for the commit
        self._files = KilledFiles()
        self.owner: Owner | None = None
        self._start_broker()
        shares = np.array_split(np.arange(plan.tasks), plan.producers)
        self.producers = [Producer(self, f"p{i}", share) for i, share in enumerate(shares)]
        self.workers = [Worker(self, f"w{i}", i) for i in range(plan.workers)]
        self.completions = [Completion(self, f"c{i}") for i in range(plan.completions)]
        self._kill_at = np.sort(self.draw.integers(0, plan.tasks, plan.kills)).tolist()

    # -- time

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._numbers), act))

    def run(self, progress: Callable[[World], None] | None = None) -> None:
        for actor in (*self.producers, *self.workers, *self.completions):
            actor.start()
        self.after(TICK_S, self._tick)
        self.after(AUDIT_S, self._audit)
        shown, settled, moved_s = 0.0, 0, self.now_s
        while not self._finished():
            self.now_s, _, act = heapq.heappop(self._events)
            act()
            while self._kill_at and self.auditor.settle_acked >= self._kill_at[0]:
                self._kill_at.pop(0)
                self._kill_one()
            if self.auditor.settle_acked != settled:
                settled, moved_s = self.auditor.settle_acked, self.now_s
            if self.now_s - moved_s > STALLED_S:
                self._say_stalled()
                return
            if progress and time.monotonic() - shown > SHOW_S:
                shown = time.monotonic()
                progress(self)

    def _say_stalled(self) -> None:
        total = self.owner.status().total.as_json() if self.owner is not None else "away"
        self.auditor.faults.append(f"nothing was settled for {STALLED_S} s; the broker: {total}")

    def _finished(self) -> bool:
        """Every producer has seen the end of its last submission, and the broker is there to be audited."""
        return self.owner is not None and all(producer.finished for producer in self.producers)

    # -- the broker and the way to it

    def _start_broker(self) -> None:
        clock = Clock(lambda: self.now_s, lambda: round(self.now_s * 1e6))
        journal = Journal.open(
            self.folder,
            segment_bytes=self.plan.segment_bytes,
            clock=clock,
            ops=self._files,
            lazy=True,
        )
        self.owner = Owner(
            journal,
            Limits(lease_s=self.plan.lease_s, computed_high_water=50_000),
            journal_high_water=8 << 30,
            clock=clock,
            checkpoints=Checkpoints(self.folder, journal.journal_id, self._files),
            checkpoint_bytes=self.plan.checkpoint_bytes,
        )
        self._earlier = dict(self.counters)

    def collect(self) -> None:
        """Counters of the broker's lives add up."""
        assert self.owner is not None
        for name, value in self.owner.status().counters.items():
            self.counters[name] = self._earlier.get(name, 0) + value

    def send(
        self,
        actor: Actor,
        act: Callable[[Owner], Any],
        then: Callable[[Any], None],
        fail: Callable[[FabricError | None], None],
        *,
        durable: bool = True,
    ) -> None:
        """One request. `then` gets the answer, `fail` the refusal or None when none came; neither, if the
        actor was killed meanwhile."""
        self.messages += 1
        request = _Request(self, actor, actor.life, act, then, fail, durable)
        chance = self.draw.random()
        if chance < LOST:
            self.dropped += 1
        else:
            self.after(LATENCY_S, request.arrive)
            if chance < LOST + DOUBLED:
                self.repeated += 1
                self.after(LATENCY_S + float(self.draw.exponential(0.5)), request.arrive_again)
        self.after(TIMEOUT_S, request.give_up)

    def answer_later(self, answer: Callable[[], None]) -> None:
        if not self._answers:
            self.after(GROUP_S, self._commit)
        self._answers.append(answer)

    def _commit(self) -> None:
        if self.owner is not None:
            self.owner.commit()
            answers, self._answers = self._answers, []
            for answer in answers:
                answer()

    def _tick(self) -> None:
        if self.owner is not None:
            self.owner.tick()
            self.owner.commit()
        self.after(TICK_S, self._tick)

    def _audit(self) -> None:
        if self.owner is not None:
            self.auditor.audit(self.owner.status())
        self.after(AUDIT_S, self._audit)

    # -- kills

    def _kill_one(self) -> None:
        name = str(self.draw.choice(list(self.kills), p=[0.3, 0.4, 0.15, 0.15]))
        self.kills[name] += 1
        away_s = float(self.draw.uniform(*AWAY_S))
        if name == "broker":
            if self.owner is not None:
                self.after(float(self.draw.uniform(0, GROUP_S)), lambda: self._kill_broker(away_s))
            return
        pools: dict[str, Sequence[Actor]] = {
            "worker": self.workers,
            "completion": self.completions,
            "producer": self.producers,
        }
        pool = pools[name]
        pool[int(self.draw.integers(len(pool)))].kill(away_s)

    def _kill_broker(self, away_s: float) -> None:
        if self.owner is None:
            return
        self.collect()
        self.auditor.broker_lost(self.now_s)
        self.owner = None
        self._answers = []
        self._files.kill()
        self.after(away_s, self._start_broker)

    def end(self) -> None:
        """Nothing is on its way any more: the last audit, by messages and by the log itself."""
        if self.owner is None:
            self._start_broker()
        assert self.owner is not None
        self.owner.commit()
        self.auditor.audit(self.owner.status(), quiet=True)
        self.auditor.finish()
        self.auditor.faults += self.owner.verify().differences
        self.collect()
        self.owner.journal.close()


@dataclass(slots=True)
class _Request:
    world: World
    actor: Actor
    life: int
    act: Callable[[Owner], Any]
    then: Callable[[Any], None]
    fail: Callable[[FabricError | None], None]
    durable: bool
    answered: bool = False

    def arrive(self) -> None:
        owner = self.world.owner
        if owner is None:
            return
        try:
            found = self.act(owner)
        except FabricError as refusal:
            self._answer(partial(self.fail, refusal))
            return
        answer = partial(self._answer, partial(self.then, found))
        if self.durable:
            self.world.answer_later(answer)
        else:
            answer()

    def arrive_again(self) -> None:
        """A copy of the request, late: whatever it does, nobody hears of it."""
        if self.world.owner is not None:
            try:
                self.act(self.world.owner)
            except FabricError:
                return

    def _answer(self, tell: Callable[[], None]) -> None:
        if self.world.draw.random() < LOST:
            self.world.dropped += 1
        else:
            self.world.after(LATENCY_S, lambda: self._tell(tell))

    def _tell(self, tell: Callable[[], None]) -> None:
        if not self.answered and self.life == self.actor.life:
            self.answered = True
            tell()

    def give_up(self) -> None:
        self._tell(lambda: self.fail(None))


def simulate(
    plan: Plan, *, progress: Callable[[World], None] | None = None, folder: Path | None = None
) -> Outcome:
    """Run to the end and judge. The journal lies in a temporary folder (under `folder`, if given)."""
    begun_s = time.process_time()
    with tempfile.TemporaryDirectory(dir=folder) as home:
        world = World(plan, Path(home) / "journal")
        world.run(progress)
        world.end()
    tally, total = world.auditor.tally, world.counters
    return Outcome(
        plan=plan,
        lost=tally.lost,
        doubled=tally.doubled,
        reruns=tally.reruns,
        difference=tally.difference,
        audits=world.auditor.audits,
        kills=world.kills,
        messages=world.messages,
        dropped=world.dropped,
        repeated=world.repeated,
        retired=int(world.auditor.landed.sum()),
        dead=int(world.auditor.buried.sum()),
        counters=total,
        simulated_s=world.now_s - 1000.0,
        cpu_s=time.process_time() - begun_s,
        faults=world.auditor.faults,
    )


class Progress:
    """A line now and then: how far, and how long it will still take at this rate."""

    def __init__(self) -> None:
        self._begun_s = time.monotonic()

    def __call__(self, world: World) -> None:
        done, tasks = world.auditor.settle_acked, world.plan.tasks
        took_s = time.monotonic() - self._begun_s
        left_s = took_s * (tasks - done) / done if done else 0.0
        eta = f"{left_s // 60:.0f} min {left_s % 60:02.0f} s left" if done else "just begun"
        sys.stderr.write(
            f"{done:>10,} of {tasks:,} settled ({done / tasks:4.0%}), {sum(world.kills.values())} kills, "
            f"{world.auditor.audits} audits, {world.now_s - 1000:.0f} s simulated, "
            f"{time.process_time():.0f} s CPU, {eta}\n"
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Simulate a broker and those around it, with kills."
    )
    parser.add_argument("--tasks", type=int, default=Plan().tasks)
    parser.add_argument("--seed", type=int, default=Plan().seed)
    parser.add_argument(
        "--kills", type=int, default=0, help="default: one per 20,000 tasks, 30 at least"
    )
    given = parser.parse_args(argv)
    kills = given.kills or max(30, given.tasks // 20_000)
    outcome = simulate(Plan(tasks=given.tasks, seed=given.seed, kills=kills), progress=Progress())
    sys.stdout.write(outcome.table() + "\n")
    for fault in outcome.faults:
        sys.stdout.write(f"fault: {fault}\n")
    return 0 if outcome.clean else 1


if __name__ == "__main__":
    sys.exit(main())
