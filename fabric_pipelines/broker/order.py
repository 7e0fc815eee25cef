"""The order in which one lane hands out its ready tasks: by prefix key over the whole backlog.

An enqueue leaves a sorted run. Runs are merged when they are small, never above RUN_MAX, and otherwise only
slice by slice as leases need them, so that the first lease is cheap at any backlog. Several consumers walk
contiguous arcs of the order, one each, so that a prefix group goes to one of them; who has none takes one that
nobody walks, or half of the largest: O(consumers x log n) cuts. The walk of an arc is cyclic: what arrives
behind its cursor waits for the next lap, so a stream of small keys starves nobody. What came back from a lease
goes first, and so does what stood aside for a while because nobody could read it. What may have ended a worker goes
before all else, in pieces that no lease crosses (see `Core` on halving).

Knows keys and sequence numbers only, and holds just the numbers, 4 bytes a task: keys are looked up where they
live. Whether a task is still ready is the owner's business: the order may hold tasks that no longer are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fabric_pipelines.broker.unsorted import KeysOf, Numbers, Unsorted

Keys = npt.NDArray[np.uint64]
Sequences = npt.NDArray[np.int64]

RUN_MAX = 1 << 17
SLICE = 1 << 16
KEY_MAX = (1 << 64) - 1
SAMPLES = 64  # keys looked at per run to find the middle of an arc
NOTHING: Sequences = np.zeros(0, np.int64)
NO_NUMBERS = np.zeros(0, np.uint32)


class _Run:
    """Tasks sorted by key; `at` is the first one not yet handed on."""

    __slots__ = ("at", "tasks")

    def __init__(self, tasks: Numbers = NO_NUMBERS) -> None:
        self.tasks, self.at = tasks, 0

    def __len__(self) -> int:
        return len(self.tasks) - self.at

    def left(self) -> Numbers:
        return self.tasks[self.at :]

    def first_from(self, key: int, until: int, keys_of: KeysOf) -> int:
        """Place of the first task at or above `key`, `until` if there is none before."""
        return bisect_left(self.tasks, key, self.at, until, key=keys_of)


def _packed(tasks: Sequences) -> Numbers:
    return tasks.astype(np.uint32) if tasks.max(initial=0) < 1 << 32 else tasks


def _joined(runs: list[_Run]) -> Numbers:
    return np.concatenate([NO_NUMBERS, *(run.left() for run in runs)])


def _merged(runs: list[_Run], keys_of: KeysOf) -> _Run:
    tasks = _joined(runs)
    # sorted runs merge in linear time
    return _Run(tasks[np.argsort(keys_of(tasks), kind="stable")])


@dataclass(slots=True)
class _Arc:
    """A stretch of the order from key `low` up to the next arc's. `slice` goes out next, as it lies, and may hold what is
    left of another stretch; `lap` are
    sorted runs of keys at or above `cursor`, `next_lap` of keys below it. `unsorted`, by ascending keys, belongs
    to the lap."""

    keys_of: KeysOf
    low: int = 0
    owner: str | None = None
    slice: _Run = field(default_factory=_Run)
    lap: list[_Run] = field(default_factory=list)
    next_lap: list[_Run] = field(default_factory=list)
    cursor: int = 0
    unsorted: list[Unsorted] = field(default_factory=list)

    @property
    def runs(self) -> list[_Run]:
        return [self.slice, *self.lap, *self.next_lap]

    @property
    def goes_on(self) -> bool:
        """Something lies behind the slice."""
        return bool(self.lap or self.next_lap or self.unsorted)

    def __len__(self) -> int:
        return sum(map(len, self.runs)) + sum(map(len, self.unsorted))

    def tasks(self) -> Numbers:
        """All that is in here, in no order."""
        parts = [part for piece in self.unsorted for part in piece.parts]
        return np.concatenate([_joined(self.runs), *parts])

    def add(self, keys: Keys, tasks: Sequences) -> None:
        behind, numbers = int(np.searchsorted(keys, np.uint64(self.cursor))), _packed(tasks)
        _push(self.next_lap, numbers[:behind], self.keys_of)
        _push(self.lap, numbers[behind:], self.keys_of)

    def extend_slice(self) -> None:
        """Cut the next SLICE or so tasks off the runs, in order over all of them.

        The cut is at the smallest of the keys that end each run's share, so no run gives more than its share
        and everything left has a key at or above the cut. Equal keys stay behind in the other runs, or one
        lane of short prompts (all keys 0) would be sorted at once.
        """
        bound = self._sort_some()
        if not self.lap:
            self.lap, self.next_lap, self.cursor = self.next_lap, [], self.low
        if not self.lap:
            return
        share = max(256, SLICE // len(self.lap))
        upto = [min(run.at + share, len(run.tasks)) for run in self.lap]
        lasts = [run.tasks[end - 1] for run, end in zip(self.lap, upto, strict=True)]
        cut, chosen = min((int(self.keys_of(last)), i) for i, last in enumerate(lasts))
        until = cut
        if bound is not None and bound < cut:
            cut, until, chosen = (
                bound,
                bound + 1,
                -1,
            )  # what is not sorted yet has no key below the bound
        parts = []
        for i, (run, end) in enumerate(zip(self.lap, upto, strict=True)):
            if i != chosen:
                end = run.first_from(until, end, self.keys_of)
            if end > run.at:
                parts.append(_Run(run.tasks[run.at : end]))
                run.at = end
        self.lap = [run for run in self.lap if len(run)]
        self.cursor = cut
        self.slice = _Run(_joined([self.slice, _merged(parts, self.keys_of)]))

    def _sort_some(self) -> int | None:
        """Sorted runs hold the smallest keys of the lap on return; up to which key, None for all of them."""
        while self.unsorted:
            low = self.unsorted[0].low
            if any(int(self.keys_of(run.tasks[run.at])) <= low for run in self.lap):
                return low
            piece, *others = self.unsorted.pop(0).smallest(self.keys_of, RUN_MAX)
            self.unsorted = [*others, *self.unsorted]
            self.lap.append(_Run(piece.sorted(self.keys_of)))
        return None

    def split(self, until: int) -> _Arc:
        """Give the later half away: by key, so that no prefix group is torn more than once; by count where
        all keys are one. The cut lies in this stretch, which ends before key `until`, wherever the keys of the slice
        do: arcs out of order would each take a run of keys that both claim."""
        key = min(max(_middle(self.runs, self.unsorted, self.keys_of), self.low), until)
        kept, taken = _Arc(self.keys_of), _Arc(self.keys_of, key, cursor=max(key, self.cursor))
        tasks = self.slice.left()
        low = self.keys_of(tasks) < np.uint64(key)
        kept.slice, taken.slice = _Run(tasks[low]), _Run(tasks[~low])
        for name in ("lap", "next_lap"):
            for run in getattr(self, name):
                at = run.first_from(key, len(run.tasks), self.keys_of)
                _cut(run, at, getattr(kept, name), getattr(taken, name))
        for piece in self.unsorted:
            _share_out(piece.parted(self.keys_of, key), kept, taken)
        if not len(kept) or not len(taken):
            kept, taken = self._split_by_count(key)
        assert len(kept) + len(taken) == len(self)
        self.slice, self.lap, self.next_lap = kept.slice, kept.lap, kept.next_lap
        self.unsorted = kept.unsorted
        return taken

    def _split_by_count(self, key: int) -> tuple[_Arc, _Arc]:
        kept, taken = _Arc(self.keys_of), _Arc(self.keys_of, key, cursor=self.cursor)
        slices: tuple[list[_Run], list[_Run]] = ([], [])
        _cut(self.slice, self.slice.at + len(self.slice) // 2, *slices)
        kept.slice, taken.slice = _Run(_joined(slices[0])), _Run(_joined(slices[1]))
        for name in ("lap", "next_lap"):
            for run in getattr(self, name):
                _cut(run, run.at + len(run) // 2, getattr(kept, name), getattr(taken, name))
        for piece in self.unsorted:
            _share_out(piece.cut(len(piece) // 2), kept, taken)
        return kept, taken


def _cut(run: _Run, at: int, before: list[_Run], behind: list[_Run]) -> None:
    at = max(at, run.at)
    for part, side in ((slice(run.at, at), before), (slice(at, len(run.tasks)), behind)):
        if part.stop > part.start:
            side.append(_Run(run.tasks[part]))


def _share_out(halves: tuple[Unsorted, Unsorted], kept: _Arc, taken: _Arc) -> None:
    for half, arc in zip(halves, (kept, taken), strict=True):
        if len(half):
            arc.unsorted.append(half)


def _middle(runs: list[_Run], unsorted: list[Unsorted], keys_of: KeysOf) -> int:
    """A key with about half of what the runs hold below it: exact to 1 / SAMPLES of each run."""
    keys, weights = [], []
    for run in runs:
        if len(run):
            last = len(run.tasks) - 1
            picked = np.linspace(run.at, last, min(len(run), SAMPLES)).astype(np.int64)
            keys.append(keys_of(run.tasks[picked]))
            weights.append(np.full(len(picked), len(run) / len(picked)))
    for piece in unsorted:
        keys.append(piece.sample(keys_of))
        weights.append(np.full(len(keys[-1]), len(piece) / len(keys[-1])))
    sample, weight = np.concatenate(keys), np.concatenate(weights)
    by_key = np.argsort(sample, kind="stable")
    below = np.cumsum(weight[by_key])
    at = int(np.searchsorted(below, below[-1] / 2, side="left"))
    return int(sample[by_key[at]])


class PrefixOrder:
    """add / add_front, then peek and advance as somebody; release when that one is gone."""

    __slots__ = ("_ahead", "_arcs", "_aside", "_front", "_keys_of", "rearranged")

    def __init__(self, keys_of: KeysOf) -> None:
        """`keys_of`: the keys of tasks that were added, uint64, for as long as they are in here."""
        self.rearranged = False
        self._keys_of = keys_of
        self._front: deque[Sequences] = deque()
        self._ahead: list[Sequences] = []  # goes into the slice of the next one who looks
        self._aside: deque[Sequences] = deque()
        self._arcs = [_Arc(keys_of)]  # by `low`; the first one's is 0

    def add(self, keys: Keys, tasks: Sequences) -> None:
        """A run sorted by key."""
        lows = np.array(self.lows[1:], np.uint64)
        cuts = [0, *np.searchsorted(keys, lows, side="left").tolist(), len(keys)]
        for arc, (begin, end) in zip(self._arcs, pairwise(cuts), strict=True):
            if end > begin:
                arc.add(keys[begin:end], tasks[begin:end])

    def add_unsorted(self, parts: list[Sequences]) -> None:
        """A whole backlog in no order, before anything else was added."""
        assert not any(map(len, self._arcs)), "an unsorted backlog is what an order begins with"
        whole = Unsorted([_packed(part) for part in parts])
        if len(whole):
            self._arcs[0].unsorted = whole.smallest(self._keys_of, RUN_MAX)

    def add_front(self, tasks: Sequences) -> None:
        """A piece to be handed out before anything else, by itself."""
        if len(tasks):
            self._front.append(tasks)

    def add_ahead(self, tasks: Sequences) -> None:
        """To be handed out before the rest, and together with it."""
        if len(tasks):
            self._ahead.append(tasks)

    def step_aside(self, places: npt.NDArray[np.bool_], who: str) -> None:
        """Of the first tasks that `peek` showed without a front, those at these `places` are not shown any more, until
        `recall`. bool, one for each of the first."""
        arc = self._arc_of(who)
        first, rest = np.split(arc.slice.left(), [len(places)])
        self._aside.append(first[places].astype(np.int64))
        arc.slice = _Run(np.concatenate([first[~places], rest]))

    def recall(self, most: int) -> Sequences:
        """Up to `most` of those that stand aside longest, which are in nobody's way any more: to be added ahead, or to
        stand aside again with `aside`."""
        if not self._aside:
            return NOTHING
        piece = self._aside.popleft()
        if len(piece) > most:
            self._aside.appendleft(piece[most:])
        return piece[:most]

    def aside(self, tasks: Sequences) -> None:
        """To stand aside until `recall`."""
        if len(tasks):
            self._aside.append(tasks)

    def peek(self, limit: int, who: str = "", *, front: bool = True) -> Sequences:
        """Up to `limit` next tasks for this consumer; empty only if there are none at all, or all stand aside. Without
        `front` what goes out by itself is passed over."""
        if front and self._front:
            return self._front[0][:limit]
        arc = self._arc_of(who)
        if self._ahead:
            before = [_Run(_packed(piece)) for piece in self._ahead]
            arc.slice, self._ahead = _Run(_joined([*before, arc.slice])), []
        while True:
            while len(arc.slice) < limit and arc.goes_on:
                arc.extend_slice()
            more = None if len(arc.slice) >= limit else self._take_more(arc)
            if more is None:
                return arc.slice.left()[:limit].astype(np.int64)
            arc = more

    def advance(self, count: int, who: str = "", *, front: bool = True) -> None:
        """Drop the first `count` of what `peek` showed."""
        if front and self._front:
            rest = self._front.popleft()[count:]
            if len(rest):
                self._front.appendleft(rest)
        else:
            self._arc_of(who).slice.at += count

    def remove(self, tasks: Sequences) -> None:
        """Take these out, wherever they are; all of the order is looked at."""
        self._front, self._aside = (
            deque(part for piece in pieces if len(part := piece[~np.isin(piece, tasks)]))
            for pieces in (self._front, self._aside)
        )
        self._ahead = [piece[~np.isin(piece, tasks)] for piece in self._ahead]
        for arc in self._arcs:
            for run in arc.runs:
                held = run.left()
                run.tasks, run.at = held[~np.isin(held, tasks)], 0
            arc.lap = [run for run in arc.lap if len(run)]
            arc.next_lap = [run for run in arc.next_lap if len(run)]
            kept = (piece.without(tasks) for piece in arc.unsorted)
            arc.unsorted = [piece for piece in kept if len(piece)]

    def rearrange(self, keys_of: Callable[[Sequences], Keys]) -> None:
        """Everything but what goes out first, or stands aside, in another order, as one arc."""
        tasks = np.concatenate([arc.tasks() for arc in self._arcs])
        by_key = np.argsort(keys_of(tasks), kind="stable")
        self._arcs = [_Arc(self._keys_of, slice=_Run(tasks[by_key]))]
        self.rearranged = True

    def release(self, who: str) -> None:
        """This consumer will not come back for its arc."""
        for arc in self._arcs:
            if arc.owner == who:
                arc.owner = None

    @property
    def has_front(self) -> bool:
        return bool(self._front)

    @property
    def has_aside(self) -> bool:
        return bool(self._aside)

    @property
    def first_piece(self) -> Sequences:
        """What goes out before anything else; empty if nothing came back."""
        return self._front[0] if self._front else NOTHING

    def tasks(self) -> Sequences:
        """Everything inside, in no order; for audits."""
        apart = (*self._front, *self._ahead, *self._aside)
        return np.concatenate([NOTHING, *apart, *(arc.tasks() for arc in self._arcs)])

    @property
    def arcs(self) -> list[tuple[str | None, int]]:
        """(owner, length) of each, by key."""
        return [(arc.owner, len(arc)) for arc in self._arcs]

    @property
    def lows(self) -> list[int]:
        """The key at which each arc begins; ascending."""
        return [arc.low for arc in self._arcs]

    def _arc_of(self, who: str) -> _Arc:
        for arc in self._arcs:
            if arc.owner == who:
                return arc
        return self._acquire(who)

    def _acquire(self, who: str) -> _Arc:
        """The largest arc that nobody walks, else half of the largest (all of it, if that is one task)."""
        free = [arc for arc in self._arcs if arc.owner is None]
        for arc in free:
            if not len(arc) and len(self._arcs) > 1:
                self._drop(arc)
        taken = max(self._arcs, key=lambda arc: (arc.owner is None, len(arc)))
        if taken.owner is not None and len(taken) > 1:
            at = self._arcs.index(taken) + 1
            taken = taken.split(self._arcs[at].low if at < len(self._arcs) else KEY_MAX)
            self._arcs.insert(at, taken)
        taken.owner = who
        return taken

    def _take_more(self, arc: _Arc) -> _Arc | None:
        """All that is left of this arc lies in its slice: it goes first, then half of another; None if all others are
        empty."""
        if not any(len(other) for other in self._arcs if other is not arc):
            return None
        rest, who = arc.slice, arc.owner
        assert who is not None
        self._drop(arc)
        taken = self._acquire(who)
        taken.extend_slice()
        taken.slice = _Run(_joined([rest, taken.slice]))
        return taken

    def _drop(self, arc: _Arc) -> None:
        """Its stretch falls to the arc before it, or to the one behind if it was the first."""
        self._arcs.remove(arc)
        self._arcs[0].low = 0


def _push(runs: list[_Run], tasks: Numbers, keys_of: KeysOf) -> None:
    """Append, then merge neighbours of like size: O(log n) small runs, each task moved O(log n) times."""
    if not len(tasks):
        return
    runs.append(_Run(tasks))
    while len(runs) > 1:
        last, before = len(runs[-1]), len(runs[-2])
        if before > 2 * last or before + last > RUN_MAX:
            return
        newest = runs.pop()
        runs[-1] = _merged([runs[-1], newest], keys_of)
