"""FORMAT.md of the broker, read a second time with nothing of the codec: a checkpoint file written by format 1 stays
readable for ever, and says what the page says."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow as pa

from fabric_pipelines.broker import checkpoint, snapshot

OLD = Path(__file__).parent / "fixtures" / "checkpoint-1.bin"
DIGEST = "a4d62231b177bc63a84ea388488c47b587f458b0328f4152776f164008833620"
JOURNAL, LSN = "ab" * 16, 7


def by_the_page(content: bytes) -> dict[str, np.ndarray]:
    magic, version, length, crc = struct.unpack_from("<4sIQI", content)
    assert (magic, version) == (b"FPC\1", 1)
    head = content[64 : 64 + length]
    assert google_crc32c.value(head) == crc
    start = (64 + length + 63) // 64 * 64
    assert hashlib.sha256(content[:start]).hexdigest() == DIGEST
    fields = json.loads(head)
    assert (fields["journal_id"], fields["lsn"]) == (JOURNAL, LSN)
    columns = {}
    for section in fields["sections"]:
        begin = start + section["offset"]
        assert begin % 64 == 0
        body = content[begin : begin + section["stored"]]
        assert google_crc32c.value(body) == section["crc32c"]
        dtype = np.dtype(section["dtype"])
        size = dtype.itemsize * int(np.prod(section["shape"]))
        plain = pa.Codec("zstd").decompress(body, size, asbytes=True) if size else b""
        columns[section["name"]] = np.frombuffer(plain, dtype).reshape(section["shape"])
    return columns


def test_an_old_checkpoint_is_what_the_page_says() -> None:
    columns = by_the_page(OLD.read_bytes())
    assert columns["state"].tolist() == [2, 0, 2]
    assert columns["prompt"].tolist() == [20, 30, 40]
    assert columns["account_tokens"].tolist() == [[90], [30], [0], [60], [0], [0], [0]]
    assert json.loads(columns["head"].tobytes())["count"] == 3


def test_an_old_checkpoint_is_still_read_and_written_the_same() -> None:
    content = OLD.read_bytes()
    found = checkpoint.decode(memoryview(content), LSN, JOURNAL, DIGEST)
    assert isinstance(found, snapshot.Snapshot)
    assert found.differences(snapshot.take(snapshot.restore(found))) == []
    columns = by_the_page(content)
    assert all(np.array_equal(column, columns[name]) for name, column in found.columns.items())


def test_a_checkpoint_of_another_journal_moment_or_digest_is_none() -> None:
    content = memoryview(OLD.read_bytes())
    for lsn, journal, digest in (
        (LSN + 1, JOURNAL, DIGEST),
        (LSN, "cd" * 16, DIGEST),
        (LSN, JOURNAL, "0" * 64),
    ):
        assert isinstance(checkpoint.decode(content, lsn, journal, digest), str)
    assert isinstance(checkpoint.decode(content[:-200], LSN, JOURNAL, DIGEST), str)
    assert isinstance(checkpoint.decode(content[:40], LSN, JOURNAL, DIGEST), str)
