"""Space: which part of the log is still needed, and how its front is freed. Pure questions to state and journal.

The log is freed from its front only, so that it stays one unbroken chain in which a loss shows. A front of
segments is worth clearing when less than a share of it lives: its live rows are copied to the end under their
ids, then it is dropped whole. At a quarter that moves at most a third of a byte for each byte freed (Rosenblum
and Ousterhout's cleaning cost, 1991), and a segment with nothing alive costs nothing. A segment at the very
front that stays alive is carried along by the dead ones behind it, so one slow submission pins no disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fabric_pipelines.broker.accounts import COMPUTED, DEAD, RETIRED
from fabric_pipelines.broker.facts import Verdict
from fabric_pipelines.broker.state import State
from fabric_pipelines.journal import Holding, Journal

Sequences = npt.NDArray[np.int64]
NOTHING: Sequences = np.zeros(0, np.int64)
MOSTLY_DEAD = 0.25
UNDER_PRESSURE = 0.75
FRAME_BYTES = 4096  # of a copied frame beside its rows


@dataclass(frozen=True, slots=True)
class Needed:
    """Frames that somebody still needs rows of, by LSN: how many rows live, and how many there are.

    batches: ordinals of ENQUEUE batches; batch_rows: their live rows, at most. outcomes: tasks whose reported
    outcome is not landed."""

    tasks: npt.NDArray[np.bool_]
    batch_rows: Sequences
    outcomes: Sequences
    lsns: Sequences
    live: Sequences
    rows: Sequences


def needed(state: State, first_lsn: int, *, pin_open: bool = True, pin_dead: bool = True) -> Needed:
    """A task's row is needed until its outcome is reported. `pin_open`: for as long as its submission is open, too,
    since only all its rows together prove its fingerprint after a restart. `pin_dead`: while it is a dead letter,
    too, which may be requeued. An outcome is needed until it is landed. `first_lsn`: where the log begins."""
    index = state.index
    states = index.state[: index.count]
    done = index.done[: index.count]
    settled = (states == RETIRED) | (states == DEAD)
    kept = (done >= 0) & ~settled  # also the refusal of a task that waits for a larger class
    tasks = ~((kept & (states == COMPUTED)) | settled)
    if pin_open or pin_dead:
        wanted = np.zeros(index.count, np.bool_)
        if pin_dead:
            bad = index.verdict[: index.count] != Verdict.OK
            wanted = (states == DEAD) | ((states == COMPUTED) & bad)
        for record in state.submissions if pin_open else ():
            if not record.closed:
                for batch in record.batches:
                    wanted[index.rows_of(batch)] = True
        more = np.flatnonzero(wanted & ~tasks)
        tasks[more[index.present(more, first_lsn)]] = True  # an earlier hurry may have let some go
    base = index.base.view
    batch_rows = np.add.reduceat(tasks, base, dtype=np.int64) if len(base) else base
    all_rows = np.diff(base, append=index.count)
    outcomes = np.flatnonzero(kept)
    frames = index.done_frames.count
    parts = [
        _by_lsn(index.frames.view, batch_rows, all_rows),
        _by_lsn(
            index.done_frames.view,
            np.bincount(done[outcomes], minlength=frames),
            np.bincount(done[done >= 0], minlength=frames),
        ),
    ]
    lsns, live, rows = (np.concatenate(column) for column in zip(*parts, strict=True))
    for lsn, moved in index.moved.items():
        rows[lsns == lsn] = len(moved)
    return Needed(tasks, batch_rows, outcomes, lsns, live, rows)


def _by_lsn(
    lsns: Sequences, live: Sequences, rows: Sequences
) -> tuple[Sequences, Sequences, Sequences]:
    chosen = live > 0
    found, inverse = np.unique(lsns[chosen], return_inverse=True)
    sums = [
        np.bincount(inverse, weights=column[chosen], minlength=len(found)).astype(np.int64)
        for column in (live, rows)
    ]
    return found, sums[0], sums[1]


def live_bytes(need: Needed, journal: Journal, holdings: Sequence[Holding]) -> Sequences:
    """Of each segment held, int64."""
    sizes = journal.extents(need.lsns) * need.live // np.maximum(need.rows, need.live)
    firsts = np.array([holding.first_lsn for holding in holdings], np.int64)
    at = np.searchsorted(firsts, need.lsns, side="right") - 1
    inside = at >= 0
    found = np.bincount(at[inside], weights=sizes[inside], minlength=len(holdings))
    return found.astype(np.int64)


def front_to_clear(
    holdings: Sequence[Holding], live: Sequences, covered_lsn: int, share: float
) -> int:
    """First LSN to keep: behind the longest front of sealed segments, all covered by a checkpoint, of which
    less than `share` lives and which ends in such a segment. 0: nothing is worth it."""
    below = alive = total = 0
    for holding, own in zip(holdings, live.tolist(), strict=True):
        if not holding.sealed or holding.last_lsn > covered_lsn:
            break
        alive, total = alive + own, total + holding.bytes
        if alive < share * total and own < share * holding.bytes:
            below = holding.last_lsn + 1
    return below


def front_that_fits(
    holdings: Sequence[Holding], live: Sequences, covered_lsn: int, room: int
) -> int:
    """First LSN to keep: behind the longest front of sealed segments, all covered by a checkpoint, whose live rows
    can be copied into so many bytes, however much of it lives. So the log goes round: each turn ends with as much
    space as it began with, and what is dead behind a front that lives comes to be the front. 0: nothing fits."""
    below = 0
    for holding, own in zip(holdings, live.tolist(), strict=True):
        room -= copied_bytes(own)
        if not holding.sealed or holding.last_lsn > covered_lsn or room < 0:
            break
        below = holding.last_lsn + 1
    return below


def copied_bytes(live: int) -> int:
    """What live rows of so many bytes take when they are copied, at most."""
    return live * 17 // 16 + FRAME_BYTES if live else 0


def batches_to_move(
    state: State, need: Needed, journal: Journal, below: int, size: int
) -> Sequences:
    """Ordinals of the next ENQUEUE batches below that LSN with live rows, at least one, about `size` bytes."""
    frames = state.index.frames.view
    due = np.flatnonzero((frames < below) & (need.batch_rows > 0))
    due = due[np.argsort(frames[due], kind="stable")]
    rows = np.diff(state.index.base.view, append=state.index.count)[due]
    for lsn, held in state.index.moved.items():
        rows[frames[due] == lsn] = len(held)
    sizes = np.cumsum(journal.extents(frames[due]) * need.batch_rows[due] // np.maximum(rows, 1))
    return np.sort(due[: max(1, int(np.searchsorted(sizes, size)))])


def outcomes_to_move(
    state: State, need: Needed, journal: Journal, below: int, size: int
) -> Sequences:
    """The next tasks whose outcome lies below that LSN and is not landed, whole frames, about `size` bytes."""
    index = state.index
    lsns = index.done_frames.view[index.done[need.outcomes]]
    due: Sequences = need.outcomes[np.flatnonzero(lsns < below)]
    due = due[np.lexsort((index.done_row[due], index.done[due]))]
    if not len(due):
        return due
    frames, counts = np.unique(index.done[due], return_counts=True)
    weights = np.cumsum(journal.extents(index.done_frames.view[frames]))
    whole = max(1, int(np.searchsorted(weights, size)))
    return due[: int(counts[:whole].sum())]
