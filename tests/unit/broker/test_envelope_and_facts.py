"""Facts survive their encoding, and a message that lies about its lengths is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric_pipelines.broker.envelope import ALIGNMENT, pack, unpack
from fabric_pipelines.broker.facts import (
    CheckpointTaken,
    Claimed,
    Computed,
    Dropped,
    Enqueued,
    Fact,
    GivenUp,
    Kind,
    LanesStepped,
    Leased,
    Moved,
    MovedComputed,
    Requeued,
    Returned,
    Settled,
    Started,
    SubmissionClosed,
    SubmissionOpened,
    Uploaded,
    decode,
    kind_of,
    numbers_of,
    rows_of,
    runs_of,
)
from fabric_pipelines.errors import CorruptionFound, SchemaError
from tests.support_broker import submission_of, tasks_of

THREE = np.array([5, 9, 2**39], np.int64)
VERDICTS = np.array([1, 4, 5], np.uint8)
FACTS: list[Fact] = [
    SubmissionOpened(submission_of([tasks_of([3, 4])])),
    Enqueued("a" * 64, 2, 10, 77, 3, b"arrow bytes"),
    SubmissionClosed("a" * 64),
    SubmissionClosed("a" * 64, abandoned=True),
    Leased(4, "w", 1, THREE),
    Claimed(5, "w", THREE),
    Computed("w", THREE, VERDICTS, np.array([1, 0, 7], np.int32), 12, b"ipc"),
    Computed("w", THREE, VERDICTS, np.array([1, 0, 7], np.int32), 12, b"ipc", "m#f/8x512x0"),
    GivenUp("no class is left", THREE),
    GivenUp("its row cannot be read", THREE, lost=True),
    Requeued("there is a larger card now", THREE),
    Returned("w", "given back", False, False, THREE, VERDICTS),
    Returned("w", "ran out", True, True, THREE, VERDICTS),
    Settled(False, THREE, "postgres", {"cluster": "c", "xid": 1, "table": "t"}),
    Settled(True, THREE, "dead_letter", {"cluster": "c", "xid": 1, "table": "t"}),
    Started("0.1.0"),
    LanesStepped(np.arange(10, dtype=np.int64).reshape(2, 5)),
    CheckpointTaken(70, "d" * 64, 1234),
    Dropped(60, 70, "d" * 64),
    Moved(np.array([3, 4, 5, 9, 11, 12], np.int64), np.array([0, 2], np.int64), b"arrow"),
    MovedComputed(THREE, b"arrow"),
    Uploaded(3, 1000, 1999, 5 << 20, 0xDEADBEEF),
]


def plain(fact: Fact) -> dict[str, object]:
    names = type(fact).__dataclass_fields__
    values = {name: getattr(fact, name) for name in names}
    return {
        name: value.tolist()
        if isinstance(value, np.ndarray)
        else bytes(value)
        if isinstance(value, memoryview)
        else value
        for name, value in values.items()
    }


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: kind_of(fact).name)
def test_every_fact_survives_its_encoding(fact: Fact) -> None:
    again = decode(kind_of(fact), b"".join(fact.encode()), "LSN 1")
    assert type(again) is type(fact)
    assert plain(again) == plain(fact)
    assert rows_of(again) == rows_of(fact)


def test_every_kind_of_frame_has_a_fact() -> None:
    assert {kind_of(fact) for fact in FACTS} == set(Kind)


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: kind_of(fact).name)
def test_a_shortened_fact_is_corruption_and_says_where(fact: Fact) -> None:
    whole = b"".join(fact.encode())
    with pytest.raises(CorruptionFound, match="LSN 9"):
        decode(kind_of(fact), whole[: len(whole) - 1], "LSN 9")


def test_a_kind_of_a_newer_broker_is_refused_by_name() -> None:
    with pytest.raises(CorruptionFound, match="kind 99"):
        decode(99, b"".join(pack({})), "LSN 3")


def test_an_uploaded_fact_is_the_bytes_it_always_was() -> None:
    """Written by the first version that had a cold tier; FORMAT.md, kind 18."""
    old = bytes.fromhex(
        "4f00000031465046"
        + b'{"crc32c":3735928559,"epoch":3,"first_lsn":1000,"last_lsn":1999,"size":5242880}'.hex()
    )
    fact = Uploaded(3, 1000, 1999, 5 << 20, 0xDEADBEEF)
    assert b"".join(fact.encode()).rstrip(b"\0") == old
    assert decode(18, b"".join(fact.encode()), "here") == fact


@given(st.sets(st.integers(0, 60), min_size=1))
def test_numbers_survive_as_runs(numbers: set[int]) -> None:
    ascending = np.array(sorted(numbers), np.int64)
    assert numbers_of(runs_of(ascending)).tolist() == sorted(numbers)


@given(
    st.dictionaries(
        st.text("ab#é", max_size=5), st.integers() | st.text('ab"\\é', max_size=9), max_size=4
    ),
    st.lists(st.binary(max_size=200), max_size=4),
)
def test_what_is_packed_is_unpacked_and_every_part_is_aligned(
    head: dict[str, int | str], parts: list[bytes]
) -> None:
    head.pop("#", None)
    whole = b"".join(pack(head, parts))
    found, views = unpack(whole)
    assert found == head
    assert [bytes(view) for view in views] == parts
    if views and len(parts[-1]):
        assert whole.rindex(parts[-1], len(whole) - len(parts[-1])) % ALIGNMENT == 0


@pytest.mark.parametrize(
    "bad", [b"", b"1234567", b"\xff" * 64, b"".join(pack({"#": [10]})), b"".join(pack({"#": [-1]}))]
)
def test_a_message_that_does_not_add_up_is_refused(bad: bytes) -> None:
    with pytest.raises(SchemaError):
        unpack(bad)
