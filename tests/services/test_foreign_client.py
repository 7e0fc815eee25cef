"""A client that knows Arrow, JSON and broker/WIRE.md, and nothing of this package: no import of ours below this line.

What it submits is leased, computed and counted like anybody's; the rest of the test is ours.
"""

from __future__ import annotations

import hashlib
import json
import struct
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

PROMPTS = [[5, 6, 7], [8], [9, 10]]
ORDER = ("lengths", "meta", "metalen", "new", "rows", "tokens")


def columns(prompts: list[list[int]], metadata: list[bytes]) -> dict[str, bytes]:
    count = len(prompts)
    return {
        "tokens": np.array([token for row in prompts for token in row], "<u4").tobytes(),
        "lengths": np.array([len(row) for row in prompts], "<i8").tobytes(),
        "new": np.full(count, 4, "<u4").tobytes(),
        "rows": np.arange(count, dtype="<i8").tobytes(),
        "meta": b"".join(metadata),
        "metalen": np.array([len(each) for each in metadata], "<i8").tobytes(),
    }


class ForeignClient:
    def __init__(self, endpoint: str, **secrets: bytes) -> None:
        self._flight = flight.FlightClient(endpoint, **secrets)
        self._session = f"foreign-{uuid.uuid4().hex}"

    def submit(self, prompts: list[list[int]], *, tenant: str | None = None) -> dict[str, Any]:
        metadata = [b"row %d" % row for row in range(len(prompts))]
        held = columns(prompts, metadata)
        digests = b"".join(hashlib.sha256(held[name]).digest() for name in ORDER)
        command: dict[str, Any] = {
            "protocol": 1,
            "role": "producer",
            "submission_id": uuid.uuid4().hex * 2,
            "function": "generate",
            "engine": "model@engine",
            "sampling": {"kind": "generate", "temperature": 0.0, "top_k": 1, "seed": 0},
            "vocab_size": 100,
            "tasks": len(prompts),
            "tokens": sum(map(len, prompts)),
            "fingerprint": hashlib.sha256(digests).hexdigest(),
        }
        if tenant is not None:
            command["tenant"] = tenant
        schema = pa.schema(
            [
                pa.field("tokens", pa.list_(pa.uint32()), nullable=False),
                pa.field("max_new_tokens", pa.uint32(), nullable=False),
                pa.field("source_row", pa.int64(), nullable=False),
                pa.field("metadata", pa.binary(), nullable=False),
            ]
        )
        batch = pa.record_batch(
            [
                pa.array(prompts, pa.list_(pa.uint32())),
                pa.array([4] * len(prompts), pa.uint32()),
                pa.array(range(len(prompts)), pa.int64()),
                pa.array(metadata, pa.binary()),
            ],
            schema=schema,
        )
        sums = [
            google_crc32c.value(held[name])
            for name in ("tokens", "lengths", "new", "rows", "meta", "metalen")
        ]
        descriptor = flight.FlightDescriptor.for_command(json.dumps(command).encode())
        writer, reader = self._flight.do_put(descriptor, schema)
        with writer:
            assert json.loads(bytes(reader.read()))["enqueued"] == 0
            writer.write_with_metadata(batch, json.dumps({"first_row": 0, "crc32c": sums}).encode())
            writer.done_writing()
            answer: dict[str, Any] = {}
            while (more := reader.read()) is not None:
                answer = json.loads(bytes(more))
        return answer

    def call(self, name: str, **head: Any) -> dict[str, Any]:
        text = json.dumps(
            {"protocol": 1, "role": "producer", "session": self._session, **head}
        ).encode()
        body = struct.pack("<I", len(text)) + b"1FPF" + text
        (result,) = self._flight.do_action(flight.Action(name, body))
        answer = bytes(result.body)
        (length,) = struct.unpack("<I", answer[:4])
        assert answer[4:8] == b"1FPF"
        found: dict[str, Any] = json.loads(answer[8 : 8 + length])
        return found


# ---- from here on with what is ours


@pytest.fixture
def doors(tmp_path: Path) -> Iterator[tuple[Any, dict[str, ForeignClient]]]:
    from fabric_pipelines.broker import certificates
    from fabric_pipelines.supervise.table import free_port
    from tests.support_broker_process import Broker, credentials_of, served_settings

    papers = tmp_path / "papers"
    certificates.make(papers, hosts=["127.0.0.1"], clients=["acme/producer"])
    endpoint = f"grpc+tls://127.0.0.1:{free_port('127.0.0.1', 18_771)}"
    broker = Broker(served_settings(tmp_path / "home", papers, endpoint))
    broker.start()
    mine = credentials_of(papers, "acme-producer")
    secrets = {"tls_root_certs": mine.ca, "cert_chain": mine.chain, "private_key": mine.key}
    clients = {
        "local": ForeignClient(broker.settings.broker_endpoint),
        "tls": ForeignClient(endpoint, **secrets),
    }
    yield broker, clients
    broker.kill()


def test_a_client_written_from_the_page_alone_submits_and_asks(doors: Any) -> None:
    from tests.support_broker import completions, ids_of
    from tests.support_broker_process import attach

    broker, clients = doors
    for name, tenant in (("local", "default"), ("tls", "acme")):
        state = clients[name].submit(PROMPTS)
        assert (state["closed"], state["enqueued"]) == (True, 3), state
        with broker.client("worker") as worker:
            attach(worker)
            lease = worker.lease(sequences=8, tokens=1 << 20, kv_tokens=None)
            assert lease is not None
            assert lease.lane.startswith(f"{tenant}/")
            assert sorted(lease.tasks.column("tokens").to_pylist()) == sorted(PROMPTS)
            worker.computed(completions(ids_of(lease)))
            worker.detach()
        seen = clients[name].call("submission", submission_id=state["submission_id"])["state"]
        assert seen["computed"] == 3
        assert clients[name].call("hello")["protocol"] == 1
        assert clients[name].call("verify")["error"] == "WrongRole"


def test_the_page_names_every_call_and_every_role_has_its_own(doors: Any) -> None:
    import re

    from fabric_pipelines.broker import roles

    page = (Path(roles.__file__).parent / "WIRE.md").read_text()
    table = page[page.index("| call | head |") :]
    named = {
        name
        for row in re.findall(r"^\| (`.*?) \|", table, re.M)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert named == set(roles.ROLES) - {"submit"}
    _, clients = doors
    for name in named:
        answer = clients["local"].call(name, role="nobody")
        assert answer["error"] == "WrongRole", name
