"""Cut one batch from the head of one lane for one session.

A lane holds one aligned length (or packed work that pads to nothing), so any prefix of it fits together.
Packing takes the longest prefix that fits what the session may still take, by prefix sums, and never reaches
past a task that does not fit: what is skipped can starve. The head always goes, even when it is too long by
itself; the worker reports it as oversized and the lane moves on.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fabric_pipelines.records.batch import Budget

Counts = npt.NDArray[np.int64]


def pack(
    prompt: Counts,
    new: Counts,
    budget: Budget,
    *,
    padded_length: int = 0,
    shared: Counts | None = None,
) -> int:
    """How many of the first tasks go, at least 1 of a non-empty lane.

    prompt: prompt tokens, new: cap of new tokens, both int64 [n] in lane order. padded_length: what each task
    costs a step in a single-pass lane; 0 for packed work, where it costs its prompt less what it shares with
    the one before it (`shared`, see prefix.shared_tokens): a prefix is computed and kept once per group.
    """
    if not len(prompt):
        return 0
    limit = min(budget.sequences, len(prompt))
    own = prompt[:limit] if shared is None else prompt[:limit] - shared[:limit]
    count = budget.tokens // padded_length if padded_length else _fitting(own, budget.tokens)
    if budget.kv_tokens is not None:
        count = min(count, _fitting(own + new[:limit], budget.kv_tokens))
    return max(1, min(count, limit))


def is_full_batch(own: Counts, new: Counts, budget: Budget, *, padded_length: int = 0) -> bool:
    """Whether these tasks, all of them and at least one, leave no place for another of their mean size. own: what each
    costs a step beyond what it shares, new as for `pack`, int64 [n]."""
    count = len(own)
    if count >= budget.sequences:
        return True
    step = (count + 1) * padded_length if padded_length else int(own.sum()) * (count + 1) // count
    if step > budget.tokens:
        return True
    if budget.kv_tokens is None:
        return False
    return int((own + new).sum()) * (count + 1) // count > budget.kv_tokens


def _fitting(costs: Counts, limit: int) -> int:
    """How many of the first ones cost `limit` together, at most."""
    return int(costs.cumsum().searchsorted(limit, side="right"))


def merge(prompt: Counts, first: int, budget: Budget, *, padded_length: int, waste: float) -> int:
    """How many of these tasks, longest lanes first, go in one padded batch: all of the `first` ones, which are
    at home in it, then shorter ones while they fit and padding stays within `waste` of what is computed."""
    limit = min(budget.sequences, max(budget.tokens // padded_length, 1), len(prompt))
    counts = np.arange(1, limit + 1)
    padding = 1 - np.cumsum(prompt[:limit]) / (counts * padded_length)
    allowed = np.flatnonzero(padding <= waste)
    return max(min(first, limit), int(allowed[-1]) + 1 if len(allowed) else 0)


def guided(sequences: int, ready: int, mine: int, all_of_them: int) -> int:
    """Lease size near the end (guided self-scheduling): no session takes more than half of its share, `mine` of
    `all_of_them`, of what is left, so that all finish together. One alone has nobody to wait for and takes full batches."""
    if mine >= all_of_them:
        return sequences
    return max(1, min(sequences, ready * mine // (2 * all_of_them)))


def is_end(ready: int, enqueued: int, sequences: int, consumers: int) -> bool:
    """Whether what is left of a lane fills each consumer twice at most. A small share of the lane in any case:
    its prefixes are worth more than a smooth end."""
    return ready <= min(2 * consumers * sequences, enqueued // 50)


def end_keys(new: Counts, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Order of the end: largest output caps first, by powers of two, so that no slot starts long work while
    the others run dry; by prefix within a power."""
    powers = np.ceil(np.log2(np.maximum(new, 1))).astype(np.uint64)
    return ((np.uint64(63) - powers) << np.uint64(58)) | (keys >> np.uint64(6))
