"""Quality of the supply, apart from its speed: padding, prefix reuse, lane switches, idle consumers.

`fabric bench supply`. Everything is decided by the broker's own core (`Desk` applies its facts, no disk and no
socket); the rest is arithmetic on seeded log-normal lengths. Consumers are simulated: slots, a window, decode
that takes as long as its output, a prefix cache of a given number of blocks. No figure depends on the machine.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.broker.core import Core, Limits, Session
from fabric_pipelines.broker.facts import (
    Computed,
    Enqueued,
    Fact,
    SubmissionClosed,
    SubmissionOpened,
    Verdict,
)
from fabric_pipelines.broker.lanes import shapes
from fabric_pipelines.broker.prefix import BLOCK, prefix_keys
from fabric_pipelines.broker.state import BatchColumns, State
from fabric_pipelines.records.batch import Budget
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.records.shape import output_classes
from fabric_pipelines.records.submission import Submission

Counts = npt.NDArray[np.int64]
ENGINE = "simulated@engine"
EMBED = {"kind": "embed", "pooling": "mean", "normalise": True}
GENERATE = {"kind": "generate", "temperature": 0.0, "top_k": 1, "seed": 0}
UPLOAD_ROWS = 4096


class Desk:
    """A core over closed submissions; facts are applied and forgotten."""

    def __init__(self) -> None:
        self.core = Core(State(1), Limits())
        self._lsn = 0

    def submit(
        self,
        prompt: Counts,
        new: Counts,
        tokens: npt.NDArray[np.uint32] | None = None,
        *,
        sampling: dict[str, Any],
        tenant: str = "default",
    ) -> None:
        """One closed submission; its tasks are numbered on from those before it."""
        base = self.core.state.index.count
        header = Submission(
            submission_id=f"{len(self.core.state.submissions):064x}",
            function="bench",
            engine=ENGINE,
            sampling=sampling,
            vocab_size=1 << 31,
            tasks=len(prompt),
            tokens=int(prompt.sum()),
            fingerprint="",
            tenant=tenant,
        )
        self._apply([SubmissionOpened(header)])
        ends = np.cumsum(prompt)
        for first in range(0, len(prompt), UPLOAD_ROWS):
            rows = slice(first, first + UPLOAD_ROWS)
            begin = int(ends[first] - prompt[first])
            keys = (
                np.zeros(len(prompt[rows]), np.uint64)
                if tokens is None
                else prefix_keys(tokens[begin : int(ends[rows][-1])], prompt[rows])
            )
            shape = shapes(header, prompt[rows], new[rows])
            columns = BatchColumns(prompt[rows], new[rows], shape, keys)
            fact = Enqueued(header.submission_id, 0, first, base + first, len(keys), b"", 2)
            self._apply([fact], columns)
        self._apply([SubmissionClosed(header.submission_id)])
        self._apply(self.core.lane_steps())

    def attach(self, name: str, profile: Profile) -> None:
        session = Session(name, ENGINE, "", "cpu:0", profile, float("inf"))
        self._apply(self.core.attach(session, ())[0])

    def lease(self, name: str, budget: Budget) -> Counts:
        """Tasks in the order in which they run; empty when nothing is left."""
        facts, grant = self.core.lease(name, budget, 0.0)
        self._apply(facts)
        return np.zeros(0, np.int64) if grant is None else grant.tasks

    def finish(self, name: str, tasks: Counts) -> None:
        ok = np.full(len(tasks), Verdict.OK, np.uint8)
        self._apply([Computed(name, tasks, ok, np.zeros(len(tasks), np.int32), 0, b"")])

    def differences(self) -> list[str]:
        """Where the accounts, the states of the tasks and what was handed out do not agree; all must be computed."""
        state, total = self.core.state, self.core.state.total()
        found = state.audit() + self.core.stranded()
        if total.computed != total.enqueued:
            found.append(f"{total.enqueued} enqueued, {total.computed} computed")
        return found

    def _apply(self, facts: Iterable[Fact], columns: BatchColumns | None = None) -> None:
        for fact in facts:
            self._lsn += 1
            self.core.apply(fact, self._lsn, columns)


# -- padding


@dataclass(frozen=True, slots=True)
class Padding:
    """Share of what padded batches compute that is padding, by policy; how ours came to it."""

    first_come: float
    powers_of_two: float
    fixed_64: float
    ours: float
    lanes: int
    lane_switches: int
    leases: int
    differences: int  # of the ledger at the end, against a recount


def log_normal_lengths(tasks: int, seed: int) -> Counts:
    """Mean 452, p99 about 2,112 tokens."""
    draw = np.random.default_rng(seed)
    return np.clip(draw.lognormal(5.85, 0.74, tasks), 1, 4096).astype(np.int64)


def padding(tasks: int = 60_000, batch: int = 64, seed: int = 2026) -> Padding:
    lengths = log_normal_lengths(tasks, seed)
    desk = Desk()
    desk.submit(lengths, np.zeros_like(lengths), sampling=EMBED)
    desk.attach("w", Profile(batch, 1 << 30, 0, 0))
    padded = 0
    while len(got := desk.lease("w", Budget(batch, 1 << 30, None))):
        padded += int(lengths[got].max()) * len(got)
        desk.finish("w", got)
    counters = desk.core.counters
    return Padding(
        first_come=_waste(lengths, np.zeros_like(lengths), batch),
        powers_of_two=_waste(lengths, output_classes(lengths), batch),
        fixed_64=_waste(lengths, (lengths + 63) // 64, batch),
        ours=1 - int(lengths.sum()) / padded,
        lanes=len(desk.core.state.lanes),
        lane_switches=counters["lane_switches"],
        leases=counters["leases"],
        differences=len(desk.differences()),
    )


def _waste(lengths: Counts, lanes: Counts, batch: int) -> float:
    """Batches of arrival order inside each lane, each padded to its longest."""
    padded = 0
    for lane in np.unique(lanes):
        mine = lengths[lanes == lane]
        cuts = [mine[at : at + batch] for at in range(0, len(mine), batch)]
        padded += sum(int(cut.max()) * len(cut) for cut in cuts)
    return 1 - int(lengths.sum()) / padded


# -- prefixes


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts end to end, their lengths, their caps and how much of each cap is used; `chains[i]` names each
    whole block of prompt i by all that comes before it."""

    tokens: npt.NDArray[np.uint32]
    prompt: Counts
    new: Counts
    output: Counts
    chains: list[list[int]]


def log_normal_prompts(
    documents: int = 2000,
    *,
    systems: int = 8,
    each: int = 10,
    head: int = 160,
    stem: int = 128,
    seed: int = 1,
) -> Prompts:
    """`systems` system prompts (median `head` tokens), `documents` with one of them before each (median
    `stem`), `each` questions to a document (median 32), outputs of median 64; all log-normal, shuffled."""
    draw = np.random.default_rng(seed)

    def text(median: float) -> npt.NDArray[np.uint32]:
        length = max(1, int(draw.lognormal(np.log(median), 0.6)))
        return draw.integers(0, 32_000, length, dtype=np.uint32)

    heads = [text(head) for _ in range(systems)]
    prompts = []
    for _ in range(documents):
        trunk = np.concatenate([heads[draw.integers(systems)], text(stem)])
        prompts += [np.concatenate([trunk, text(32)]) for _ in range(each)]
    prompts = [prompts[at] for at in draw.permutation(len(prompts))]
    output = np.clip(draw.lognormal(np.log(64), 0.6, len(prompts)), 1, 1024).astype(np.int64)
    new = np.ceil(output * draw.uniform(1, 2, len(prompts))).astype(np.int64)
    lengths = np.array([len(prompt) for prompt in prompts], np.int64)
    return Prompts(np.concatenate(prompts), lengths, new, output, [_chain(p) for p in prompts])


def _chain(prompt: npt.NDArray[np.uint32]) -> list[int]:
    names, before = [], 0
    for at in range(0, len(prompt) - BLOCK + 1, BLOCK):
        before = hash((before, prompt[at : at + BLOCK].tobytes()))
        names.append(before)
    return names


def reused(chains: Iterable[Sequence[int]], cached_blocks: int) -> int:
    """Tokens found in a cache of prefix blocks that forgets the least recently used, as engines keep one."""
    cache: OrderedDict[int, None] = OrderedDict()
    found = 0
    for chain in chains:
        hit = True
        for block in chain:
            hit = hit and block in cache
            found += BLOCK * hit
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > cached_blocks:
            cache.popitem(last=False)
    return found


def windowed(keys: npt.NDArray[np.uint64], window: int) -> Counts:
    """Arrival order, sorted inside windows."""
    parts = [
        at + np.argsort(keys[at : at + window], kind="stable") for at in range(0, len(keys), window)
    ]
    return np.concatenate(parts)


# -- consumers


@dataclass(frozen=True, slots=True)
class Pool:
    """What `consumers` with one profile made of a backlog. hit_rate: of prompt tokens, each consumer with its
    own cache; idle: share of slots over the whole run, idle_end: from 95 % of all tasks finished to the end."""

    consumers: int
    hit_rate: float
    idle: float
    idle_end: float
    lane_switches: int
    leases: int
    differences: int  # of the ledger at the end, against a recount


PROFILE = Profile(
    max_batch_size=64, max_num_tokens=8192, kv_cache_tokens=65_536, window_tokens=8192
)
STEP_S, PREFILL_S = 0.02, 2e-5  # a decode step of the batch; a prompt token
CACHED_BLOCKS = 4096  # 65,536 tokens, as many as the profile's KV cache


@dataclass(slots=True)
class _Consumer:
    name: str
    waiting: list[int] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    running: int = 0


class Run:
    """Continuous batching: a slot is filled as soon as it is free, the window once it is half empty. Time is
    simulated; each task takes its prefill and its decode, both jittered."""

    def __init__(
        self, prompts: Prompts, consumers: int, seed: int, desk: Desk | None = None
    ) -> None:
        """`desk`: with these prompts in it already, in their order."""
        self.prompts = prompts
        self.desk = desk or Desk()
        if desk is None:
            self.desk.submit(prompts.prompt, prompts.new, prompts.tokens, sampling=GENERATE)
        jitter = np.random.default_rng(seed).uniform(0.8, 1.25, len(prompts.prompt))
        self.took = (prompts.prompt * PREFILL_S + prompts.output * STEP_S) * jitter
        self.began = np.zeros(len(self.took))
        self.pool = [_Consumer(f"w{at}") for at in range(consumers)]
        self._events: list[tuple[float, int, int]] = []  # when a task ends, who runs it, which
        for one in self.pool:
            self.desk.attach(one.name, PROFILE)
        for at in range(consumers):
            self._fill(at, 0.0)
        while self._events:
            now, at, task = heapq.heappop(self._events)
            self.pool[at].running -= 1
            self.desk.finish(self.pool[at].name, np.array([task], np.int64))
            self._fill(at, now)

    def _fill(self, at: int, now: float) -> None:
        one, lengths = self.pool[at], self.prompts.prompt
        free = PROFILE.max_batch_size - one.running
        ahead = int(lengths[one.waiting].sum())
        if len(one.waiting) < free or ahead < PROFILE.window_tokens // 2:
            room = PROFILE.kv_cache_tokens if len(one.waiting) < free else PROFILE.window_tokens
            budget = Budget(PROFILE.max_batch_size, room - ahead, PROFILE.kv_cache_tokens)
            one.waiting += self.desk.lease(one.name, budget).tolist()
        for task in one.waiting[:free]:
            one.running += 1
            one.started.append(task)
            self.began[task] = now
            heapq.heappush(self._events, (now + float(self.took[task]), at, task))
        del one.waiting[:free]

    def idle_from(self, share: float) -> float:
        """Share of slots that stand idle from the moment when `share` of all tasks had finished."""
        ended = self.began + self.took
        mark = float(np.quantile(ended, share)) if share else 0.0
        busy = np.clip(ended - np.maximum(self.began, mark), 0, None).sum()
        slots = len(self.pool) * PROFILE.max_batch_size
        return float(1 - busy / (slots * (ended.max() - mark)))


def run_pool(prompts: Prompts, consumers: int, seed: int = 3) -> Pool:
    run = Run(prompts, consumers, seed)
    assert sorted(task for one in run.pool for task in one.started) == list(range(len(run.took)))
    found = sum(
        reused((prompts.chains[task] for task in one.started), CACHED_BLOCKS) for one in run.pool
    )
    return Pool(
        consumers=consumers,
        hit_rate=found / int(prompts.prompt.sum()),
        idle=run.idle_from(0.0),
        idle_end=run.idle_from(0.95),
        lane_switches=run.desk.core.counters["lane_switches"],
        leases=run.desk.core.counters["leases"],
        differences=len(run.desk.differences()),
    )


# -- the whole


def prefix_by_order(prompts: Prompts) -> dict[str, float]:
    """Hit rate of one cache by the order of its prompts, without a broker; `bound`: a cache without limit."""
    keys = prefix_keys(prompts.tokens, prompts.prompt)
    orders = {
        "arrival": np.arange(len(keys)),
        "windows_of_256": windowed(keys, 256),
        "windows_of_2048": windowed(keys, 2048),
        "lanes_by_output_class": np.lexsort((keys, -output_classes(prompts.new))),
        "doubling_depths": windowed(
            prefix_keys(prompts.tokens, prompts.prompt, layout=1), len(keys)
        ),
        "whole_backlog": windowed(keys, len(keys)),
    }
    total = int(prompts.prompt.sum())
    rates = {
        name: reused((prompts.chains[task] for task in order.tolist()), CACHED_BLOCKS) / total
        for name, order in orders.items()
    }
    return rates | {"bound": reused(prompts.chains, 1 << 60) / total}


def measure(documents: int = 2000, tasks: int = 60_000) -> dict[str, Any]:
    """JSON-able. The six figures first: the worst over 1, 2 and 4 consumers where there are several."""
    padded = padding(tasks)
    prompts = log_normal_prompts(documents=documents)
    orders = prefix_by_order(prompts)
    long = log_normal_prompts(documents // 2, head=400, stem=400, seed=5)
    pools = [run_pool(prompts, consumers) for consumers in (1, 2, 4)]
    return {
        "padding_waste": padded.ours,
        "prefix_hit_rate": min(pool.hit_rate for pool in pools),
        "prefix_bound": orders["bound"],
        "lane_switches": padded.lane_switches,
        "idle_share": max(pool.idle for pool in pools),
        "differences": padded.differences + sum(pool.differences for pool in pools),
        "padding": asdict(padded),
        "prefix": orders,
        "prefix_long": prefix_by_order(long),
        "consumers": [asdict(pool) for pool in pools],
        "tasks": {"padding": tasks, "prefix": len(prompts.prompt)},
    }


def table(found: dict[str, Any]) -> str:
    """For the page and the terminal."""
    padded = found["padding"]
    policies = ("first_come", "powers_of_two", "fixed_64", "ours")
    lines = [
        "| padding policy | waste |",
        "|---|---|",
        *(f"| {name.replace('_', ' ')} | {padded[name]:.2%} |" for name in policies),
        "",
        f"{padded['lanes']} lanes, {padded['leases']} leases, {padded['lane_switches']} lane switches",
        "",
        "| order of prompts | hit rate | with prompts of three times the length |",
        "|---|---|---|",
        *(
            f"| {name.replace('_', ' ')} | {rate:.3f} | {found['prefix_long'][name]:.3f} |"
            for name, rate in found["prefix"].items()
        ),
        "",
        "| consumers | hit rate | idle | idle in the last 5 % | lane switches | leases |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {pool['consumers']} | {pool['hit_rate']:.3f} | {pool['idle']:.2%} | {pool['idle_end']:.1%} | "
        f"{pool['lane_switches']} | {pool['leases']} |"
        for pool in found["consumers"]
    ]
    lines += ["", f"Differences of the ledgers against a recount: {found['differences']}."]
    return "\n".join(lines)
