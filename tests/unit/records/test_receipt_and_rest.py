"""Receipts prove themselves; confirmations and profiles refuse what proves nothing."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from fabric_pipelines.errors import SchemaError, UsageError
from fabric_pipelines.records.completion import (
    COMPLETION_SCHEMA,
    ERROR_TEXT_BYTES_MAX,
    clip_error_text,
    completion_batch,
)
from fabric_pipelines.records.confirmation import Confirmation
from fabric_pipelines.records.lease import LEASE_SCHEMA, Lease
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.records.receipt import Receipt

RECEIPT = Receipt(
    source={"rows": 3, "filter": "true"},
    recipe={"seed": 1, "tolerance": "0.5"},
    outputs={"files": [{"path": "a.npy", "sha256": "00"}], "generation": 1, "token": 1},
    quality={"recall": 1.0},
)


def test_quality_is_outside_the_identity_and_everything_else_inside() -> None:
    measured_again = Receipt(RECEIPT.source, RECEIPT.recipe, RECEIPT.outputs, (), {"recall": 0.9})
    other_seed = Receipt(RECEIPT.source, {"seed": 2}, RECEIPT.outputs)
    assert measured_again.receipt_id == RECEIPT.receipt_id
    assert other_seed.receipt_id != RECEIPT.receipt_id


def test_a_receipt_survives_its_statement() -> None:
    statement = json.loads(json.dumps(RECEIPT.to_statement()))
    assert Receipt.from_statement(statement) == RECEIPT
    assert statement["subject"] == [{"name": "a.npy", "digest": {"sha256": "00"}}]


def test_a_changed_receipt_is_found_out() -> None:
    statement = json.loads(json.dumps(RECEIPT.to_statement()))
    statement["predicate"]["source"]["rows"] = 4
    with pytest.raises(SchemaError, match="changed after it was issued"):
        Receipt.from_statement(statement)


def test_a_float_in_the_identity_is_refused_by_its_path() -> None:
    with pytest.raises(SchemaError, match=r"receipt\.recipe\.list\[1\]"):
        Receipt({}, {"list": [1, 0.5]}, {})


def test_a_confirmation_without_proof_is_refused() -> None:
    Confirmation("postgres", {"cluster": "1", "xid": "7", "table": "t"})
    with pytest.raises(UsageError, match="lacks xid"):
        Confirmation("postgres", {"cluster": "1", "xid": "", "table": "t"})
    with pytest.raises(UsageError, match="'promise' is unknown"):
        Confirmation("promise", {})


@pytest.mark.parametrize(
    "name", ["max_batch_size", "max_num_tokens", "kv_cache_tokens", "window_tokens"]
)
def test_a_profile_refuses_a_bad_number_by_name(name: str) -> None:
    good = {"max_batch_size": 1, "max_num_tokens": 1, "kv_cache_tokens": 0, "window_tokens": 0}
    assert Profile(**good).as_json() == good
    with pytest.raises(UsageError, match=name):
        Profile(**{**good, name: -1})


def test_a_lease_survives_its_batch_and_a_bare_batch_is_none() -> None:
    tasks = pa.RecordBatch.from_pylist(
        [
            {
                "task_id": 1,
                "tokens": [1],
                "max_new_tokens": 2,
                "source_row": 0,
                "metadata": b"",
                "attempts": 0,
                "leader": True,
            }
        ],
        schema=LEASE_SCHEMA,
    )
    lease = Lease(3, "lane", "engine", {"kind": "generate"}, 8, 99, tasks)
    back = Lease.from_batch(lease.to_batch())
    assert (back.lease_id, back.sampling, back.tasks.to_pylist()) == (
        3,
        {"kind": "generate"},
        tasks.to_pylist(),
    )
    with pytest.raises(SchemaError, match="no lease header"):
        Lease.from_batch(tasks)


def test_a_completion_batch_fills_only_what_may_be_null() -> None:
    batch = completion_batch(
        {
            "task_id": [1],
            "source_row": [0],
            "status": ["ok"],
            "finish_reason": ["stop"],
            "output": [[1, 2]],
            "prompt_tokens": [3],
            "padded_tokens": [0],
            "attempts": [1],
            "engine": ["e"],
            "engine_fingerprint": ["f"],
            "t_start_us": [1],
            "t_end_us": [2],
            "metadata": [b""],
        }
    )
    assert batch.schema == COMPLETION_SCHEMA
    assert batch.column("vector").null_count == 1
    with pytest.raises(AssertionError, match="source_row"):
        completion_batch({"task_id": [1]})


def test_error_text_is_cut_at_a_character_within_its_bound() -> None:
    clipped = clip_error_text("é" * 300)
    assert len(clipped.encode()) <= ERROR_TEXT_BYTES_MAX
    assert set(clipped) == {"é"}
