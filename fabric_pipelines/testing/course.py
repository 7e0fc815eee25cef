"""Another course that the journal could have taken: the same segment with its groups in the opposite order.

Whole in every part by itself, of the same journal, epoch, first LSN and size, as a copy is that was taken before a
crash and put back after it: only what is around it tells that it is not the one.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace

from fabric_pipelines.journal.frame import (
    COMMIT,
    HEADER_BYTES,
    SEAL,
    SEGMENT,
    Control,
    crc32c,
    extend_chain,
    pack_control,
    pack_header,
    payload_crc,
    salt_of,
)
from fabric_pipelines.journal.identity import FORMAT
from fabric_pipelines.journal.index import Index
from fabric_pipelines.journal.segment import Found, Mapped, frame_at


@dataclass(frozen=True, slots=True)
class Course:
    content: bytes
    index: Index

    @property
    def crc(self) -> int:
        return crc32c(self.content)


def other_course(content: bytes, epoch: int, salt: int, journal_id: str) -> Course | None:
    """Of a sealed segment in the format of today. None if there is no other order of its groups."""
    start, items, seal = _parsed(content, epoch, salt)
    groups = [item for item in items if len(item) > 1]
    if len(groups) < 2:
        return None
    turned = iter(reversed(groups))
    items = [next(turned) if len(item) > 1 else item for item in items]
    return _laid(content, start, items, seal, epoch, salt, journal_id)


def other_payload(content: bytes, epoch: int, salt: int, journal_id: str) -> Course:
    """Of a sealed segment: the same frames in the same places, one bit of the first payload another, whole in itself."""
    start, items, seal = _parsed(content, epoch, salt)
    at = next(at for at, item in enumerate(items) if len(item) > 1)
    first, *others = items[at]
    payload = bytes([first.payload[0] ^ 1]) + bytes(first.payload[1:])
    crc, _ = payload_crc([payload])
    changed = replace(
        first, payload=memoryview(payload), header=replace(first.header, payload_crc=crc)
    )
    items[at] = [changed, *others]
    made = _laid(content, start, items, seal, epoch, salt, journal_id)
    assert made is not None
    return made


def other_frame(content: bytes, epoch: int, salt: int, journal_id: str) -> bytes:
    """Of a sealed segment: the same bytes but for one frame, which is another whole one."""
    other = other_payload(content, epoch, salt, journal_id)
    begin = other.index.offsets[0]
    found = frame_at(Mapped(memoryview(content)), begin, epoch=epoch, salt=salt)
    assert found is not None
    end = begin + found.header.frame_bytes
    return content[:begin] + other.content[begin:end] + content[end:]


def of_another_journal(content: bytes, epoch: int, salt: int, journal_id: str) -> bytes:
    """Of a sealed segment: what a journal of another id would have there, had it been told the same."""
    start, items, seal = _parsed(content, epoch, salt)
    other = another_id(journal_id)
    made = _laid(content, start, items, seal, epoch, salt_of(other), other.hex())
    assert made is not None
    assert start.control is not None
    head, body = pack_control(
        SEGMENT,
        replace(start.control, journal_id=other),
        epoch=epoch,
        time_us=start.header.time_us,
        salt=salt_of(other),
        file_bytes=start.header.file_bytes,
    )
    return head + body + made.content[len(head) + len(body) :]


def another_id(journal_id: str) -> bytes:
    return bytes(byte ^ 0xFF for byte in bytes.fromhex(journal_id))


def _laid(
    content: bytes,
    start: Found,
    items: list[list[Found]],
    seal: Found,
    epoch: int,
    salt: int,
    journal_id: str,
) -> Course | None:
    """The segment that holds these frames one after the other; None if it is `content`."""
    assert start.control is not None
    lsn, chain, durable = start.control.last_lsn, start.control.chain, start.control.durable_lsn
    first_lsn = lsn + 1
    made = bytearray(content[: start.header.frame_bytes])
    offsets, kinds, crcs = array("Q"), array("H"), array("I")

    def control(found: Found, first: int) -> None:
        nonlocal chain, durable
        assert found.control is not None
        durable = min(max(durable, found.control.durable_lsn), lsn)
        said = Control(
            first,
            lsn,
            durable,
            found.control.low_epoch,
            chain,
            found.control.opens,
            bytes.fromhex(journal_id),
        )
        head, body = pack_control(
            found.header.kind, said, epoch=epoch, time_us=found.header.time_us, salt=salt
        )
        made.extend(head + body)
        if found.header.kind != SEAL:
            chain = extend_chain(chain, head, FORMAT)

    for item in items:
        before = lsn
        for found in item[:-1]:
            lsn += 1
            offsets.append(len(made))
            kinds.append(found.header.kind)
            head = _renumbered(found, lsn, epoch, salt)
            crcs.append(int.from_bytes(head[-4:], "little"))
            chain = extend_chain(chain, head, FORMAT)
            made.extend(head + _padded_payload(found))
        last = item[-1]
        assert last.control is not None
        control(last, before + 1 if last.header.kind == COMMIT else lsn)
    end_chain = chain
    control(seal, lsn)
    if bytes(made) == content:
        return None
    assert len(made) == len(content), "the same frames in another order take the same room"
    index = Index(epoch, first_lsn, len(made), end_chain, offsets, kinds, crcs)
    return Course(bytes(made), index)


def _renumbered(found: Found, lsn: int, epoch: int, salt: int) -> bytes:
    header = found.header
    return pack_header(
        kind=header.kind,
        epoch=epoch,
        lsn=lsn,
        time_us=header.time_us,
        length=header.length,
        payload_crc=header.payload_crc,
        salt=salt,
        schema_id=header.schema_id,
        rows=header.rows,
    )


def _padded_payload(found: Found) -> bytes:
    return bytes(found.payload).ljust(found.header.frame_bytes - HEADER_BYTES, b"\0")


def _parsed(content: bytes, epoch: int, salt: int) -> tuple[Found, list[list[Found]], Found]:
    """The SEGMENT frame, then each control frame with the group in front of it, then the SEAL frame."""
    source, offset = Mapped(memoryview(content)), 0
    frames: list[Found] = []
    while (found := frame_at(source, offset, epoch=epoch, salt=salt)) is not None:
        frames.append(found)
        offset += found.header.frame_bytes
    assert (frames[0].header.kind, frames[-1].header.kind) == (SEGMENT, SEAL)
    items: list[list[Found]] = [[]]
    for found in frames[1:-1]:
        items[-1].append(found)
        if found.control is not None:
            items.append([])
    assert not items[-1], "a group without its COMMIT frame is in front of no SEAL frame"
    return frames[0], items[:-1], frames[-1]
