"""FORMAT.md, written out a second time: bytes made from that page alone are a journal, and the journal's bytes are
what that page says. Nothing of the codec is used here."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import pytest

from fabric_pipelines.errors import CorruptionFound
from fabric_pipelines.journal import Journal

UUID = bytes(range(16))
SALT = google_crc32c.value(UUID)
SEGMENT, COMMIT, DURABLE, SEAL, OPENED = 0xFF01, 0xFF02, 0xFF03, 0xFF04, 0xFF05
SEGMENT_BYTES = 4096
FORMATS = pytest.mark.parametrize("journal_format", [1, 2])  # 1 is read and continued for ever


def frame(kind: int, lsn: int, payload: bytes, *, schema: int = 0, rows: int = 0) -> bytes:
    padded = payload + bytes(-len(payload) % 64)
    head = struct.pack("<4sHHIIQQqQQ", b"FPJ\1", 1, kind, schema, rows, 1, lsn, 99, len(payload), 0)
    head += struct.pack("<I", google_crc32c.value(padded))
    crc = google_crc32c.extend(0 if kind == SEGMENT else SALT, head)
    return head + struct.pack("<I", crc) + padded


def control(
    kind: int, first: int, last: int, durable: int, *, chain: int, opens: int = 1, units: int = 0
) -> bytes:
    payload = struct.pack("<QQQQII16s", first, last, durable, 1, chain, opens, UUID)
    return frame(kind, last, payload, rows=units)


def chain_of(journal_format: int, *frames: bytes) -> int:
    covered = 64 if journal_format == 1 else 60
    return google_crc32c.value(b"".join(made[:covered] for made in frames))


def segment_by_hand(journal_format: int, units: int = 0) -> bytes:
    start = control(SEGMENT, 0, 0, 0, chain=0, opens=0, units=units)
    frames = [control(OPENED, 0, 0, 0, chain=0)]
    frames += [frame(7, 1, b"hello", schema=3, rows=2), frame(8, 2, bytes(64))]
    frames.append(control(COMMIT, 1, 2, 0, chain=chain_of(journal_format, *frames)))
    frames.append(control(DURABLE, 2, 2, 2, chain=chain_of(journal_format, *frames)))
    return b"".join([start, *frames])


def journal_by_hand(folder: Path, content: bytes, journal_format: int) -> None:
    folder.mkdir()
    identity = {"format": journal_format, "journal_id": UUID.hex(), "incarnation": 5}
    (folder / "identity.json").write_text(json.dumps(identity))
    (folder / "00000001.segment").write_bytes(content.ljust(SEGMENT_BYTES, b"\0"))


def frames_of(content: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(kind, LSN, payload) of each frame up to the first that is none."""
    offset = 0
    while content[offset : offset + 4] == b"FPJ\1":
        _, version, kind, _, _, epoch, lsn, _, length, zero, body_crc, crc = struct.unpack_from(
            "<4sHHIIQQqQQII", content, offset
        )
        size = (length + 63) // 64 * 64
        body = content[offset + 64 : offset + 64 + size]
        seed = 0 if kind == SEGMENT else SALT
        assert (version, epoch, zero) == (1, 1, 0)
        assert google_crc32c.extend(seed, content[offset : offset + 60]) == crc
        assert google_crc32c.value(body) == body_crc
        yield kind, lsn, body[:length]
        offset += 64 + size


def headers_of(content: bytes) -> list[bytes]:
    found, offset = [], 0
    while content[offset : offset + 4] == b"FPJ\1":
        found.append(content[offset : offset + 64])
        offset += 64 + (struct.unpack_from("<Q", content, offset + 40)[0] + 63) // 64 * 64
    return found


@FORMATS
def test_bytes_made_from_the_page_are_a_journal(tmp_path: Path, journal_format: int) -> None:
    journal_by_hand(tmp_path / "j", segment_by_hand(journal_format), journal_format)
    with Journal.open(tmp_path / "j", segment_bytes=SEGMENT_BYTES) as journal:
        assert (journal.journal_id, journal.incarnation) == (UUID.hex(), 5)
        assert journal.recovered.recorded_durable_lsn == 2
        assert journal.recovered.opens == 1
        first, second = journal.replay()
    assert (first.kind, first.schema_id, first.rows, first.time_us) == (7, 3, 2, 99)
    assert (bytes(first.payload), bytes(second.payload)) == (b"hello", bytes(64))


@FORMATS
@pytest.mark.parametrize(("units", "read"), [(0, True), (1, True), (2, False), (2**32 - 1, False)])
def test_a_file_shorter_than_its_segment_frame_says_is_refused(
    tmp_path: Path, journal_format: int, units: int, read: bool
) -> None:
    journal_by_hand(tmp_path / "j", segment_by_hand(journal_format, units), journal_format)
    if read:
        Journal.open(tmp_path / "j", segment_bytes=SEGMENT_BYTES).close()
        return
    with pytest.raises(CorruptionFound, match=f"4096 bytes, its size is {units * 4096}"):
        Journal.open(tmp_path / "j", segment_bytes=SEGMENT_BYTES)


def test_the_first_frame_says_how_large_its_file_is(tmp_path: Path) -> None:
    with Journal.open(tmp_path, segment_bytes=3 * SEGMENT_BYTES) as journal:
        journal.append(7, b"", rows=9, time_us=1)
        journal.commit()
        journal.roll()
    for path in tmp_path.glob("*.segment"):
        headers = headers_of(path.read_bytes())
        rows = [struct.unpack_from("<I", header, 12)[0] for header in headers]
        assert rows[0] == 3
        assert set(rows[1:]) <= {0, 9}, "no other control frame has anything there"


@FORMATS
def test_the_journal_writes_what_the_page_says(tmp_path: Path, journal_format: int) -> None:
    journal_by_hand(tmp_path / "j", segment_by_hand(journal_format), journal_format)
    with Journal.open(tmp_path / "j", segment_bytes=SEGMENT_BYTES) as journal:
        journal.append(9, [b"ab", b"c"], rows=1, time_us=1)
        journal.commit()
    content = (tmp_path / "j" / "00000001.segment").read_bytes()
    found = list(frames_of(content))
    kinds = [kind for kind, _, _ in found]
    assert kinds == [SEGMENT, OPENED, 7, 8, COMMIT, DURABLE, OPENED, 9, COMMIT, DURABLE]
    assert [lsn for _, lsn, _ in found] == [0, 0, 1, 2, 2, 2, 2, 3, 3, 3]
    assert found[7][2] == b"abc"
    first, last, durable, low, chain, opens, uuid = struct.unpack("<QQQQII16s", found[8][2])
    assert (first, last, durable, low, opens, uuid) == (3, 3, 2, 1, 2, UUID)
    headers = headers_of(content)
    commit = kinds.index(COMMIT, 5)
    assert chain == chain_of(journal_format, *headers[1:commit])
    assert struct.unpack_from("<QQQ", found[9][2]) == (3, 3, 3)


@FORMATS
def test_a_segment_of_another_journal_is_refused(tmp_path: Path, journal_format: int) -> None:
    journal_by_hand(tmp_path / "j", segment_by_hand(journal_format), journal_format)
    identity = tmp_path / "j" / "identity.json"
    identity.write_text(identity.read_text().replace(UUID.hex(), UUID[::-1].hex()))
    with pytest.raises(CorruptionFound, match="belongs to journal 000102"):
        Journal.open(tmp_path / "j", segment_bytes=SEGMENT_BYTES)


@pytest.mark.parametrize("version", [1, 2])  # a file of version 1 is none: the segment is read
def test_an_index_file_is_what_the_page_says_and_one_made_from_it_is_believed(
    tmp_path: Path, version: int
) -> None:
    with Journal.open(tmp_path, segment_bytes=SEGMENT_BYTES) as journal:
        uuid = bytes.fromhex(journal.journal_id)
        for kind in (5, 6, 9):
            journal.append(kind, bytes(100), rows=1, time_us=1)
        journal.commit()
        journal.roll()
    index, segment = tmp_path / "00000001.index", tmp_path / "00000001.segment"
    content = segment.read_bytes()
    seal = content.rindex(b"FPJ\1")
    chain = struct.unpack_from("<QQQQI", content, seal + 64)[4]
    body = struct.pack("<4sIQQQQI16s", b"FPI\1", version, 1, 1, 3, seal + 128, chain, uuid)
    body += struct.pack("<3Q3H", 256, 448, 640, 5, 6, 9)
    if version == 2:
        body += b"".join(content[at + 60 : at + 64] for at in (256, 448, 640))
    made = body + struct.pack("<I", google_crc32c.value(body))
    assert (index.read_bytes() == made) == (version == 2)
    index.write_bytes(made + b"left from an earlier use")
    with Journal.open(tmp_path, segment_bytes=SEGMENT_BYTES, lazy=True) as journal:
        unread = bytearray(b"\1\1\1") if version == 2 else None
        assert journal._segments[0].unread == unread
        assert journal.lsns_of(6) == [2]


def test_a_control_frame_that_names_another_first_lsn_than_it_has_is_none(tmp_path: Path) -> None:
    content = segment_by_hand(2)
    headers = headers_of(content)
    good = control(DURABLE, 2, 2, 2, chain=chain_of(2, *headers[1:-1]))
    assert content.endswith(good)
    bad = control(DURABLE, 1, 2, 2, chain=chain_of(2, *headers[1:-1]))
    for name, last, cut in (("good", good, 0), ("bad", bad, 1)):
        journal_by_hand(tmp_path / name, content[: -len(good)] + last, 2)
        with Journal.open(tmp_path / name, segment_bytes=SEGMENT_BYTES) as journal:
            assert (journal.recovered.last_lsn, journal.recovered.cut_frames) == (2, cut)


def test_the_chain_depends_on_what_the_frames_hold() -> None:
    """That of format 1 did not: each header ends in its own CRC, and a CRC over both is the same for all."""
    one, other = frame(7, 1, b"hello"), frame(8, 1, b"other", rows=9)
    assert chain_of(1, one) == chain_of(1, other)
    assert chain_of(2, one) != chain_of(2, other)


def test_a_new_journal_is_of_the_newest_format_and_its_identity_has_a_crc(tmp_path: Path) -> None:
    Journal.open(tmp_path, segment_bytes=SEGMENT_BYTES).close()
    path = tmp_path / "identity.json"
    content = json.loads(path.read_text())
    said = f"{content['format']} {content['journal_id']} {content['incarnation']}"
    assert content["format"] == 2
    assert content["crc32c"] == google_crc32c.value(said.encode())
    path.write_text(json.dumps(content | {"incarnation": content["incarnation"] ^ 1}))
    with pytest.raises(CorruptionFound, match=r"identity\.json does not match its CRC32C"):
        Journal.open(tmp_path, segment_bytes=SEGMENT_BYTES)
