"""Cuts: which waiting tasks share the next step.

The oldest task always goes, so nothing starves, and always alone if it must. Its companions come from its own
group. Two ways: in order of arrival (packed steps, where lengths do not matter) and by nearness in length
(batched steps, where the longest sets the cost of all).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fabric_pipelines.worker.engines.tasks import Task

Fits = Callable[[Task, int], bool]


def in_order(pending: Sequence[Task], *, tokens_max: int, tasks_max: int) -> list[Task]:
    """The longest run of the oldest task's group that fits the token budget; a packed step."""
    head = pending[0]
    taken, tokens = [head], head.length
    for task in pending[1:]:
        if task.group != head.group:
            continue
        tokens += task.length
        if tokens > tokens_max or len(taken) == tasks_max:
            break
        taken.append(task)
    return taken


def by_length(pending: Sequence[Task], fits: Fits) -> list[Task]:
    """The oldest task and its nearest neighbours in length, shortest first, as many as `fits` (longest task,
    count) allows; a batched step. Of one group and one output cap."""
    oldest = pending[0]
    peers = sorted(
        (
            task
            for task in pending
            if (task.group, task.max_new_tokens) == (oldest.group, oldest.max_new_tokens)
        ),
        key=lambda task: task.length,
    )
    first = next(index for index, task in enumerate(peers) if task is oldest)
    end = first + 1
    while first > 0 or end < len(peers):
        shorter = oldest.length - peers[first - 1].length if first > 0 else None
        longer = peers[end].length - oldest.length if end < len(peers) else None
        leftwards = longer is None or (shorter is not None and shorter <= longer)
        start, stop = (first - 1, end) if leftwards else (first, end + 1)
        if not fits(peers[stop - 1], stop - start):
            break
        first, end = start, stop
    return peers[first:end]


def shared_prefix(tasks: Sequence[Task], *, left: int = 1) -> int:
    """Tokens that all prompts start with; each prompt keeps at least `left` behind them, or all."""
    least = max(min(task.length for task in tasks) - left, 0)
    first = tasks[0].tokens[:least]
    for task in tasks[1:]:
        differs = (first != task.tokens[: len(first)]).nonzero()[0]
        if len(differs):
            first = first[: differs[0]]
    return len(first)
