"""What is in hand: counts stay exact through any order of take, feed, finish, drop and reattach."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fabric_pipelines.records.lease import LEASE_SCHEMA, Lease
from fabric_pipelines.worker.supply import Supply


def lease_of(sizes: dict[int, tuple[int, int]]) -> Lease:
    """A lease of tasks {id: (prompt tokens, cap)}."""
    columns: dict[str, list[object]] = {
        "task_id": list(sizes),
        "tokens": [[1] * prompt for prompt, _ in sizes.values()],
        "max_new_tokens": [cap for _, cap in sizes.values()],
        "source_row": list(sizes),
        "metadata": [b""] * len(sizes),
        "attempts": [0] * len(sizes),
        "leader": [False] * len(sizes),
    }
    arrays = [pa.array(columns[item.name], item.type) for item in LEASE_SCHEMA]
    tasks = pa.RecordBatch.from_arrays(arrays, schema=LEASE_SCHEMA)
    return Lease(1, "lane", "engine", {"kind": "generate"}, 0, 0, tasks)


class SupplyMachine(RuleBasedStateMachine):
    """The twin keeps every task's size and place in plain dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.supply = Supply()
        self.waiting: list[dict[int, tuple[int, int]]] = []
        self.inside: dict[int, tuple[int, int]] = {}

    @rule(
        sizes=st.dictionaries(
            st.integers(0, 40), st.tuples(st.integers(1, 9), st.integers(0, 5)), min_size=1
        ),
        finished=st.frozensets(st.integers(0, 40), max_size=5),
    )
    def take(self, sizes: dict[int, tuple[int, int]], finished: frozenset[int]) -> None:
        known = {task for part in (*self.waiting, self.inside) for task in part} | finished
        self.supply.take(lease_of(sizes), finished=finished)
        fresh = {task: size for task, size in sizes.items() if task not in known}
        if fresh:
            self.waiting.append(fresh)

    @precondition(lambda self: self.waiting)
    @rule()
    def feed(self) -> None:
        lease = self.supply.next_lease()
        assert lease is not None
        assert lease.tasks.column("task_id").to_pylist() == list(self.waiting[0])
        self.supply.fed()
        self.inside |= self.waiting.pop(0)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        done = data.draw(st.sets(st.sampled_from(sorted(self.inside)), min_size=1))
        self.supply.finish(done)
        for task in done:
            del self.inside[task]

    @rule()
    def drop_waiting(self) -> None:
        assert self.supply.drop_waiting() == [task for part in self.waiting for task in part]
        self.waiting = []

    @rule(valid=st.sets(st.integers(0, 40)))
    def keep(self, valid: set[int]) -> None:
        before = sum(map(len, self.waiting))
        kept = [{t: size for t, size in part.items() if t in valid} for part in self.waiting]
        self.waiting = [part for part in kept if part]
        assert self.supply.keep(valid) == before - sum(map(len, self.waiting))

    @invariant()
    def counts_are_exact(self) -> None:
        waiting = [size for part in self.waiting for size in part.values()]
        sizes = [*waiting, *self.inside.values()]
        assert len(self.supply) == len(sizes)
        assert self.supply.tokens == sum(prompt for prompt, _ in sizes)
        assert self.supply.kv_tokens == sum(prompt + cap for prompt, cap in sizes)
        assert self.supply.waiting_tokens == sum(prompt for prompt, _ in waiting)
        assert self.supply.inside == len(self.inside)


SupplyMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestSupply = SupplyMachine.TestCase
