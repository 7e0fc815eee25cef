"""How the supply is shared out: unlike profiles on one backlog, and tenants that take turns.

Part of `fabric bench supply`. As there, every decision is the broker's own, lengths are seeded, consumers are simulated,
and no figure depends on the machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fabric_pipelines.bench.supply_quality import (
    CACHED_BLOCKS,
    EMBED,
    GENERATE,
    Counts,
    Desk,
    Prompts,
    Run,
    log_normal_lengths,
    log_normal_prompts,
    reused,
)
from fabric_pipelines.records.batch import Budget
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.records.shape import aligned_lengths

SMALL = Profile(max_batch_size=32, max_num_tokens=4096, kv_cache_tokens=0, window_tokens=0)
LARGE = Profile(max_batch_size=512, max_num_tokens=32_768, kv_cache_tokens=0, window_tokens=0)
SECONDS_A_TOKEN = 1e-4  # of a small one; a card computes as much faster as its step is larger


@dataclass(frozen=True, slots=True)
class Fill:
    """What one of several unlike sessions was given. fill: mean of the larger share of its budget, sequences or padded
    tokens, that a lease took; full: share of leases that no other task of that shape would have fitted in;
    full_until: how much of the backlog had been handed out when it first got one that was not."""

    profile: str
    leases: int
    tasks: int
    fill: float
    full: float
    full_until: float


def unlike(tasks: int = 60_000, seed: int = 2026) -> list[Fill]:
    """A small and a large session, each as fast as its step is large, on one backlog of log-normal single-pass prompts."""
    lengths = log_normal_lengths(tasks, seed)
    desk = Desk()
    desk.submit(lengths, np.zeros_like(lengths), sampling=EMBED)
    aligned = aligned_lengths(lengths)
    profiles = {"small": SMALL, "large": LARGE}
    for name, profile in profiles.items():
        desk.attach(name, profile)
    got: dict[str, list[tuple[int, float, bool, int]]] = {name: [] for name in profiles}
    given, turns = 0, [(0.0, name) for name in profiles]
    while turns:
        now, name = heapq.heappop(turns)
        profile = profiles[name]
        budget = Budget(profile.max_batch_size, profile.max_num_tokens, None)
        batch = desk.lease(name, budget)
        if not len(batch):
            continue
        desk.finish(name, batch)
        shape = int(aligned[batch].max())
        step = shape * len(batch)
        fill = max(len(batch) / budget.sequences, step / budget.tokens)
        is_full = len(batch) == budget.sequences or step + shape > budget.tokens
        got[name].append((len(batch), fill, is_full, given))
        given += len(batch)
        seconds = step * SECONDS_A_TOKEN * SMALL.max_num_tokens / budget.tokens
        heapq.heappush(turns, (now + seconds, name))
    assert not desk.differences()
    return [_fill(name, leases, tasks) for name, leases in got.items()]


def _fill(name: str, leases: Sequence[tuple[int, float, bool, int]], tasks: int) -> Fill:
    counts, fills, full, before = (np.array(column) for column in zip(*leases, strict=True))
    thin = np.flatnonzero(~full)
    return Fill(
        profile=name,
        leases=len(leases),
        tasks=int(counts.sum()),
        fill=float(fills.mean()),
        full=float(full.mean()),
        full_until=float(before[thin[0]] / tasks) if len(thin) else 1.0,
    )


@dataclass(frozen=True, slots=True)
class Shares:
    """Two tenants with a backlog each, and `consumers` that serve both. gap_leases: the largest difference in prompt
    tokens leased to one and the other over any window while both had work, in largest leases."""

    consumers: int
    hit_rate: float
    bound: float
    lane_switches: int
    leases: int
    gap_leases: float
    differences: int


class _TwoTenants(Desk):
    """Two tenants' prompts; keeps how far one is ahead of the other after each lease."""

    def __init__(self, prompts: Sequence[Prompts]) -> None:
        super().__init__()
        self.sizes = [int(one.prompt.sum()) for one in prompts]
        self._owner = np.repeat(np.arange(2), [len(one.prompt) for one in prompts])
        self._prompt = np.concatenate([one.prompt for one in prompts])
        self.largest = 0
        self.served = [[0], [0]]
        for name, one in zip("ab", prompts, strict=True):
            self.submit(one.prompt, one.new, one.tokens, sampling=GENERATE, tenant=name)

    def lease(self, name: str, budget: Budget) -> Counts:
        found = super().lease(name, budget)
        if len(found):
            mine = int(self._owner[found[0]])
            tokens = int(self._prompt[found].sum())
            self.largest = max(self.largest, tokens)
            for at, row in enumerate(self.served):
                row.append(row[-1] + (tokens if at == mine else 0))
        return found

    @property
    def gap_leases(self) -> float:
        """While both had at least a lease of work each."""
        a, b = (np.array(row) for row in self.served)
        both = (a <= self.sizes[0] - self.largest) & (b <= self.sizes[1] - self.largest)
        ahead = (a - b)[both]
        return float((ahead.max() - ahead.min()) / self.largest)


def tenants(consumers: int, documents: int = 1000) -> Shares:
    parts = [log_normal_prompts(documents, seed=seed) for seed in (11, 12)]
    desk = _TwoTenants(parts)
    whole = Prompts(
        np.concatenate([one.tokens for one in parts]),
        np.concatenate([one.prompt for one in parts]),
        np.concatenate([one.new for one in parts]),
        np.concatenate([one.output for one in parts]),
        chains=[chain for one in parts for chain in one.chains],
    )
    run = Run(whole, consumers, seed=3, desk=desk)
    total = int(whole.prompt.sum())
    hits = sum(
        reused((whole.chains[task] for task in one.started), CACHED_BLOCKS) for one in run.pool
    )
    return Shares(
        consumers=consumers,
        hit_rate=hits / total,
        bound=reused(whole.chains, 1 << 60) / total,
        lane_switches=desk.core.counters["lane_switches"],
        leases=desk.core.counters["leases"],
        gap_leases=desk.gap_leases,
        differences=len(desk.differences()),
    )


def measure(tasks: int = 60_000, documents: int = 1000) -> dict[str, Any]:
    """JSON-able."""
    shares = [tenants(consumers, documents) for consumers in (1, 2, 4)]
    return {
        "profiles": [asdict(fill) for fill in unlike(tasks)],
        "tenants": [asdict(share) for share in shares],
    }


def table(found: dict[str, Any]) -> str:
    """For the page and the terminal."""
    fills, shares = found["profiles"], found["tenants"]
    lines = [
        "| profile | leases | tasks | mean fill | full leases | full until |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row['profile']} | {row['leases']} | {row['tasks']} | {row['fill']:.1%} | {row['full']:.1%} | "
            f"{row['full_until']:.1%} |"
            for row in fills
        ),
        "",
        "| consumers of two tenants | hit rate | bound | lane switches | leases | widest gap |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['consumers']} | {row['hit_rate']:.3f} | {row['bound']:.3f} | {row['lane_switches']} | "
        f"{row['leases']} | {row['gap_leases']:.1f} leases |"
        for row in shares
    ]
    return "\n".join(lines)
