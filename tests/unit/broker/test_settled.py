"""Runs of settled tasks against a plain loop over the index, at every size of a page."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fabric_pipelines.broker.accounts import DEAD, RETIRED, STATES
from fabric_pipelines.broker.settled import settled_page, settled_sums
from fabric_pipelines.ids import task_id
from fabric_pipelines.ledger import Amount
from fabric_pipelines.records.settled import Settled, Sums

INCARNATION = 7
HEADERS = [SimpleNamespace(submission_id=name * 64, function="generate") for name in "abc"]


@given(
    st.lists(st.tuples(st.integers(0, STATES - 1), st.integers(0, 2)), max_size=40),
    st.integers(1, 45),
)
def test_the_pages_hold_every_settled_task_with_its_submission_and_no_other(
    tasks: list[tuple[int, int]], rows: int
) -> None:
    index = SimpleNamespace(
        count=len(tasks),
        state=np.array([state for state, _ in tasks], np.uint8),
        submission=np.array([owner for _, owner in tasks], np.uint16),
    )
    submissions = [SimpleNamespace(header=header) for header in HEADERS]
    state = SimpleNamespace(index=index, incarnation=INCARNATION, submissions=submissions)
    pages: list[Settled] = []
    begin: int | None = 0
    while begin is not None:
        page, begin = settled_page(state, begin, rows)  # type: ignore[arg-type]
        pages.append(page)
    found = Settled.joined(pages)
    expected = {
        task_id(INCARNATION, at): owner
        for at, (state_, owner) in enumerate(tasks)
        if state_ in (RETIRED, DEAD)
    }
    runs = zip(found.firsts.tolist(), found.ends.tolist(), strict=True)
    ids = [task for first, end in runs for task in range(first, end)]
    assert ids == sorted(expected)
    assert found.tasks == len(expected)
    assert found.owner(np.array(ids, np.int64)).tolist() == [expected[task] for task in ids]
    named = {at: (HEADERS[at].submission_id, "generate") for at in set(expected.values())}
    assert found.submissions == named
    assert found.ids().tolist() == ids
    sums = Sums.of(found.ids(), rows, -(-len(tasks) // rows))
    told: list[tuple[int, int]] = []
    begin = 0
    while begin is not None:
        counts, marks, begin = settled_sums(state, begin, rows, pages=2)  # type: ignore[arg-type]
        told += zip(counts.tolist(), marks.tolist(), strict=True)
    assert told == list(zip(sums.tasks.tolist(), sums.marks.tolist(), strict=True))
    plain = [Amount.of(page.ids(), np.zeros(page.tasks, np.int64)) for page in pages]
    assert told == [(each.tasks, each.fingerprint) for each in plain[: len(told)]]
