"""Results are compared with what was asked before they count.

An engine is a library that may be wrong. What it hands back is read here, a batch at a time, against the leases that it
was given. Two things can be wrong, and each has its own end:

    whose result it is      an id that the engine does not hold, an id twice, another task's source row, attempt, metadata or
                            prompt length, another engine's name, a status that is none: EngineFailed. Nothing of the
                            batch is taken, the worker ends, and the broker finds by halving what makes it do that
    what the result is      ok without the output or vector that was asked for, tokens beyond the cap or the vocabulary, a
                            vector of another length, NaN or an infinity, an end that is none: that task fails, with
                            WRONG as its code and the reason; the others of its batch are taken

An engine that gives WRONG_MOST wrong results in a row, no right one between, is at the first end too. Numbers that are not
finite do not count towards that: they may be the model's answer to what was asked, and one submission must not cost a worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fabric_pipelines.errors import EngineFailed, SchemaError
from fabric_pipelines.records.arrow import require_schema
from fabric_pipelines.records.completion import COMPLETION_SCHEMA, STATUSES
from fabric_pipelines.worker.engines.door import Engine
from fabric_pipelines.worker.supply import Given, Supply

WRONG = "WrongResult"
WRONG_MOST = 16
ENDS_OF_OUTPUT = ("stop", "length")
END_OF_VECTOR = "single_pass"
FP16_EXPONENT = 0x7C00  # all ones: an infinity or no number

Mask = npt.NDArray[np.bool_]


class Results:
    """wrong: results that were turned into failures of their tasks, so far."""

    def __init__(self, engine: Engine, supply: Supply) -> None:
        self._engine, self._supply = engine, supply
        self.wrong = 0
        self._in_a_row = 0

    def taken(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """`batch` as it may be reported: its tasks leave the supply, wrong results are failures. EngineFailed when the engine
        can no longer be trusted; the supply is then as it was."""
        try:
            require_schema(batch, COMPLETION_SCHEMA, "a result")
        except SchemaError as fault:
            raise EngineFailed(
                f"engine {self._engine.name} returned what is no completion batch ({fault})"
            ) from fault
        tasks: list[int] = batch.column("task_id").to_pylist()
        self._require_held(tasks)
        given = self._supply.given(tasks)
        self._require_its_own(batch, tasks, given)
        good = pc.equal(batch.column("status"), "ok").to_numpy(zero_copy_only=False)
        faults = self._faults(batch, given, good)
        if faults or good.any():
            self._count(good, faults)
        self._supply.finish(tasks)
        return _failed(batch, faults) if faults else batch

    # ---- whose result it is

    def _require_held(self, tasks: Sequence[int]) -> None:
        stray = [task for task in tasks if not self._supply.is_inside(task)]
        if stray:
            raise self._distrusted(
                f"returned task {stray[0]}, which it does not hold or has returned before"
            )
        if len(set(tasks)) != len(tasks):
            twice = next(task for task in tasks if tasks.count(task) > 1)
            raise self._distrusted(f"returned task {twice} twice at once")

    def _require_its_own(
        self, batch: pa.RecordBatch, tasks: Sequence[int], given: Sequence[Given]
    ) -> None:
        for column, own in (
            ("source_row", [one.source_row for one in given]),
            ("attempts", [one.attempts for one in given]),
            ("prompt_tokens", [one.prompt for one in given]),
            ("metadata", [one.metadata for one in given]),
        ):
            told = batch.column(column).to_pylist()
            if told != own:
                at = next(n for n, value in enumerate(told) if value != own[n])
                raise self._distrusted(f"returned task {tasks[at]} with another task's {column}")
        for column, allowed in (
            ("engine", (self._engine.name,)),
            ("engine_fingerprint", (self._engine.fingerprint,)),
            ("status", STATUSES),
        ):
            known = pc.is_in(batch.column(column), pa.array(allowed))
            if not pc.all(known, min_count=0).as_py():
                at = known.index(False).as_py()
                value = batch.column(column)[at].as_py()
                raise self._distrusted(
                    f"returned task {tasks[at]} with {column} {value!r}, not {' or '.join(allowed)}"
                )

    def _distrusted(self, why: str) -> EngineFailed:
        return EngineFailed(
            f"engine {self._engine.name} {why}: its results cannot be trusted, so the worker ends and its leases go back"
        )

    # ---- what the result is

    def _faults(self, batch: pa.RecordBatch, given: Sequence[Given], good: Mask) -> dict[int, str]:
        """Row of the batch to what is wrong with it, of those that say that they are ok."""
        faults: dict[int, str] = {}
        if not good.any():
            return faults
        new = np.fromiter((one.new for one in given), np.int64, len(given))
        needs = np.array([one.asked for one in given], np.int64).reshape(-1, 3)
        outputs, vectors = batch.column("output"), batch.column("vector")
        # Null is -1: no output is not the same as an output of no tokens.
        tokens, numbers = _lengths(outputs), _lengths(vectors)
        may_output, may_vector = needs[:, 0] == 1, needs[:, 1] == 1
        has_output, has_vector = tokens >= 0, numbers >= 0

        def note(rows: Mask, says: Any) -> None:
            for row in np.flatnonzero(rows & good).tolist():
                faults.setdefault(row, says(row))

        note(~has_output & ~has_vector, lambda row: "it is ok and holds no result")
        note(has_output & has_vector, lambda row: "it holds an output and a vector")
        note(has_output & ~may_output, lambda row: "it holds tokens where a vector was asked for")
        note(has_vector & ~may_vector, lambda row: "it holds a vector where tokens were asked for")
        note(tokens > new, lambda row: f"its output of {tokens[row]} tokens is above the {new[row]} asked for")  # fmt: skip
        width = needs[:, 2] * self._engine.capabilities.dim
        note(
            has_vector & ((numbers == 0) | ((width > 0) & (numbers != width))),
            lambda row: f"its vector has {numbers[row]} numbers, not {width[row] or 'some'}",
        )
        ends = batch.column("finish_reason")
        ended = pc.is_in(ends, pa.array(ENDS_OF_OUTPUT)).to_numpy(zero_copy_only=False)
        passed = pc.equal(ends, END_OF_VECTOR).to_numpy(zero_copy_only=False)
        note(
            np.where(has_output, ~ended, ~passed) | ((tokens == 0) & (ends.to_numpy(zero_copy_only=False) == "length")),
            lambda row: f"it ended with {ends[row].as_py()!r}, which no such result does",
        )  # fmt: skip
        self._note_values(outputs, tokens, vectors, numbers, note)
        return faults

    def _note_values(
        self,
        outputs: pa.ListArray,
        tokens: npt.NDArray[np.int64],
        vectors: pa.ListArray,
        numbers: npt.NDArray[np.int64],
        note: Any,
    ) -> None:
        flat = outputs.flatten()
        most = self._engine.capabilities.vocab_size
        if flat.null_count:
            note(_rows_of(pc.is_null(flat), tokens), lambda row: "its output holds a null")
        elif most and len(flat) and pc.max(flat).as_py() >= most:
            note(
                _rows_of(pc.greater_equal(flat, most), tokens),
                lambda row: (
                    f"its output holds token {pc.max(outputs[row].values).as_py()}, beyond the vocabulary of {most}"
                ),
            )
        flat = vectors.flatten()
        if flat.null_count:
            note(_rows_of(pc.is_null(flat), numbers), lambda row: "its vector holds a null")
        elif len(flat):
            bits = flat.to_numpy().view(np.uint16)
            odd = (bits & FP16_EXPONENT) == FP16_EXPONENT
            if odd.any():
                note(_rows_of(odd, numbers), lambda row: NOT_FINITE)

    def _count(self, good: Mask, faults: dict[int, str]) -> None:
        """EngineFailed once it has been wrong too often in a row."""
        in_a_row = self._in_a_row
        if len(faults) < int(good.sum()):
            right = good.copy()
            right[list(faults)] = False
            last = int(np.flatnonzero(right)[-1])
            in_a_row = sum(row > last and why != NOT_FINITE for row, why in faults.items())
        else:
            in_a_row += sum(why != NOT_FINITE for why in faults.values())
        if in_a_row >= WRONG_MOST:
            raise self._distrusted(
                f"gave {in_a_row} wrong results in a row, of the last {faults[max(faults)]}"
            )
        self._in_a_row = in_a_row
        self.wrong += len(faults)


NOT_FINITE = "its vector holds what is not a finite number"


def _lengths(lists: pa.ListArray) -> npt.NDArray[np.int64]:
    lengths: npt.NDArray[np.int64] = (
        pc.fill_null(pc.list_value_length(lists), -1).to_numpy().astype(np.int64)
    )
    return lengths


def _rows_of(values: Any, lengths: npt.NDArray[np.int64]) -> Mask:
    """Which lists hold a true value; values: one a number of all lists end to end."""
    ends = np.cumsum(np.maximum(lengths, 0))
    at = np.flatnonzero(np.asarray(values))
    rows = np.zeros(len(lengths), np.bool_)
    rows[np.searchsorted(ends, at, side="right")] = True
    return rows


def _failed(batch: pa.RecordBatch, faults: dict[int, str]) -> pa.RecordBatch:
    """The rows of `faults` as failures with their reason, the others as they are."""
    wrong = np.zeros(batch.num_rows, np.bool_)
    wrong[list(faults)] = True
    mask = pa.array(wrong)
    says = [
        f"the engine's result is not what was asked for: {faults[row]}" if row in faults else None
        for row in range(batch.num_rows)
    ]
    left = pa.array(range(batch.num_rows), pa.int64(), mask=wrong)  # null: a row of nulls is taken
    new = {
        "status": pc.if_else(mask, "failed", batch.column("status")),
        "finish_reason": pc.if_else(mask, "error", batch.column("finish_reason")),
        "error_code": pc.if_else(mask, WRONG, batch.column("error_code")),
        "error_text": pc.if_else(mask, pa.array(says, pa.string()), batch.column("error_text")),
        **{
            name: batch.column(name).take(left)
            for name in ("output", "vector", "artifact_uri", "artifact_sha256")
        },
    }
    columns = [new.get(field.name, batch.column(field.name)) for field in COMPLETION_SCHEMA]
    return pa.RecordBatch.from_arrays(columns, schema=COMPLETION_SCHEMA)
