"""Which tasks are settled, page by page, id by id or in sum: a question to the index, which keeps every task for ever."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fabric_pipelines.broker.accounts import DEAD, RETIRED
from fabric_pipelines.broker.state import State
from fabric_pipelines.ids import SEQUENCE_BITS
from fabric_pipelines.ledger import hash64
from fabric_pipelines.records.settled import Ids, Settled

PAGE_ROWS = 1 << 18
SUMMED_PAGES = 4  # in one question: about 4 ms of the owner's time


def settled_page(state: State, begin: int, rows: int = PAGE_ROWS) -> tuple[Settled, int | None]:
    """Of the tasks with sequence numbers [begin, begin + rows), and where the next page begins; None after the last."""
    end = min(begin + rows, state.index.count)
    begin = min(begin, end)
    states = state.index.state[begin:end]
    owners = state.index.submission[begin:end].astype(np.int64)
    # one column in which neighbours of one run are equal: -1 is what is not settled
    marks = np.where((states == RETIRED) | (states == DEAD), owners, -1)
    cuts = np.flatnonzero(np.diff(marks)) + 1
    firsts = np.concatenate([[0], cuts])[: len(marks)].astype(np.int64)
    ends = np.concatenate([cuts, [len(marks)]])[: len(firsts)].astype(np.int64)
    kept = marks[firsts] >= 0
    firsts, ends = firsts[kept], ends[kept]
    runs, base = marks[firsts], (state.incarnation << SEQUENCE_BITS) + begin
    named = {}
    for at in np.unique(runs).tolist():
        header = state.submissions[at].header
        named[at] = (header.submission_id, header.function)
    return Settled(
        firsts + base, ends + base, runs, named
    ), end if end < state.index.count else None


def settled_sums(
    state: State, begin: int, rows: int = PAGE_ROWS, pages: int = SUMMED_PAGES
) -> tuple[Ids, npt.NDArray[np.uint64], int | None]:
    """tasks and marks (records.Sums) of the pages that begin at sequence number `begin`, and where the next begin; None
    after the last."""
    base = state.incarnation << SEQUENCE_BITS
    tasks, marks = [], []
    for first in range(begin, min(begin + pages * rows, state.index.count), rows):
        states = state.index.state[first : min(first + rows, state.index.count)]
        ids = np.flatnonzero((states == RETIRED) | (states == DEAD)).astype(np.int64)
        tasks.append(len(ids))
        marks.append(hash64(ids + (base + first)).sum(dtype=np.uint64))
    end = begin + pages * rows
    return (
        np.array(tasks, np.int64),
        np.array(marks, np.uint64),
        end if end < state.index.count else None,
    )
