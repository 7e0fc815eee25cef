"""Every condition of every statement about leases and generations is needed: without it, in the SQL itself, a claim of
this module turns red. The same claims hold for the stand-in store."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from fabric_pipelines import receipts, shards
from fabric_pipelines.dataplane import sql, vectors
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.vectors import ShardLease
from fabric_pipelines.errors import AlreadyRunning, FabricError, FencingLost
from fabric_pipelines.shards.disk import Disk
from fabric_pipelines.shards.store import PostgresStore, VectorStore
from fabric_pipelines.testing.vector_store import MemoryVectorStore
from tests.services.test_shards import ROWS, build, land
from tests.support import MAJORS

TABLES = ("fabric.shard_lease", "fabric.device_lease", "fabric.shard_generation")
Sides = dict[str, Callable[..., Any]]


# ---- claims, for the lease of a shard and for that of a card


def sides(store: VectorStore, kind: str) -> Sides:
    """acquire, renew, release and publish of one kind of lease."""

    def publish_shard(lease: ShardLease, number: int) -> None:
        store.publish_generation(lease, generation=number, manifest_sha256="x", manifest={})

    def publish_device(lease: ShardLease, number: int) -> None:
        store.publish_device(lease, generation=number)

    publish = {"shard": publish_shard, "device": publish_device}[kind]
    steps = {step: getattr(store, f"{step}_{kind}") for step in ("acquire", "renew", "release")}
    return {**steps, "publish": publish}


def a_lease_has_one_holder_until_it_ends(store: VectorStore, kind: str) -> None:
    acquire = sides(store, kind)["acquire"]
    for name in ("other", "mine", "last"):
        assert acquire(name, f"holder of {name}", ttl_s=60).token == 1
    for name in ("other", "mine", "last"):
        with pytest.raises(AlreadyRunning, match=f"holder of {name}"):
            acquire(name, "late", ttl_s=60)
    assert acquire("mine", "holder of mine", ttl_s=0).token == 2  # restarted: taken back at once
    assert acquire("mine", "late", ttl_s=60).token == 3  # ended: anybody's
    with pytest.raises(AlreadyRunning, match="late"):
        acquire("mine", "holder of mine", ttl_s=60)


def lost_leases(acquire: Callable[..., ShardLease]) -> Iterator[ShardLease]:
    """Of shard `mine`, which `me` holds now: under an older token, in another name, of another shard."""
    older = acquire("mine", "me", ttl_s=60)
    held = acquire("mine", "me", ttl_s=60)
    yield older
    yield ShardLease("mine", "you", held.token)
    yield ShardLease("nobody's", "me", held.token)
    assert acquire("mine", "me", ttl_s=60).token == held.token + 1


def what_is_lost_does_nothing(store: VectorStore, kind: str) -> None:
    side = sides(store, kind)
    first_generations(store, "mine", "nobody's")
    for lost in lost_leases(side["acquire"]):
        with pytest.raises(FencingLost, match="no longer holds"):
            side["renew"](lost, ttl_s=60)
        with pytest.raises(FencingLost, match="no longer holds"):
            side["publish"](lost, 2 if kind == "shard" else 1)
        assert side["release"](lost) is False
        with pytest.raises(AlreadyRunning, match="me"):  # nor did it end the lease that runs
            side["acquire"]("mine", "you", ttl_s=60)


def what_ran_out_does_nothing_though_nobody_took_it(store: VectorStore, kind: str) -> None:
    side = sides(store, kind)
    first_generations(store, "mine")
    ended = side["acquire"]("mine", "me", ttl_s=0)
    with pytest.raises(FencingLost, match="no longer holds"):
        side["renew"](ended, ttl_s=60)
    with pytest.raises(FencingLost, match="no longer holds"):
        side["publish"](ended, 2 if kind == "shard" else 1)
    assert store.last_generation("mine") == 1
    assert store.devices() == []


def the_holder_renews_publishes_and_gives_back(store: VectorStore, kind: str) -> None:
    side = sides(store, kind)
    first_generations(store, "mine")
    lease = side["acquire"]("mine", "me", ttl_s=60)
    side["renew"](lease, ttl_s=60)
    side["publish"](lease, 2 if kind == "shard" else 1)
    assert side["release"](lease) is True
    assert side["acquire"]("mine", "you", ttl_s=60).token == lease.token + 1


def first_generations(store: VectorStore, *names: str) -> None:
    """Generation 1 of each shard, by a holder that has gone."""
    for name in names:
        lease = store.acquire_shard(name, "builder", ttl_s=60)
        store.publish_generation(lease, generation=1, manifest_sha256=name, manifest={})
        store.release_shard(lease)


def running_leases_of_cards_are_listed(store: VectorStore, kind: str) -> None:
    assert kind == "device"
    first_generations(store, "a", "b", "c")
    for name in ("a", "b"):
        store.publish_device(store.acquire_device(name, "me", ttl_s=60), generation=1)
    store.acquire_device("c", "me", ttl_s=0)
    assert [(row.name, row.generation) for row in store.devices()] == [("a", 1), ("b", 1)]
    assert [row.name for row in store.devices("b")] == ["b"]
    assert store.devices("c") == []


def a_generation_is_of_its_shard_and_number(store: VectorStore, kind: str) -> None:
    assert kind == "shard"
    first_generations(store, "a", "b", "c")
    for name, last in (("b", 3), ("a", 2)):
        lease = store.acquire_shard(name, "me", ttl_s=60)
        for number in range(2, last + 1):
            store.publish_generation(
                lease, generation=number, manifest_sha256=f"{name}{number}", manifest={}
            )
    assert [store.last_generation(name) for name in "abcd"] == [2, 3, 1, 0]
    rows = [store.current_generation(name) for name in "abc"]
    assert [row and row.manifest_sha256 for row in rows] == ["a2", "b3", "c"]
    row = store.current_generation("b", 2)
    assert row is not None
    assert row.manifest_sha256 == "b2"
    assert store.current_generation("a", 3) is None


def rows(store: VectorStore, name: str) -> list[tuple[int, bool, bool]]:
    """(number, pruned, pinned) of what was published of one shard."""
    found = store.published(name)
    return [(row.generation, row.pruned is not None, row.pinned_at is not None) for row in found]


def several_generations(store: VectorStore, name: str, last: int) -> ShardLease:
    """1 to `last`, each laid over the one before; by a holder whose lease runs."""
    lease = store.acquire_shard(name, "me", ttl_s=60)
    for number in range(1, last + 1):
        manifest = {"increment": {"parent_generation": number - 1}} if number > 1 else {}
        store.publish_generation(
            lease, generation=number, manifest_sha256=f"{name}{number}", manifest=manifest
        )
    return lease


def what_is_needed_is_not_pruned(store: VectorStore, kind: str) -> None:
    assert kind == "shard"
    mine = several_generations(store, "mine", 7)
    several_generations(store, "other", 7)
    store.publish_device(store.acquire_device("mine", "card", ttl_s=60), generation=2)
    assert store.pin_generation("mine", 5, "why") is True
    gone = [store.prune_generation(mine, generation=number) for number in range(1, 9)]
    assert gone == [True, False, True, False, False, False, False, False]
    kept = [(n, False, n == 5) for n in (4, 5, 6, 7)]
    assert rows(store, "mine") == [(1, True, False), (2, False, False), (3, True, False), *kept]
    assert rows(store, "other") == [(n, False, False) for n in range(1, 8)]
    assert store.prune_generation(mine, generation=1) is False  # already
    assert store.unpin_generation("mine", 5) is True
    assert [store.prune_generation(mine, generation=n) for n in (4, 5, 6)] == [True, True, False]


def pins_are_of_one_generation_that_is_there(store: VectorStore, kind: str) -> None:
    assert kind == "shard"
    mine = several_generations(store, "mine", 4)
    several_generations(store, "other", 4)
    assert store.prune_generation(mine, generation=1) is True
    assert [store.pin_generation("mine", n, "why") for n in (1, 2, 9)] == [False, True, False]
    pinned = [(n, False, False) for n in (3, 4)]
    assert rows(store, "mine") == [(1, True, False), (2, False, True), *pinned]
    assert rows(store, "other") == [(n, False, False) for n in (1, 2, 3, 4)]
    assert store.published("mine")[1].pin_reason == "why"
    assert store.pin_generation("other", 3, "too") is True
    assert store.pin_generation("mine", 3, "too") is True
    assert store.unpin_generation("mine", 4) is False
    assert store.unpin_generation("mine", 3) is True
    assert [store.published(name)[2].pin_reason for name in ("mine", "other")] == [None, "too"]
    assert store.published("mine")[1].pin_reason == "why"


def who_lost_the_lease_prunes_nothing(store: VectorStore, kind: str) -> None:
    assert kind == "shard"
    several_generations(store, "mine", 4)
    for lost in lost_leases(store.acquire_shard):
        with pytest.raises(FencingLost, match="no longer holds"):
            store.prune_generation(lost, generation=1)
    ended = store.acquire_shard("mine", "me", ttl_s=0)
    with pytest.raises(FencingLost, match="no longer holds"):
        store.prune_generation(ended, generation=1)
    assert rows(store, "mine") == [(n, False, False) for n in (1, 2, 3, 4)]


BOTH = (
    a_lease_has_one_holder_until_it_ends,
    what_is_lost_does_nothing,
    what_ran_out_does_nothing_though_nobody_took_it,
    the_holder_renews_publishes_and_gives_back,
)
CLAIMS = [
    *((claim, kind) for claim in BOTH for kind in ("shard", "device")),
    (running_leases_of_cards_are_listed, "device"),
    (a_generation_is_of_its_shard_and_number, "shard"),
]
OF_RETENTION: list[tuple[Callable[[VectorStore, str], None], str]] = [
    (what_is_needed_is_not_pruned, "shard"),
    (pins_are_of_one_generation_that_is_there, "shard"),
    (who_lost_the_lease_prunes_nothing, "shard"),
]
RETENTION = {"published", "prune_generation", "pin_generation", "unpin_generation"}
RETENTION |= {"lock_held_shard"}
ALL = [*CLAIMS, *OF_RETENTION]
NAMED = [f"{claim.__name__}-{kind}" for claim, kind in ALL]


def emptied(database: Database) -> PostgresStore:
    with database.session() as connection:
        for table in ("fabric.device_lease", "fabric.shard_generation", "fabric.shard_lease"):
            connection.execute(f"delete from {table}".encode())
    return PostgresStore(database)


@pytest.mark.parametrize(("require", "kind"), ALL, ids=NAMED)
def test_leases_and_generations(shared_database: Database, require: Any, kind: str) -> None:
    require(emptied(shared_database), kind)


@pytest.mark.parametrize("postgres", MAJORS[:-1], indirect=True)
def test_older_servers_keep_every_claim(database: Database) -> None:
    kept = 0
    for require, kind in ALL:
        require(emptied(database), kind)
        kept += 1
    assert kept == len(NAMED)


@pytest.mark.parametrize(("require", "kind"), ALL, ids=NAMED)
def test_the_stand_in_gives_the_same_answers(require: Any, kind: str) -> None:
    require(MemoryVectorStore(), kind)


# ---- each condition is needed


LETS_NOBODY_IN = ("lock_shard", "list_receipts", "relation_of", "shards_of_relation")
"""One locks and says nothing: its own test is below. The others are read for people: test_postgres_vectors, test_watches."""


def conditions(statement: str) -> list[str]:
    """What the `where` of a statement asks for, one by one."""
    _, _, asked = statement.partition("where ")
    asked = re.split(r"\n\s*(?:for update|returning|order by|limit)|;", asked)[0]
    parts = [part.strip().removeprefix("(") for part in re.split(r"\s(?:and|or)\s", asked)]
    return [part.removesuffix(")") if part.count(")") > part.count("(") else part for part in parts]


def fencing() -> Iterator[tuple[str, str, str]]:
    """(statement, condition, what takes its place) for every statement on these tables."""
    for name, statement in sql._blocks().items():
        if not any(table in statement for table in TABLES) or "where " not in statement:
            continue
        if name in LETS_NOBODY_IN:
            continue
        for condition in conditions(statement):
            yield name, condition, "true"
            if re.search(r"\sor\s", statement):  # one of two ways in: also without it
                yield name, condition, "false"


def test_the_statements_are_those_that_one_expects() -> None:
    named = {name for name, _, _ in fencing()}
    kinds = {f"{step}_{kind}" for kind in ("shard", "device") for step in ("acquire", "renew")}
    kinds |= {f"release_{kind}" for kind in ("shard", "device")}
    kinds |= {"publish_generation", "publish_device", "shard_holder", "device_holder", "devices"}
    kinds |= RETENTION
    assert named == kinds | {"last_generation", "current_generation"}
    assert conditions(sql._blocks()["publish_generation"]) == [
        "name = %(name)s",
        "holder = %(holder)s",
        "token = %(token)s",
        "expires > clock_timestamp()",
    ]


def without(name: str, condition: str, instead: str, patch: pytest.MonkeyPatch) -> None:
    """Statement `name` from now on asks `instead` of `condition`."""
    statement = sql._blocks()[name]
    head, where, asked = statement.partition("where ")
    assert asked.count(condition) == 1
    # names stay bound, types stay known
    patch.setitem(sql._blocks(), name, head + where + asked.replace(condition, instead))


@pytest.mark.parametrize(("name", "condition", "instead"), list(fencing()))
def test_each_condition_is_needed(
    shared_database: Database,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    condition: str,
    instead: str,
) -> None:
    without(name, condition, instead, monkeypatch)
    red = []
    for claim, kind in OF_RETENTION if name in RETENTION else CLAIMS:
        store = emptied(shared_database)
        try:
            claim(store, kind)
        except (AssertionError, pytest.fail.Exception, FabricError):
            red.append(claim.__name__)
            break
    assert red


def test_nobody_takes_the_lease_between_its_check_and_the_row(database: Database) -> None:
    lease = vectors.acquire_shard(database, "mine", "me")
    values = {"name": "mine", "holder": "me", "token": lease.token, "generation": 1}
    values |= {"manifest_sha256": "x", "manifest": "{}"}
    taking = b"select from fabric.shard_lease where name = 'mine' for no key update nowait"
    with database.session() as publisher, psycopg.connect(database.url) as taker:
        with publisher.transaction():
            assert publisher.execute(sql.query("publish_generation"), values).rowcount == 1
            with pytest.raises(psycopg.errors.LockNotAvailable):
                taker.execute(taking)
            taker.rollback()
        assert taker.execute(taking).rowcount == 1


def test_pruning_and_pins_of_a_shard_take_turns_with_publication(database: Database) -> None:
    """Each of the three begins at one row; another shard's is free."""
    store = PostgresStore(database)
    first_generations(store, "mine", "other")
    lease = store.acquire_shard("mine", "me", ttl_s=60)
    held = {"name": "mine", "holder": "me", "token": lease.token}
    with database.session() as one, psycopg.connect(database.url) as two, one.transaction():
        assert one.execute(sql.query("lock_held_shard"), held).rowcount == 1
        two.execute("set lock_timeout = '50ms'")
        two.commit()
        values = {"generation": 2, "manifest_sha256": "x", "manifest": "{}"}
        for statement in ("lock_shard", "lock_held_shard", "publish_generation"):
            with pytest.raises(psycopg.errors.LockNotAvailable):
                two.execute(sql.query(statement), held | values)
            two.rollback()
        assert two.execute(sql.query("lock_shard"), {"name": "other"}).rowcount == 1


# ---- the whole way to a generation


def expired(database: Database) -> None:
    with database.session() as connection:
        connection.execute("update fabric.shard_lease set expires = clock_timestamp()")


def taken_back(database: Database) -> None:
    """As a second process of the same folder would: same holder, next token."""
    with database.session() as connection:
        (row,) = connection.execute("select name, holder from fabric.shard_lease").fetchall()
    vectors.acquire_shard(database, row[0], row[1], ttl_s=60)


class Losing(Disk):
    """The lease is lost when the last file is written, after its last renewal."""

    def __init__(self, database: Database, lose: Callable[[Database], None]) -> None:
        self._database, self._lose = database, lose

    def rename(self, old: Path, new: Path) -> None:
        self._lose(self._database)
        super().rename(old, new)


def full_build(database: Database, root: Path, disk: Disk) -> None:
    build(database, root, disk=disk)


def increment(database: Database, root: Path, disk: Disk) -> None:
    assert shards.refresh(database, root, "corpus", disk=disk).how == "increment"


def refresh_anew(database: Database, root: Path, disk: Disk) -> None:
    assert shards.refresh(database, root, "corpus", anew=True, disk=disk).how == "full"


def generation_with_receipt(database: Database, root: Path) -> dict[str, bytes]:
    """Its files by path; one more row has landed since."""
    land(database)
    made = build(database, root)
    receipts.issue(database, root, "corpus")
    land(database, first=ROWS, rows=1)
    return contents(made.folder)


def contents(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("lose", [expired, taken_back])
@pytest.mark.parametrize("make", [full_build, increment, refresh_anew])
def test_who_lost_the_lease_publishes_nothing_and_the_old_generation_is_whole(
    database: Database, tmp_path: Path, make: Any, lose: Any
) -> None:
    before = generation_with_receipt(database, tmp_path)
    row = vectors.current_generation(database, "corpus")
    with pytest.raises(FencingLost, match="no longer holds"):
        make(database, tmp_path, Losing(database, lose))
    assert vectors.current_generation(database, "corpus") == row
    with shards.open_shard(database, tmp_path, "corpus") as shard:
        assert contents(shard.generation.folder) == before
        assert (shard.manifest.generation, shard.manifest.rows) == (1, ROWS)
    assert shards.scrub(database, tmp_path, "corpus").ok
    make(database, tmp_path, Disk())  # and the next one is not in its way
    assert vectors.last_generation(database, "corpus") == 2


@pytest.mark.parametrize(
    ("lose", "condition"),
    [(expired, "expires > clock_timestamp()"), (taken_back, "token = %(token)s")],
)
@pytest.mark.parametrize("make", [full_build, increment, refresh_anew])
def test_without_its_condition_the_whole_way_publishes(
    database: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Any,
    lose: Any,
    condition: str,
) -> None:
    """What the test above would see: so it is the condition that refuses, and nothing before it."""
    generation_with_receipt(database, tmp_path)
    without("publish_generation", condition, "true", monkeypatch)
    make(database, tmp_path, Losing(database, lose))
    assert vectors.last_generation(database, "corpus") == 2
