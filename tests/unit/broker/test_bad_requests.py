"""Whatever a request holds, it gets a typed answer, the owner lives, and what is refused is not in the log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fabric_pipelines.broker.desk import Desk
from fabric_pipelines.broker.envelope import pack, unpack
from fabric_pipelines.broker.header import HEADER_BYTES_MAX, read_header, read_opening
from fabric_pipelines.broker.owner import Owner, TaskUpload
from fabric_pipelines.broker.replies import PROTOCOL_VERSION
from fabric_pipelines.broker.roles import declared
from fabric_pipelines.broker.server import BrokerServer, require_protocol
from fabric_pipelines.broker.state import BatchColumns
from fabric_pipelines.errors import FabricError, SchemaError, UsageError, VersionRefused, by_code
from fabric_pipelines.records.arrow import crc32c
from tests.support_broker import (
    ENGINE,
    LANDED,
    PROFILE,
    Bench,
    completions,
    ipc_of,
    submission_of,
    tasks_of,
)

BATCHES = [tasks_of([10] * 3)]
KNOWN = submission_of(BATCHES)
IPC = ipc_of(completions([1, 2]))
IDS = np.arange(3, dtype=np.int64).tobytes()
CALLS: dict[str, tuple[str, dict[str, Any], bytes]] = {
    "hello": ("producer", {}, b""),
    "status": ("admin", {}, b""),
    "submission": ("producer", {"submission_id": KNOWN.submission_id}, b""),
    "close": ("producer", {"submission_id": KNOWN.submission_id}, b""),
    "abandon": ("admin", {"submission_id": KNOWN.submission_id}, b""),
    "attach": (
        "consumer",
        {
            "engine": ENGINE,
            "engine_fingerprint": "f",
            "device": "cpu:0",
            "profile": PROFILE.as_json(),
            "call": 1,
        },
        IDS,
    ),
    "lease": ("consumer", {"sequences": 2, "tokens": 100, "kv_tokens": None, "call": 5}, b""),
    "renew": ("consumer", {}, b""),
    "computed": ("consumer", {"crc32c": crc32c(IPC)}, IPC),
    "nack": ("consumer", {"reason": "no", "attempted": True}, IDS),
    "detach": ("consumer", {}, b""),
    "states": ("admin", {}, IDS),
    "requeue": ("admin", {"reason": "again"}, IDS),
    "settled": ("completion", {"begin": 0}, b""),
    "settled_sums": ("completion", {"begin": 0}, b""),
    "drain": ("admin", {"undo": True}, b""),
    "pull": ("completion", {"rows": 5, "wait_s": 0, "skip": ["embed"]}, b""),
    "release": ("completion", {}, IDS),
    "settle": ("completion", {"dead": False, "kind": LANDED.kind, "proof": LANDED.proof}, IDS),
}
STRANGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 0, 1 << 31, 1 << 53, 1 << 63, 1 << 64, 10**40, -(10**40)]),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["", "x" * 10_000, "\ud800", "\0", "*", "../.."]),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
)


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BrokerServer, Owner]]:
    bench, fatal = Bench(), list[FabricError]()
    bench.submit(KNOWN, BATCHES)
    bench.attach("s")
    desk = Desk(bench.owner, fatal.append)
    desk.start()
    folder: Path = tmp_path_factory.mktemp("door")
    server = BrokerServer(f"grpc+unix://{folder}/b.sock", desk)
    yield server, bench.owner
    server.shutdown()
    desk.stop()
    assert fatal == []


def asked(server: BrokerServer, name: str, changes: dict[str, Any], part: bytes) -> dict[str, Any]:
    role, head, _ = CALLS[name]
    whole = {"protocol": PROTOCOL_VERSION, "role": role, "session": "s", **head, **changes}
    answer, _ = server.answer(name, whole, [memoryview(part)])
    return answer


def test_an_error_that_nobody_foresaw_is_an_answer_and_a_line_in_the_log(
    door: tuple[BrokerServer, Owner],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def burst(*_: Any) -> Any:
        raise ZeroDivisionError("no reason")

    server, owner = door
    before = owner.journal.next_lsn
    monkeypatch.setitem(server._actions, "hello", burst)
    answer = asked(server, "status", {}, b"")
    assert "error" not in answer
    answer, _ = server.answer("hello", {"protocol": PROTOCOL_VERSION, "role": "admin"}, [])
    assert answer["error"] == "FabricError"
    assert "a fault of the broker itself (ZeroDivisionError: no reason)" in answer["message"]
    assert "request 'hello' failed" in caplog.text
    assert owner.journal.next_lsn == before


@hypothesis_settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(sorted(CALLS)),
    changes=st.data(),
    part=st.one_of(st.none(), st.binary(max_size=64)),
)
def test_any_value_in_any_field_is_answered_with_a_type_and_the_owner_lives(
    door: tuple[BrokerServer, Owner], name: str, changes: st.DataObject, part: bytes | None
) -> None:
    server, owner = door
    known = ["protocol", "role", "session", "acknowledged", *CALLS[name][1]]
    changed = changes.draw(st.dictionaries(st.sampled_from(known), STRANGE, max_size=2))
    before = owner.journal.next_lsn
    answer = asked(server, name, changed, CALLS[name][2] if part is None else part)
    if "error" in answer:
        assert by_code(answer["error"]) is not FabricError
        assert len(answer["message"]) < 1000
        assert owner.journal.next_lsn == before
    assert "durable_lsn" in asked(server, "hello", {}, b"")


HEADER = json.loads(KNOWN.to_json())


@hypothesis_settings(max_examples=400, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(sorted(HEADER)), STRANGE, max_size=2))
@example(changes={"labels": {"a": 1}})
@example(changes={"tasks": 10**40, "tokens": 10**41})
@example(changes={"tenant": "*"})
def test_any_header_is_refused_by_the_door_or_bearable_for_the_owner(
    changes: dict[str, Any],
) -> None:
    bench = Bench()
    with suppress(FabricError):
        header = read_header({**HEADER, **changes}, declared("producer"))
        bench.owner.look_up(header)
        columns = BatchColumns.of(header, BATCHES[0])
        upload = TaskUpload(header.submission_id, 0, BATCHES[0], columns, None, header)
        assert bench.owner.enqueue(upload).enqueued == 3
    assert bench.owner.verify().differences == []


@pytest.mark.parametrize("mark", ["zz", "", "A" * 64, "0" * 63, "g" * 64, "0" * 64 + "\n"])
def test_a_fingerprint_that_no_content_can_have_is_refused_at_the_door(mark: str) -> None:
    with pytest.raises(UsageError, match="field fingerprint"):
        read_header({**HEADER, "fingerprint": mark}, declared("producer"))


@pytest.mark.parametrize("spoken", [True, 1.0, "1", [1], None, 2])
def test_a_protocol_that_is_not_that_very_number_is_refused(spoken: object) -> None:
    require_protocol({"protocol": PROTOCOL_VERSION})
    with pytest.raises(VersionRefused, match="speaks protocol"):
        require_protocol({"protocol": spoken})


@pytest.mark.parametrize("name", ["tasks", "tokens", "vocab_size"])
def test_a_count_of_a_header_is_a_whole_number_and_nothing_that_equals_one(name: str) -> None:
    for value in (True, float(HEADER[name]), str(HEADER[name])):
        with pytest.raises(UsageError, match=f"field {name}"):
            read_header({**HEADER, name: value}, declared("producer"))


@pytest.mark.parametrize(
    "command",
    [
        b"",
        b"[]",
        b"nonsense",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"tasks": ' + b"9" * 10_000 + b"}",
        b'"' + b"x" * HEADER_BYTES_MAX + b'"',
    ],
)
def test_what_is_no_header_is_a_usage_error(command: bytes) -> None:
    with pytest.raises(UsageError):
        read_header(read_opening(command), declared("producer"))


def envelope(head: bytes, magic: bytes = b"1FPF", length: int | None = None) -> bytes:
    return (len(head) if length is None else length).to_bytes(4, "little") + magic + head


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"1234567",
        envelope(b"{}", magic=b"GET "),
        envelope(b"{}", length=1 << 31),
        envelope(b"[1]"),
        envelope(b"{nonsense"),
        envelope(b"[" * 100_000),
        envelope(b'{"#": 5}'),
        envelope(b'{"#": [-1]}'),
        envelope(b'{"#": [1e3]}'),
        envelope(b'{"#": [99999999999999999999]}'),
        envelope(b'{"#": [64]}'),
    ],
)
def test_what_is_no_message_is_a_schema_error(body: bytes) -> None:
    with pytest.raises(SchemaError):
        unpack(body)


def test_a_message_cut_anywhere_is_a_schema_error_or_whole_before_its_last_part() -> None:
    whole = b"".join(pack({"a": 1}, [b"x" * 100, b"y" * 3]))
    for end in range(len(whole)):
        with pytest.raises(SchemaError):
            unpack(whole[:end])
    assert unpack(whole)[0] == {"a": 1}
