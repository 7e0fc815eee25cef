"""Damage is a class of the enumeration, and each comparison of a CRC is needed in it: found in the source, taken out one
at a time, and the enumeration of crashes and damages is red each time. Those that stand against crashes are red in the
crashes alone as well."""

from __future__ import annotations

import pytest

from fabric_pipelines.broker.facts import Kind
from fabric_pipelines.journal.recovery import Candidate, _scan
from fabric_pipelines.testing.course import other_course
from fabric_pipelines.testing.crash_judge import Broken, Judge, states_of
from fabric_pipelines.testing.crash_life import FOLDER, Life
from fabric_pipelines.testing.damage import FIELDS, frames_of, moments_of
from fabric_pipelines.testing.damage_carried import damaged_states
from fabric_pipelines.testing.damage_judge import ALL, DamageJudge
from fabric_pipelines.testing.sim_disk import SimDisk
from tests.mutations import Site, crc_sites, take_out

KEPT = {"segment", "index", "checkpoint", "stub", "object", "identity", "foreign"}
CARRIED = {"fetch", "put", "read-back", "upload", "lease", "pull", "completion"}
AGAINST_CRASHES = {"unpack_header", "frame_at", "read_index", "_closes"}
SITES = crc_sites()
RED: dict[str, list[str]] = {}
NOT_NEEDED = {
    "Checkpoints.require": "damage under a running broker, between the CHECKPOINT fact and the DROP that relies on it: "
    "tests/unit/broker/test_files_underway.py",
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


def test_every_comparison_is_found() -> None:
    assert len(SITES) >= 19
    assert set(NOT_NEEDED) <= {site.name for site in SITES}
    assert {site.name for site in SITES} > AGAINST_CRASHES | {"Segment.is_own", "_refuse_shortened"}


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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("site", [site for site in SITES if site.name in AGAINST_CRASHES], ids=str)
def test_without_a_crc_test_against_crashes_a_crash_breaks_a_promise(
    site: Site, life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_out(site, monkeypatch)
    with pytest.raises(Broken) as broken:
        Judge(life).judge_all(states_of(life.disk, seed=0, subsets=0, torn=0))
    RED.setdefault(str(site), []).append(f"{broken.value.kind} in a crash")


def test_every_comparison_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The list for the reader of a log; complete whenever this file ran whole."""
    with capsys.disabled():
        for name, verdicts in sorted(RED.items()):
            print(f"\n  {name}: {'; '.join(verdicts)}", end="")  # noqa: T201
    assert not RED or set(RED) == set(map(str, SITES))
