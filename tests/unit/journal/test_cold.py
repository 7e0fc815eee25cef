"""Segments in the cold tier: read as if they were here, believed only with their CRCs, and refused by name."""

from __future__ import annotations

import json
import shutil
import struct
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from fabric_pipelines.errors import (
    ColdLost,
    CorruptionFound,
    SettingsError,
    StoreUnreachable,
)
from fabric_pipelines.journal import Journal, Stub
from fabric_pipelines.journal.stub import unpack_stub
from fabric_pipelines.testing.memory_store import MemoryStore

SEGMENT_BYTES = 8192
FIXTURES = Path(__file__).parent / "fixtures"


def payload(lsn: int) -> bytes:
    return bytes([lsn % 251]) * (200 + lsn)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def opened(folder: Path, store: MemoryStore | None) -> Journal:
    return Journal.open(folder, segment_bytes=SEGMENT_BYTES, lazy=True, store=store)


@pytest.fixture
def journal(tmp_path: Path, store: MemoryStore) -> Iterator[Journal]:
    """Four sealed segments of five frames each; the second is cold, and its file was used again."""
    made = opened(tmp_path, store)
    for _ in range(3):
        fill(made)
    go_cold(made, 2)
    fill(made)
    yield made
    made.close()


def fill(journal: Journal) -> None:
    for _ in range(5):
        journal.append(3, payload(journal.next_lsn), rows=1, time_us=1)
    journal.commit()
    journal.roll()


def go_cold(journal: Journal, epoch: int) -> Stub:
    segment = journal.sealed_segment(epoch)
    assert segment is not None
    stub = journal.cold.copy_out(segment)
    fact = journal.append(9, b"uploaded", rows=0, time_us=1)
    journal.commit()
    journal.went_cold(stub, fact)
    return stub


def the_object(store: MemoryStore) -> str:
    (name,) = store.objects
    return name


def test_a_cold_segment_is_read_as_if_it_were_here_in_this_life_and_the_next(
    journal: Journal, tmp_path: Path, store: MemoryStore
) -> None:
    hot = journal.bytes_used
    journal.close()
    again = opened(tmp_path, store)
    for at in (8, 6, 10):
        assert bytes(again.read(at).payload) == payload(at)
        assert again.view(at)[1] is False
    everything = {frame.lsn: bytes(frame.payload) for frame in again.replay()}
    assert everything == {**{lsn: payload(lsn) for lsn in range(1, 22)}, 16: b"uploaded"}
    assert [holding.cold for holding in again.holdings] == [False, True, False, False, False]
    assert again.bytes_used >= hot  # an OPENED frame more
    assert again.lsns_of(9) == [16]
    again.close()


def test_the_local_file_is_gone_and_only_the_bytes_of_a_wanted_frame_come_back(
    journal: Journal, store: MemoryStore
) -> None:
    assert len(list(journal.folder.glob("*.segment"))) == 4
    store.read_bytes = 0
    journal.read(7)
    assert 200 < store.read_bytes < 512
    before = store.read_bytes
    journal.read(7)
    assert store.read_bytes == before, "fetched twice"


def test_frames_that_lie_close_come_with_one_request(journal: Journal, store: MemoryStore) -> None:
    ((segment, away),) = journal.away(np.arange(1, 22))
    assert away == [6, 7, 8, 9, 10]
    store.calls.clear()
    journal.cold.keep(journal.cold.fetch(segment, away))
    assert [call for call, _ in store.calls] == ["read"]
    assert journal.away(np.arange(1, 22)) == []


def test_a_copy_counts_only_once_it_was_read_back_whole(tmp_path: Path, store: MemoryStore) -> None:
    with opened(tmp_path, store) as journal:
        fill(journal)
        segment = journal.sealed_segment(1)
        assert segment is not None
        for spoiled in (
            lambda name, content: content[:-1],
            lambda name, content: content + b"\0",
            lambda name, content: content[:700] + bytes([content[700] ^ 4]) + content[701:],
        ):
            store.spoil = spoiled
            with pytest.raises(ColdLost, match="stays here"):
                journal.cold.copy_out(segment)
        store.before = refuse
        with pytest.raises(StoreUnreachable):
            journal.cold.copy_out(segment)
        assert not journal.holdings[0].cold
        assert [frame.lsn for frame in journal.replay()] == [1, 2, 3, 4, 5]
    with opened(tmp_path, store) as journal:
        assert not journal.holdings[0].cold, "a stub is no reason to leave a file that is here"
        assert set(journal.cold.stubs) == {1}, "what may be in the store is known"


def refuse(call: str, name: str) -> None:
    raise StoreUnreachable("not now")


def test_a_segment_damaged_here_does_not_go_cold(tmp_path: Path, store: MemoryStore) -> None:
    with opened(tmp_path, store) as journal:
        fill(journal)
        segment = journal.sealed_segment(1)
        assert segment is not None
        content = bytearray(segment.path.read_bytes())
        content[segment.offsets[2] + 80] ^= 1
        segment.path.write_bytes(content)
        with pytest.raises(CorruptionFound, match="does not go to the cold tier"):
            journal.cold.copy_out(segment)
        assert store.objects == {}


def test_a_journal_with_cold_segments_is_refused_without_its_store(
    journal: Journal, tmp_path: Path
) -> None:
    journal.close()
    with pytest.raises(SettingsError, match="memory://cold: set FABRIC_BROKER_COLD"):
        opened(tmp_path, None)


@pytest.mark.parametrize("how", ["missing", "short", "changed"])
def test_a_lost_object_is_refused_by_name_and_other_segments_go_on(
    journal: Journal, store: MemoryStore, how: str
) -> None:
    name = the_object(store)
    content = store.objects.pop(name)
    said = {"missing": "is missing", "short": "bytes, 2304 were put|bytes, .* were put"}
    if how == "short":
        store.objects[name] = content[:-1000]
    elif how == "changed":
        store.objects[name] = bytes(len(content))
    lsn = 10
    with pytest.raises(ColdLost, match=said.get(how, "was changed at offset")) as caught:
        journal.read(lsn)
    assert f"object memory://cold/{name} of the cold tier" in str(caught.value)
    assert ("LSN 10 cannot" if how == "changed" else "LSN 6..10 cannot") in str(caught.value)
    assert bytes(journal.read(3).payload) == payload(3)
    assert bytes(journal.read(12).payload) == payload(12)


def test_a_flipped_bit_anywhere_in_an_object_is_never_believed_and_always_found(
    journal: Journal, store: MemoryStore
) -> None:
    segment = journal.sealed_segment(2)
    assert segment is not None
    name = the_object(store)
    good = store.objects[name]
    assert not journal.cold.scrub(segment).damaged
    for at in range(0, len(good), 5):
        store.objects[name] = good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :]
        journal.cold.forget_below(1 << 40)
        for lsn in range(6, 11):
            begin = segment.offsets[lsn - 6]
            hit = begin <= at < begin + 64 + (len(payload(lsn)) + 63) // 64 * 64
            if hit:
                with pytest.raises(ColdLost):
                    journal.read(lsn)
            else:
                assert bytes(journal.read(lsn).payload) == payload(lsn)
        assert journal.cold.scrub(segment).damaged, at


@pytest.fixture
def two_courses(tmp_path: Path) -> tuple[MemoryStore, bytes]:
    """The store of a journal in `a` with one cold segment, and the object of a copy of that journal that went another
    way: every frame of it is whole in itself, of the right epoch and LSN, and in its place."""
    stores = []
    opened(tmp_path / "a", MemoryStore()).close()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for name, mark in (("a", 1), ("b", 2)):
        stores.append(MemoryStore())
        with opened(tmp_path / name, stores[-1]) as made:
            for epoch in range(1, 5):
                for _ in range(5):
                    made.append(3, bytes([mark]) * 300, rows=1, time_us=1)
                made.commit()
                made.roll()
                if epoch == 2:
                    go_cold(made, 1)
    ours, theirs = stores
    ours.read_bytes = 0
    (name,) = ours.objects
    assert len(ours.objects[name]) == len(theirs.objects[name])
    assert ours.objects[name] != theirs.objects[name]
    return ours, theirs.objects[name]


def as_version_1(folder: Path) -> None:
    """The stub in `folder`, as it was written before stubs had CRCs of frames."""
    (path,) = folder.glob("*.cold")
    uuid = bytes.fromhex(json.loads((folder / "identity.json").read_text())["journal_id"])
    stub = unpack_stub(memoryview(path.read_bytes()), uuid)
    assert stub is not None
    path.write_bytes(replace(stub, crcs=array("I")).pack(uuid))
    assert path.read_bytes()[4] == 1


STUBS = pytest.mark.parametrize("version", [1, 2])
PARTS = pytest.mark.parametrize("part", ["all", "one frame", "the second half"])


@STUBS
@PARTS
def test_a_foreign_object_that_is_whole_in_itself_is_refused_at_the_first_read(
    tmp_path: Path, two_courses: tuple[MemoryStore, bytes], version: int, part: str
) -> None:
    store, other = two_courses
    (name,) = store.objects
    good = store.objects[name]
    if version == 1:
        as_version_1(tmp_path / "a")
    with opened(tmp_path / "a", store) as made:
        segment = made.sealed_segment(1)
        assert segment is not None
        assert made.cold.scrub(segment).damaged == ()
        edges = [*segment.offsets, segment.end]
        hit = {"all": range(1, 6), "one frame": range(3, 4)}.get(part, range(3, 6))
        begin, end = edges[hit[0] - 1], edges[hit[-1]]
        mixed = other if part == "all" else good[:begin] + other[begin:end] + good[end:]
        store.objects[name] = mixed
        refused = range(1, 6) if version == 1 else hit
        for lsn in range(1, 6):
            if lsn in refused:
                with pytest.raises(ColdLost, match=f"{name} of the cold tier (was|is not)"):
                    made.read(lsn)
            else:
                assert bytes(made.read(lsn).payload) == b"\1" * 300
        assert made.holdings[0].cold
        with pytest.raises(ColdLost, match=r"restore that object"):
            list(made.replay())
        if part == "all" or version == 1:
            with pytest.raises(ColdLost, match=r"is not what was put: LSN 1\.\.5"):
                made.cold.scrub(segment)
        else:
            assert [bad.lsn for bad in made.cold.scrub(segment).damaged] == list(hit)
        store.objects[name] = good
        assert [bytes(made.read(lsn).payload) for lsn in range(1, 6)] == [b"\1" * 300] * 5


def test_the_first_use_of_an_old_stub_reads_its_object_once(
    tmp_path: Path, two_courses: tuple[MemoryStore, bytes]
) -> None:
    store, _ = two_courses
    as_version_1(tmp_path / "a")
    with opened(tmp_path / "a", store) as made:
        assert store.read_bytes == 0, "an open needs nothing from the store"
        made.read(2)
        once = store.read_bytes
        (content,) = store.objects.values()
        assert len(content) <= once < 2 * len(content)
        made.read(4)
        assert store.read_bytes - once < 512
    (path,) = (tmp_path / "a").glob("*.cold")
    assert path.read_bytes()[4] == 1


def test_a_foreign_frame_in_a_segment_that_is_here_is_refused_at_the_first_read_and_by_the_scrub(
    tmp_path: Path, two_courses: tuple[MemoryStore, bytes]
) -> None:
    """As after a lost write over what a life before had written there: a lazy open looks at no frame."""
    store, _ = two_courses
    with opened(tmp_path / "a", store) as made:
        ends = [*made._segments[1].offsets, made._segments[1].end]
        here = made._segments[1].path
    content = bytearray(here.read_bytes())
    theirs = next((tmp_path / "b").glob(here.name)).read_bytes()
    content[ends[1] : ends[2]] = theirs[ends[1] : ends[2]]
    here.write_bytes(content)
    with opened(tmp_path / "a", store) as made:
        lsn = made._segments[1].first_lsn + 1
        for read in (made.read, made.view):
            with pytest.raises(CorruptionFound, match=f"offset {ends[1]}: LSN {lsn} cannot"):
                read(lsn)
        assert bytes(made.read(lsn + 1).payload) == b"\1" * 300
        assert [bad.lsn for bad in made.scrub(1 << 20).damaged] == [lsn]


def test_a_stub_with_any_byte_flipped_is_refused_where_it_is_all_there_is(
    journal: Journal, tmp_path: Path, store: MemoryStore
) -> None:
    journal.close()
    (path,) = tmp_path.glob("*.cold")
    good = path.read_bytes()
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x40]) + good[at + 1 :])
        with pytest.raises(CorruptionFound, match=r"epoch-00000002\.cold is damaged"):
            opened(tmp_path, store)
    path.unlink()
    with pytest.raises(CorruptionFound, match="the segment of epoch 2"):
        opened(tmp_path, store)


def test_a_damaged_stub_of_a_segment_that_is_here_costs_nothing(
    tmp_path: Path, store: MemoryStore
) -> None:
    with opened(tmp_path, store) as journal:
        fill(journal)
        segment = journal.sealed_segment(1)
        assert segment is not None
        journal.cold.copy_out(segment)
    (path,) = tmp_path.glob("*.cold")
    path.write_bytes(path.read_bytes()[:-3])
    with opened(tmp_path, store) as journal:
        assert [frame.lsn for frame in journal.replay()] == [1, 2, 3, 4, 5]
        go_cold(journal, 1)
        assert bytes(journal.read(4).payload) == payload(4)


def test_a_dropped_cold_segment_takes_its_object_and_its_stub_along(
    journal: Journal, store: MemoryStore
) -> None:
    stub = journal.cold.stubs[2]
    assert journal.recycle_below(11) == 2
    assert store.objects, "the store is asked after the drop, not by it"
    journal.cold.remove(stub)
    assert store.objects == {}
    assert not list(journal.folder.glob("*.cold"))
    assert journal.cold.stubs == {}


def test_files_of_cold_segments_do_not_pile_up_on_this_disk(
    tmp_path: Path, store: MemoryStore
) -> None:
    with opened(tmp_path, store) as journal:
        for epoch in range(1, 9):
            fill(journal)
            go_cold(journal, epoch)
        assert len(list(tmp_path.glob("*.segment"))) <= 4
        assert [holding.cold for holding in journal.holdings] == [True] * 8 + [False]
        assert {frame.lsn for frame in journal.replay()} == set(range(1, journal.next_lsn))


@STUBS
def test_a_stub_is_what_the_page_says(version: int) -> None:
    """FORMAT.md, "Stub file", written out a second time; the fixtures are what each version wrote first."""
    uuid = bytes(range(16))
    body = struct.pack(
        "<4sIQQQQQQIIIII16s", b"FPT\1", version, 7, 101, 3, 4096, 103, 5, 11, 12, 2, 13, 9, uuid
    )
    body += b"s3://b/kk" + struct.pack("<3Q3H", 128, 256, 512, 2, 5, 9)
    crcs = [0xFFFFFFFF, 0, 77] if version == 2 else []
    body += struct.pack(f"<{len(crcs)}I", *crcs)
    made = body + struct.pack("<I", google_crc32c.value(body))
    assert (FIXTURES / f"stub-{version}.bin").read_bytes() == made
    stub = unpack_stub(memoryview(made), uuid)
    assert stub is not None
    assert (stub.epoch, stub.first_lsn, stub.last_lsn, stub.size) == (7, 101, 103, 4096)
    assert (stub.durable_lsn, stub.low_epoch, stub.start_chain, stub.chain) == (103, 5, 11, 12)
    assert (stub.opens, stub.crc, stub.where) == (2, 13, "s3://b/kk")
    assert (stub.offsets.tolist(), stub.kinds.tolist()) == ([128, 256, 512], [2, 5, 9])
    assert stub.crcs.tolist() == crcs
    assert stub.pack(uuid) == made
    assert unpack_stub(memoryview(made), uuid[::-1]) is None
