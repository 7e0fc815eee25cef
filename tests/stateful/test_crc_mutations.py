"""Damage is a class of the enumeration, and each comparison of a CRC is needed in it: found in the source, taken out one
at a time, and the enumeration of damages and crashes is red each time."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from fabric_pipelines.broker.facts import Kind
from fabric_pipelines.broker.losses import ABOUT, EXACT, LEAST, told_at_start
from fabric_pipelines.broker.state import State
from fabric_pipelines.errors import CorruptionFound, FabricError
from fabric_pipelines.ids import sequence_of
from fabric_pipelines.journal.recovery import Candidate, _scan
from fabric_pipelines.testing.course import other_course
from fabric_pipelines.testing.crash_judge import Broken, Judge, states_of
from fabric_pipelines.testing.crash_life import FOLDER, Life, bench_on
from fabric_pipelines.testing.damage import FIELDS, damages_of, frames_of, moments_of
from fabric_pipelines.testing.damage_carried import damaged_states
from fabric_pipelines.testing.damage_judge import ALL, DamageJudge
from fabric_pipelines.testing.sim_disk import SimDisk
from tests.mutations import Site, crc_sites, take_out

KEPT = {"segment", "index", "checkpoint", "stub", "object", "identity", "foreign"}
CARRIED = {"fetch", "put", "read-back", "upload", "lease", "pull", "completion"}
SITES = crc_sites()
RED: dict[str, list[str]] = {}
NOT_NEEDED = {
    "Checkpoints.require": "damage under a running broker, between the CHECKPOINT fact and the DROP that relies on it: "
    "tests/unit/broker/test_files_underway.py",
    "_told_head": "only tells what was open at a checkpoint that is refused anyhow, by its digest: "
    "tests/unit/broker/test_losses.py",
}


@pytest.fixture(scope="module")
def life() -> Life:
    return Life(SimDisk()).run()


@pytest.mark.timeout(600)  # about 10 s of CPU
def test_whatever_is_damaged_is_refused_by_name_or_without_effect(life: Life) -> None:
    judge = DamageJudge()
    judge.judge_all(damaged_states(life, seed=7))
    found = judge.table()
    assert found.keys() == KEPT | CARRIED | {ALL}
    assert found[ALL]["states"] >= 1300
    assert found[ALL]["served"] == 0
    assert all(found[thing]["harmless"] == 0 for thing in CARRIED | {"object", "foreign"})
    assert all(found[thing]["refused"] >= 30 for thing in found.keys() - {"index", "foreign"})
    assert found["foreign"]["refused"] >= 12
    assert found["index"]["harmless"] == found["index"]["states"] > 100, "it is a cache"


def test_the_damages_meet_every_kind_of_frame_and_every_field_of_a_header(life: Life) -> None:
    hit = {str(damage) for damage in damaged_states(life, seed=7)}
    for kind in (*(kind.name for kind in Kind), *(f"{kind:#x}" for kind in range(0xFF01, 0xFF06))):
        for part in ("header", "payload"):
            assert any(f"({kind} {part})" in said for said in hit), (kind, part)
    assert any("padding)" in said for said in hit)
    assert FIELDS == (0, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 60)
    moments = moments_of(life)
    assert any(moment.cold for moment in moments)
    assert {kind for moment in moments for kind in moment.kinds} == set(Kind)


def test_another_course_is_a_whole_segment_by_itself(life: Life) -> None:
    moment = moments_of(life)[-1]
    path, epoch = next((p, e) for p, e in moment.segments.items() if e in moment.sealed)
    content = moment.content(path)
    offset, seal = list(frames_of(content, epoch, moment.salt))[-1]
    end = offset + seal.header.frame_bytes
    other = other_course(content[:end], epoch, moment.salt, moment.journal_id)
    assert other is not None
    assert other.content != content[:end]
    image = moment.image.copy()
    image.contents[image.entries[path]] = other.content
    disk = SimDisk(image)
    (_, start), *_ = frames_of(other.content, epoch, moment.salt)
    assert start.control is not None
    assert seal.control is not None
    candidate = Candidate(path, disk.open(path), end, epoch, start.control)
    scan = _scan(disk, candidate, moment.salt, 2)
    assert scan.sealed
    assert (scan.last_lsn, scan.end) == (seal.control.last_lsn, end)
    assert scan.chain == other.index.chain != seal.control.chain
    assert (scan.offsets, scan.kinds) == (other.index.offsets, other.index.kinds)
    assert scan.crcs == other.index.crcs
    assert path.parent == FOLDER


def numbers_in(ids: str) -> set[int]:
    """Sequence numbers of task ids as "7-9, 12"."""
    spans = [part.partition("-") for part in ids.split(", ") if part != "none"]
    return {sequence_of(at) for a, _, b in spans for at in range(int(a), int(b or a) + 1)}


def test_what_a_refused_start_says_was_lost_is_what_lay_there(life: Life) -> None:
    """Of every damage at rest that keeps a broker from starting, against the index of the broker that was not damaged."""
    truths: dict[str, State] = {}
    seen: Counter[str] = Counter()
    for damage in damages_of(life, seed=7):
        disk = SimDisk(damage.image)
        if damage.carried or (fault := refusal_of(disk)) is None:
            continue
        moment = damage.moment
        if moment.name not in truths:
            truths[moment.name] = bench_on(SimDisk(moment.image)).owner.core.state
        told = told_at_start(fault, FOLDER, disk)
        assert str(told).startswith(str(fault))
        for place in told.places:
            index, first = truths[moment.name].index, place["lsn"]
            last = first if place["last_lsn"] is None else place["last_lsn"]
            if "tasks" not in place:
                held = (index.frames.view >= first) & (index.frames.view <= last)
                lone = place["last_lsn"] == first and first not in index.moved
                seen["not told"] += lone and bool(held.any())
                continue
            seen[place["bound"]] += 1
            if place["bound"] != EXACT:
                continue
            every = np.arange(index.count)
            lsns, _ = index.locate(every)
            held = (lsns >= first) & (lsns <= last) & index.present(every, 1)
            mine = set(np.flatnonzero(held).tolist())
            outcomes = np.flatnonzero(
                (index.done_frames.view >= first) & (index.done_frames.view <= last)
            )
            mine |= set(np.flatnonzero(np.isin(index.done[: index.count], outcomes)).tolist())
            assert numbers_in(place["task_ids"]) == mine, str(damage)
            assert place["tasks"] == len(mine)
    assert seen[EXACT] >= 5
    assert min(seen[LEAST], seen[ABOUT]) >= 1
    assert seen["not told"] <= 3, (
        "the last batch of a log with a bit of its LSN, kind or length another"
    )


def refusal_of(disk: SimDisk) -> CorruptionFound | None:
    try:
        bench_on(disk).close()
    except CorruptionFound as fault:
        return fault
    except FabricError:
        return None
    return None


def test_every_comparison_is_found() -> None:
    assert len(SITES) >= 19
    assert set(NOT_NEEDED) <= {site.name for site in SITES}
    needed = {"unpack_header", "frame_at", "read_index", "_closes", "_refuse_shortened"}
    assert {site.name for site in SITES} > needed | {"Segment.is_own"}


def enumerate_without_chance(life: Life) -> None:
    DamageJudge().judge_all(damaged_states(life, seed=0))
    Judge(life).judge_all(states_of(life.disk, seed=0, subsets=0, torn=0))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("site", SITES, ids=str)
def test_without_any_one_crc_test_the_enumeration_is_red(
    site: Site, life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In states that hold no chance; the whole source keeps every promise in them (above, and test_broker_crash.py)."""
    if site.name in NOT_NEEDED:
        RED[str(site)] = [f"green, and may be: {NOT_NEEDED[site.name]}"]
        return
    take_out(site, monkeypatch)
    with pytest.raises(Broken) as broken:
        enumerate_without_chance(life)
    RED.setdefault(str(site), []).append(f"red: {broken.value.kind}, {str(broken.value)[:100]}")


def test_every_comparison_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The list for the reader of a log; complete whenever this file ran whole."""
    with capsys.disabled():
        for name, verdicts in sorted(RED.items()):
            print(f"\n  {name}: {'; '.join(verdicts)}", end="")  # noqa: T201
    assert not RED or set(RED) == set(map(str, SITES))
