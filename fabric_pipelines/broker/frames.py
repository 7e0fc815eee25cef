"""Frames: one report of many outcomes as facts that are each small enough for the end of a segment.

What a segment loses at its end is less than one frame, and room is counted so: a report that is longer than what is
taken for the longest is written as several. Rows stay whole; each is an outcome of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import pyarrow.compute as pc

from fabric_pipelines.broker.facts import Computed, Fact, Verdict
from fabric_pipelines.records.arrow import read_ipc, to_ipc_part, whole
from fabric_pipelines.records.completion import largest_vector

HEAD_BYTES = 2048  # of a fact beside its rows, and what lies between


class Space(Protocol):
    """Of a journal: what is taken for the longest frame, and whether one fits the segment that is written to."""

    frame_max: int

    def fits(self, frame_bytes: int) -> bool: ...


def in_frames(fact: Fact, space: Space) -> list[Fact]:
    """The same outcomes in one fact, if that fits the segment at hand, or in some that are short enough or of one row."""
    if not isinstance(fact, Computed):
        return [fact]
    return [fact] if space.fits(_size(fact)) else _parts(fact, space.frame_max)


def _size(fact: Computed) -> int:
    return len(fact.ipc) + 16 * len(fact.tasks) + HEAD_BYTES


def _parts(fact: Computed, most: int) -> list[Fact]:
    if len(fact.tasks) == 1 or _size(fact) <= most:
        return [fact]
    batch, middle = read_ipc(whole(fact.ipc)), len(fact.tasks) // 2
    parts: list[Fact] = []
    for rows in (slice(0, middle), slice(middle, len(fact.tasks))):
        part = batch.slice(rows.start, rows.stop - rows.start)
        large = (fact.verdicts[rows] == Verdict.TOO_LARGE).any()
        half = replace(
            fact,
            tasks=fact.tasks[rows],
            verdicts=fact.verdicts[rows],
            output_tokens=fact.output_tokens[rows],
            padded_tokens=int(pc.sum(part.column("padded_tokens")).as_py() or 0),
            ipc=to_ipc_part(part),
            too_large_for=fact.too_large_for if large else "",
            vector_bytes=largest_vector(part),
        )
        parts += _parts(half, most)
    return parts
