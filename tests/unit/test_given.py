"""What a file or a peer says is a value of this program, or one error that names the place and the remedy. One test a kind."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from fabric_pipelines import waits
from fabric_pipelines.broker import replies
from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.device import cubins
from fabric_pipelines.errors import (
    CorruptionFound,
    FabricError,
    SchemaError,
    UsageError,
    VersionRefused,
)
from fabric_pipelines.given import value_of
from fabric_pipelines.receipts.rebuilding import _spec
from fabric_pipelines.records.lease import HEAD_FIELDS, METADATA_KEY, Lease
from fabric_pipelines.records.receipt import Receipt
from fabric_pipelines.settings import Settings
from fabric_pipelines.shards import judging
from fabric_pipelines.shards.content import IndexSpec
from fabric_pipelines.shards.manifest import FileEntry, file_entries
from fabric_pipelines.supervise.place import Place, ProcessState
from fabric_pipelines.testing.broker_bench import Bench, submission_of, tasks_of
from fabric_pipelines.worker import profile_probe


@dataclass(frozen=True)
class Known:
    name: str
    count: int
    share: float
    sure: bool = True
    parent: str | None = None
    tags: tuple[str, ...] = ()
    sums: Mapping[str, int] = field(default_factory=dict)
    metric: Literal["cosine", "l2"] = "l2"

    def __post_init__(self) -> None:
        if self.count < 0:
            raise UsageError("count is below 0")


GOOD = {"name": "a", "count": 1, "share": 2}


def read(told: object) -> Known:
    return value_of(Known, told, "/x/known.json", what="note", remedy="write it anew")


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (b"{", "delimiter|Expecting"),
        (b"[" * 100_000, "recursion"),
        ("[]", "no JSON object"),
        (None, "no JSON object"),
        ({"name": "a"}, "it lacks count, share"),
        ({"name": "a", "count": 1, "more": 2}, "it lacks share"),
        ({**GOOD, "count": "1"}, "its field count is '1'"),
        ({**GOOD, "count": True}, "its field count is True"),
        ({**GOOD, "count": 1.5}, "its field count is 1.5"),
        ({**GOOD, "share": None}, "its field share is None"),
        ({**GOOD, "sure": 1}, "its field sure is 1"),
        ({**GOOD, "parent": 7}, "its field parent is 7"),
        ({**GOOD, "tags": "ab"}, "its field tags is 'ab'"),
        ({**GOOD, "tags": ["a", 1]}, "its field tags"),
        ({**GOOD, "sums": {"a": "1"}}, "its field sums"),
        ({**GOOD, "metric": "l3"}, "its field metric is 'l3'"),
        ({**GOOD, "count": -1}, "count is below 0"),
        ({**GOOD, "name": ["x" * 1000]}, "…, which is of another type"),
    ],
)
def test_whatever_is_not_so_is_one_error_with_place_and_remedy(told: object, why: str) -> None:
    with pytest.raises(
        CorruptionFound, match=rf"^/x/known\.json is no note: .*({why}).*; write it anew$"
    ):
        read(told)


def test_what_is_so_is_read_and_what_is_of_a_newer_program_is_said_to_be() -> None:
    assert read(json.dumps(GOOD)) == Known("a", 1, 2)
    assert read({**GOOD, "parent": None, "tags": ["b"], "sums": {"c": 3}}).tags == ["b"]
    with pytest.raises(
        VersionRefused, match=r"known\.json was written by a newer program .it also says b, more"
    ):
        read({**GOOD, "more": 1, "b": 2})


def spoilt(good: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A field too many, one too few, one of another type; the last two are of the first field."""
    first = next(iter(good))
    return [
        {**good, "of_tomorrow": 1},
        {k: v for k, v in good.items() if k != first},
        {**good, first: [[]]},
    ]


def refused(
    reads: Callable[[Any], object], good: Mapping[str, Any], names: str, remedy: str
) -> list[type[FabricError]]:
    """What became of a field too many, one too few, and one of another type."""
    reads(good)
    found = []
    for at, told in enumerate(spoilt(good)):
        with pytest.raises(FabricError) as caught:
            reads(told)
        assert names in str(caught.value)
        assert at == 0 or remedy in str(caught.value)
        found.append(type(caught.value))
    return found


def never(error: type[FabricError]) -> list[type[FabricError]]:
    return [VersionRefused, error, error]


def test_the_state_of_a_supervisor(home_settings: Settings) -> None:
    place = Place.of(home_settings)
    place.state_path.parent.mkdir(parents=True, exist_ok=True)
    process = asdict(ProcessState("broker", "running", 7, 0, "", "log"))
    whole = {"pid": 7, "ui_url": "", "processes": [process], "started_by": ""}

    def reads(told: Any) -> object:
        place.state_path.write_text(told if isinstance(told, str) else json.dumps(told))
        return place.read_state()

    assert reads("") == reads(whole | {"x": 1}), "what an ended one left keeps nobody from a start"
    assert place.take_lock() is not None
    names, remedy = str(place.state_path), "run `fabric up`"
    assert refused(reads, whole, names, remedy) == never(CorruptionFound)
    within = refused(lambda told: reads({**whole, "processes": [told]}), process, names, remedy)
    assert within == never(CorruptionFound)
    for damaged in ("", "7", "{}", '{"processes": 7}', '{"processes": [7]}'):
        with pytest.raises(CorruptionFound, match=r"is no state of a supervisor.*fuser"):
            reads(damaged)
    for pid in (1, 0, -1):  # `fabric down` would signal more than one process, or not its own
        for told in (whole | {"pid": pid}, whole | {"processes": [process | {"pid": pid}]}):
            with pytest.raises(CorruptionFound, match=rf"\(pid {pid}\).*fuser"):
                reads(told)


def test_the_note_of_a_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reads(told: Any) -> object:
        monkeypatch.setattr(waits, "asdict", lambda wait: told)
        with waits.Waits(tmp_path, "worker"):
            return waits.read(tmp_path)

    whole = asdict(waits.Wait("worker", 7, "why", 0.0))
    assert refused(reads, whole, str(tmp_path), "start the process") == never(CorruptionFound)


def test_a_kept_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = SimpleNamespace(name="e@r", fingerprint="f")
    path = profile_probe.place_of(tmp_path, engine.name, "cpu:0")
    path.parent.mkdir(parents=True)
    whole = {"fingerprint": "f", "hardware": profile_probe.hardware("cpu:0")}

    def reads(told: Any) -> object:
        path.write_text(json.dumps({**whole, "profile": told}))
        return profile_probe.kept_profile(engine, tmp_path, "cpu:0")

    profile = {
        "max_batch_size": 8,
        "max_num_tokens": 512,
        "kv_cache_tokens": 0,
        "window_tokens": 64,
    }
    assert refused(reads, profile, str(path), "fabric engine probe e@r") == never(UsageError)


def test_the_manifest_of_the_cubins(tmp_path: Path) -> None:
    path = tmp_path / cubins.MANIFEST_NAME
    entry = {"registers": 1, "spill_stores": 0, "spill_loads": 0}
    cubin = {
        "family": "a",
        "arch": "sm_80",
        "sha256": "",
        "size": 1,
        "ptx": False,
        "entries": {"k": entry},
    }

    def reads(told: Any) -> object:
        path.write_text(json.dumps({"compiler": "", "flags": "", "sources": {}, "cubins": [told]}))
        return cubins.read_manifest(tmp_path)

    def reads_entry(told: Any) -> object:
        return reads({**cubin, "entries": {"k": told}})

    remedy = "make -C cuda install"
    assert refused(reads_entry, entry, str(path), remedy) == never(CorruptionFound)
    for told in ({**cubin, "size": "1"}, {**cubin, "entries": []}, {}, 7):
        with pytest.raises(CorruptionFound, match="make -C cuda install"):
            reads(told)


def receipt_of(files: Any, index: Any = None) -> Receipt:
    return Receipt({}, {"index": index or {}}, {"files": files})


def test_the_files_of_a_receipt() -> None:
    entry = asdict(FileEntry("ids", "p", 1, 2, 0, 1, "s", "l"))

    def reads(told: Any) -> object:
        return file_entries(receipt_of([told]))

    assert refused(reads, entry, "receipt ", "issue the receipt again") == never(SchemaError)
    for damaged in (None, {}, 7):
        with pytest.raises(SchemaError, match="names no files"):
            file_entries(receipt_of(damaged))


def test_the_index_of_a_receipt() -> None:
    index = IndexSpec(4, 1, "l2").as_json()
    assert _spec(receipt_of([], index), {"lists": 8}, None) == IndexSpec(8, 1, "l2")
    for told in ({**index, "lists": "4"}, {**index, "metric": "l3"}, {**index, "lists": 0}):
        with pytest.raises(
            SchemaError, match=r"receipt \w+ is no index: .*issue the receipt again"
        ):
            _spec(receipt_of([], told), {}, None)
    with pytest.raises(UsageError, match=r"^lists is 0"):
        _spec(receipt_of([], index), {"lists": 0}, None)


def test_recorded_decisions(tmp_path: Path) -> None:
    path = tmp_path / judging.DECISIONS_FILE
    evidence = {"signal": "s", "value": 1.0, "status": "ok", "sense": "max", "threshold": 2.0}
    stands = {
        "verdict": "QUARANTINE",
        "rule": "r",
        "since": 1,
        "measured": 1,
        "evidence": [evidence],
    }
    whole = {"cluster": 0, "measurement": 1, "stands": stands}
    assert judging._decisions(path, [whole])[0].cluster == 0
    for told in (
        {},
        [7],
        [{}],
        [{**whole, "stands": {**stands, "evidence": [{**evidence, "x": 1}]}}],
    ):
        with pytest.raises(SchemaError, match=r"decisions\.json cannot be read .*remove it"):
            judging._decisions(path, told)


def test_a_lease_and_answers_of_a_broker() -> None:
    bench = Bench()
    batch = tasks_of([8])
    bench.submit(submission_of([batch]), [batch])
    bench.attach()
    lease = bench.lease()
    assert lease is not None
    head = {name: getattr(lease, name) for name in HEAD_FIELDS}

    def leased(told: Any) -> object:
        said = {METADATA_KEY: json.dumps(told).encode()}
        return Lease.from_batch(lease.tasks.replace_schema_metadata(said))

    same = "install the same fabric-pipelines on both sides"
    assert refused(leased, head, "lease", same) == never(SchemaError)
    answers: Sequence[tuple[Callable[[Any], object], object]] = [
        (replies.broker_status, bench.owner.status()),
        (replies.attach_reply, bench.attach("x")),
        (lambda told: replies.reply_of(replies.RenewReply, told), bench.owner.renew("w")),
        (replies.scrub_report, replies.ScrubReport(True, 1, 2, 3)),
        (replies.verify_report, replies.VerifyReport(True, 1, 2)),
    ]
    for reads, reply in answers:
        whole = json.loads(json.dumps(replies.as_json(reply)))
        assert refused(reads, whole, "the broker's answer", same) == never(VersionRefused)


def test_a_broker_of_another_protocol_is_named_before_its_answer_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = BrokerClient("grpc+unix:///nowhere", role="admin")
    info = asdict(Bench().owner.info())

    def answers(told: Any) -> object:
        monkeypatch.setattr(client, "_call", lambda *call: (told, []))
        return client.hello()

    with pytest.raises(VersionRefused, match="speaks protocol 2, this client 1"):
        answers({**info, "protocol": 2, "of_tomorrow": 1})
    with pytest.raises(VersionRefused, match="install the same"):
        answers({**info, "of_tomorrow": 1})
    assert answers(info) == replies.BrokerInfo(**info)
