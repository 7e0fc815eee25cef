"""Each comparison of a CRC in broker and journal is needed: found in the source, taken out one at a time, and something
false is then believed, or something kept is lost. Each has its own damage, which the whole source refuses or survives;
without one that stands against crashes the enumeration of crash states breaks a promise as well, and for each of the
others it is said why no crash can show it."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fabric_pipelines.broker import checkpoint as checkpoint_module
from fabric_pipelines.broker import client, server
from fabric_pipelines.broker.tiering import Water
from fabric_pipelines.errors import ColdLost, CorruptionFound, SchemaError
from fabric_pipelines.journal import Journal
from fabric_pipelines.journal.stub import write_stub
from fabric_pipelines.records.task import column_checksums
from fabric_pipelines.testing.broker_bench import (
    completions,
    ipc_of,
    submission_of,
    tasks_of,
)
from fabric_pipelines.testing.crash_judge import Broken, Judge, states_of
from fabric_pipelines.testing.crash_life import Life
from fabric_pipelines.testing.disk_bench import DiskBench
from fabric_pipelines.testing.memory_store import MemoryStore
from fabric_pipelines.testing.sim_disk import Image, SimDisk, all_kept
from tests.mutations import Site, crc_sites, take_out
from tests.stateful.test_broker_crash import torn_index_files
from tests.stateful.test_journal_crash import highest_lsn_after_writing_again, make_cut_group

FOLDER = Path("/simulated/journal")
SEGMENT, INDEX = FOLDER / "00000001.segment", FOLDER / "00000001.index"
SEGMENT_BYTES = 4096


@pytest.fixture(scope="module")
def life() -> Life:
    return Life(SimDisk()).run()


def opened(disk: SimDisk, store: MemoryStore | None = None) -> Journal:
    return Journal.open(FOLDER, segment_bytes=SEGMENT_BYTES, ops=disk, lazy=True, store=store)


def sealed(
    kinds: tuple[int, ...] = (3, 4, 5), mark: int = 1, disk: SimDisk | None = None
) -> SimDisk:
    """One sealed segment with a frame of each kind, and an empty one behind it."""
    disk = disk or SimDisk()
    with opened(disk) as journal:
        for kind in kinds:
            lsn = journal.next_lsn
            journal.append(kind, bytes([mark + lsn]) * 100, rows=lsn, time_us=1000 + lsn)
        journal.commit()
        journal.roll()
    return disk


def frames_in(image: Image, store: MemoryStore | None = None) -> list[tuple[object, ...]] | None:
    """Every frame as a reader sees it, with the kinds as the index of frames has them; None if it is refused."""
    try:
        with opened(SimDisk(image), store) as journal:
            frames = [
                journal.read(lsn) for lsn in range(journal.first_lsn, journal.durable_lsn + 1)
            ]
            kinds = {lsn: kind for kind in range(1, 12) for lsn in journal.lsns_of(kind)}
            return [
                (f.lsn, f.kind, kinds[f.lsn], f.rows, f.time_us, bytes(f.payload)) for f in frames
            ]
    except CorruptionFound:
        return None


def changed(image: Image, path: Path, at: int, bit: int = 1) -> Image:
    changed = image.copy()
    inode = changed.entries[path]
    content = changed.contents[inode]
    changed.contents[inode] = content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :]
    return changed


def image_of(disk: SimDisk) -> Image:
    return all_kept(disk).image


# -- one damage for each comparison: True if something false is believed or something kept is lost


def a_header_in_a_sealed_segment(life: Life) -> bool:
    image = image_of(sealed())
    good = frames_in(image)
    begin = 256  # SEGMENT and OPENED stand before the first data frame
    return any(
        frames_in(changed(image, SEGMENT, begin + at)) not in (good, None) for at in range(4, 60)
    )


def a_payload_in_a_sealed_segment(life: Life) -> bool:
    image = image_of(sealed())
    good = frames_in(image)
    return frames_in(changed(image, SEGMENT, 256 + 64 + 7)) not in (good, None)


def a_torn_index_file(life: Life) -> bool:
    try:
        Judge(life).judge_all(torn_index_files(life.disk))
    except Broken:
        return True
    return False


def an_index_file_of_another_course_of_the_journal(life: Life) -> bool:
    """Somebody restored a segment from a copy and left the index that was written after the copy was taken."""
    begun = SimDisk()
    opened(begun).close()
    copy = image_of(begun)
    one, other = sealed((3, 4, 5), disk=SimDisk(copy)), sealed((7, 8, 9), disk=SimDisk(copy))
    mine, theirs = image_of(one), image_of(other)
    good = frames_in(mine)
    mine.contents[mine.entries[INDEX]] = theirs.contents[theirs.entries[INDEX]]
    return frames_in(mine) != good


def a_segment_of_another_course_of_the_journal(life: Life) -> bool:
    """Likewise, with as many frames in it, and nothing of what the segment behind it goes on from."""
    begun = SimDisk()
    opened(begun).close()
    copy = image_of(begun)
    one, other = sealed(mark=1, disk=SimDisk(copy)), sealed(mark=50, disk=SimDisk(copy))
    mine, theirs = image_of(one), image_of(other)
    good = frames_in(mine)
    mine.contents[mine.entries[SEGMENT]] = theirs.contents[theirs.entries[SEGMENT]]
    del mine.entries[INDEX]
    return frames_in(mine) not in (good, None)


def a_cut_group_that_comes_back(life: Life) -> bool:
    """Stale frames behind a cut, and new ones in front that end where those begin."""
    image = make_cut_group()
    return any(highest_lsn_after_writing_again(image, size) != 2 for size in (320, 448))


def a_copy_that_the_store_spoiled(life: Life) -> bool:
    store = MemoryStore(spoil=lambda name, content: content[:350] + b"?" + content[351:])
    disk = sealed()
    good = frames_in(image_of(disk))
    with opened(disk, store) as journal:
        segment = journal.sealed_segment(1)
        assert segment is not None
        with contextlib.suppress(ColdLost):
            journal.went_cold(journal.cold.copy_out(segment), journal.durable_lsn)
        fill_a_free_file(journal)
    again = frames_in(image_of(disk), store)
    return again is None or again[:3] != good


def fill_a_free_file(journal: Journal) -> None:
    """So that nothing is left of a file that was given up."""
    journal.append(3, b"more", rows=1, time_us=1)
    journal.commit()
    journal.roll()


def a_stub(life: Life) -> bool:
    store, disk = MemoryStore(), sealed()
    with opened(disk, store) as journal:
        segment = journal.sealed_segment(1)
        assert segment is not None
        stub = journal.cold.copy_out(segment)
        journal.went_cold(stub, journal.durable_lsn)
        fill_a_free_file(journal)
    image = image_of(disk)
    good = frames_in(image, store)
    assert good is not None
    size = len(image.contents[image.entries[FOLDER / stub.file_name]])
    kinds = range(size - 4 - 2 * len(stub.kinds), size - 4)
    return any(
        frames_in(changed(image, FOLDER / stub.file_name, at), store) not in (good, None)
        for at in kinds
    )


def a_stub_that_is_not_of_its_fact(life: Life) -> bool:
    """Whole by itself, but of another object than the log says was put: from a copy of another course."""
    disk, store = SimDisk(), MemoryStore()
    bench = DiskBench(ops=disk, segment_bytes=8 * 4096, store=store, water=Water(0, 0))
    batches = [tasks_of([60] * 10, seed=at) for at in range(8)]
    bench.submit(submission_of(batches), batches)
    for _ in range(3):
        bench.disk.roll()
        bench.checkpoint()
    epoch = next(holding.epoch for holding in bench.disk.holdings if holding.cold)
    stub = bench.disk.cold.stubs[epoch]
    write_stub(disk, bench.folder, replace(stub, crc=stub.crc ^ 1), bench.disk._uuid)
    try:
        bench.crash()
    except CorruptionFound:
        return False
    return True


def a_column_of_a_checkpoint(life: Life) -> bool:
    image = image_of(life.disk)
    names = [path for path in image.entries if path.name.startswith("checkpoint-")]
    content = bytearray(image.contents[image.entries[max(names)]])
    length = int.from_bytes(content[8:16], "little")
    head = json.loads(content[64 : 64 + length])
    start = (64 + length + 63) // 64 * 64
    keys = next(section for section in head["sections"] if section["name"] == "key")
    found = 0
    seal = hashlib.sha256(content[:start]).hexdigest()
    for at in range(keys["stored"] - 1, keys["stored"] - 65, -1):
        content[start + keys["offset"] + at] ^= 1
        with contextlib.suppress(OSError):  # zstd itself notices some
            decoded = checkpoint_module.decode(
                memoryview(content), head["lsn"], head["journal_id"], seal
            )
            found += not isinstance(decoded, str)
        content[start + keys["offset"] + at] ^= 1
    return found > 0


def a_lease_on_the_wire(life: Life) -> bool:
    whole = ipc_of(tasks_of([30, 40]))
    bad = bytearray(whole)
    bad[len(whole) // 2] ^= 1
    reply = {"crc32c": checkpoint_module.crc32c(whole)}
    assert client._checked(reply, memoryview(whole)).num_rows == 2
    return _passes(lambda: client._checked(reply, memoryview(bytes(bad))))


def a_completion_on_the_wire(life: Life) -> bool:
    whole = ipc_of(completions([1, 2]))
    head = {"session": "w", "crc32c": checkpoint_module.crc32c(whole) ^ 1}
    desk = SimpleNamespace(_ask=lambda act, rank: ({}, ()))
    who = SimpleNamespace(session=lambda name: name)
    return _passes(
        lambda: server.BrokerServer._computed(desk, head, [memoryview(whole)], who)  # type: ignore[arg-type]
    )


def an_upload_on_the_wire(life: Life) -> bool:
    batch = tasks_of([30, 40])
    sums = column_checksums(batch)
    note = {"first_row": 0, "crc32c": [sums[0] ^ 1, *sums[1:]]}
    chunk = SimpleNamespace(data=batch, app_metadata=json.dumps(note).encode())
    reader = SimpleNamespace(read_chunk=lambda: chunk)
    return _passes(lambda: next(server._uploads(submission_of([batch]), reader, None)))


def _passes(call: Callable[[], object]) -> bool:
    try:
        call()
    except SchemaError as refused:
        return "does not match its CRC32C" not in str(refused)
    return True


SCENARIOS: dict[tuple[str, str], Callable[[Life], bool]] = {
    ("unpack_header", "crc32c"): a_header_in_a_sealed_segment,
    ("frame_at", "crc32c"): a_payload_in_a_sealed_segment,
    ("read_index", "crc32c"): a_torn_index_file,
    ("_summary", "control"): an_index_file_of_another_course_of_the_journal,
    ("_require_joined", "scan"): a_segment_of_another_course_of_the_journal,
    ("_closes", "control"): a_cut_group_that_comes_back,
    ("ColdTier._require_back", "crc"): a_copy_that_the_store_spoiled,
    ("unpack_stub", "crc32c"): a_stub,
    ("Tiering._reconcile", "fact"): a_stub_that_is_not_of_its_fact,
    ("decode", "crc32c"): a_column_of_a_checkpoint,
    ("_checked", "crc32c"): a_lease_on_the_wire,
    ("BrokerServer._computed", "crc32c"): a_completion_on_the_wire,
    ("_uploads", "column_checksums"): an_upload_on_the_wire,
}
NO_CRASH: dict[tuple[str, str], str] = {
    (
        "_summary",
        "control",
    ): "an index file is written once the SEAL frame is durable, so a crash leaves it as it must be "
    "for this use of the segment or torn (`read_index`); one that is whole and differs comes from a copy",
    (
        "_require_joined",
        "scan",
    ): "a SEGMENT frame is written once all that is in front of it is durable, so a crash cannot "
    "leave a sealed segment of another course of the journal; a restored copy can",
    (
        "ColdTier._require_back",
        "crc",
    ): "the store gave back another object than was put, without any crash",
    (
        "unpack_stub",
        "crc32c",
    ): "a stub is fsynced under another name before its rename, so a crash leaves it whole or "
    "absent; what it holds then only rots",
    (
        "Tiering._reconcile",
        "fact",
    ): "stub and fact are both of one sealed segment, which does not change: a crash "
    "leaves one without the other, never two that differ",
    (
        "decode",
        "crc32c",
    ): "a checkpoint is fsynced before the fact that names it by digest is logged, so a crash leaves "
    "it whole or not named; the columns then only rot",
    ("_checked", "crc32c"): "bytes on a wire",
    ("BrokerServer._computed", "crc32c"): "bytes on a wire",
    ("_uploads", "column_checksums"): "bytes on a wire",
}
SITES = crc_sites()
RED: dict[str, list[str]] = {}


def key_of(site: Site) -> tuple[str, str]:
    return site.name, site.text.lstrip("(").split("(")[0].split(".")[0].split(" ")[0]


AGAINST_CRASHES = [site for site in SITES if key_of(site) not in NO_CRASH]


def test_every_comparison_of_a_crc_has_its_damage() -> None:
    assert {key_of(site) for site in SITES} == set(SCENARIOS)
    assert len(SITES) == len(SCENARIOS) >= 13
    assert set(NO_CRASH) < set(SCENARIOS)
    assert {site.name for site in AGAINST_CRASHES} == {
        "unpack_header",
        "frame_at",
        "read_index",
        "_closes",
    }


@pytest.mark.parametrize("site", SITES, ids=str)
def test_without_any_one_crc_test_damage_is_believed(
    site: Site, life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage = SCENARIOS[key_of(site)]
    assert not damage(life), "the whole source falls for it"
    take_out(site, monkeypatch)
    assert damage(life)
    said = RED.setdefault(str(site), [])
    said.append(f"red in {damage.__name__}")
    if key_of(site) in NO_CRASH:
        said.append(f"in no crash: {NO_CRASH[key_of(site)]}")


@pytest.mark.parametrize("site", AGAINST_CRASHES, ids=str)
def test_without_a_crc_test_against_crashes_a_crash_breaks_a_promise(
    site: Site, life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In states that hold no chance; the whole source keeps every promise in them (test_broker_crash.py has them all)."""
    take_out(site, monkeypatch)
    with pytest.raises(Broken) as broken:
        Judge(life).judge_all(states_of(life.disk, seed=0, subsets=0, torn=0))
    RED.setdefault(str(site), []).append(f"red in the enumeration of crashes ({broken.value.kind})")


def test_without_all_the_others_at_once_no_crash_breaks_a_promise(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is true that they stand against other things than crashes: copies, rot, a store, a wire."""
    for site in SITES:
        if key_of(site) in NO_CRASH:
            take_out(site, monkeypatch)
    judge = Judge(life)
    judge.judge_all(states_of(life.disk, seed=0, subsets=0, torn=0))
    assert len(judge.states) >= 3000


def test_every_comparison_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The list for the reader of a log; complete whenever this file ran whole."""
    with capsys.disabled():
        for name, verdicts in sorted(RED.items()):
            print(f"\n  {name}: {'; '.join(verdicts)}", end="")  # noqa: T201
    assert not RED or set(RED) == set(map(str, SITES))
