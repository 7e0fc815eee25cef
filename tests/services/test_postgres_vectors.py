"""What shards and receipts ask of Postgres."""

from __future__ import annotations

import numpy as np
import pytest
from psycopg import sql

from fabric_pipelines.dataplane import content_hash, vectors
from fabric_pipelines.dataplane import source as sources
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.errors import AlreadyRunning, FencingLost, SchemaError, UsageError

ROWS, DIM = 300, 16


def _corpus(database: Database, kind: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    ids = np.sort(rng.choice(1 << 50, ROWS, replace=False)).astype(np.int64)
    values = rng.normal(size=(ROWS, DIM)).astype(np.float16)
    with database.session() as connection:
        connection.execute(
            sql.SQL("create table corpus (id bigint, v {}, part int)").format(sql.SQL(kind))
        )
        with connection.cursor() as cursor:
            cursor.executemany(
                sql.SQL("insert into corpus values (%s, {}, %s)").format(
                    sql.SQL("%s" if kind == "bytea" else f"%s::{kind}")
                ),
                [
                    (
                        int(i),
                        v.astype("<f2").tobytes() if kind == "bytea" else str(v.tolist()),
                        n % 2,
                    )
                    for n, (i, v) in enumerate(zip(ids, values, strict=True))
                ],
            )
    return ids, values


def _source(**more: str) -> sources.Source:
    return sources.Source("corpus", "id", "v", **more)


@pytest.mark.parametrize("kind", ["halfvec", "vector", "bytea"])
def test_sql_and_python_hash_the_same_rows_to_the_same_value(database: Database, kind: str) -> None:
    ids, values = _corpus(database, kind)
    read = sources.read_source(database, _source())
    assert np.array_equal(read.ids, ids)
    assert np.array_equal(read.vectors, values)
    assert sources.source_state(database, _source()).content == read.state.content
    assert content_hash.content_hash(ids[::-1], values[::-1], kind) == read.state.content


def test_a_changed_row_changes_its_own_bucket_only(database: Database) -> None:
    ids, values = _corpus(database, "halfvec")
    before = content_hash.content_hash(ids, values)
    values[5, 0] += 1
    assert content_hash.content_hash(ids, values).moved_buckets(before) == [int(ids[5]) & 1023]


def test_a_filter_and_its_percent_sign_reach_the_database_as_written(database: Database) -> None:
    ids, _ = _corpus(database, "halfvec")
    read = sources.read_source(database, _source(filter="part % 2 = 1 and '{}' = '{}'"))
    assert np.array_equal(read.ids, ids[1::2])
    state = sources.source_state(database, read.state.source)
    assert state.content == read.state.content


def test_a_content_hash_survives_json(database: Database) -> None:
    ids, values = _corpus(database, "halfvec")
    content = content_hash.content_hash(ids, values)
    assert content_hash.ContentHash.from_json(content.as_json()) == content


def test_an_empty_source_has_an_empty_hash(database: Database) -> None:
    read = sources.read_source(database, sources.Source("fabric.embed"))
    assert read.ids.size == 0
    assert read.state.content.rows == 0
    assert sources.source_state(database, sources.Source("fabric.embed")).content.rows == 0


def test_vectors_of_unequal_length_are_refused(database: Database) -> None:
    with database.session() as connection:
        connection.execute("create table corpus (id bigint, v halfvec)")
        connection.execute("insert into corpus values (1, '[1,2]'), (2, '[1,2,3]')")
    with pytest.raises(SchemaError, match="one dimension"):
        sources.read_source(database, _source())


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (sources.Source("nowhere"), "no relation"),
        (sources.Source("fabric.embed", "nothing"), "no column"),
        (sources.Source("fabric.embed", "task_id", "engine"), "is text"),
    ],
)
def test_a_source_that_is_not_there_is_named(
    database: Database, source: sources.Source, said: str
) -> None:
    with pytest.raises(SchemaError, match=said):
        sources.read_source(database, source)


def test_a_shard_has_one_holder_until_its_lease_ends(database: Database) -> None:
    lease = vectors.acquire_shard(database, "s", "first")
    with pytest.raises(AlreadyRunning, match="leased to first"):
        vectors.acquire_shard(database, "s", "second")
    assert vectors.release_shard(database, lease)
    assert vectors.acquire_shard(database, "s", "second").token == lease.token + 1


def test_a_zombie_publishes_nothing(database: Database) -> None:
    old = vectors.acquire_shard(database, "s", "old", ttl_s=0)
    new = vectors.acquire_shard(database, "s", "new")
    manifest = {"lists": 4}
    with pytest.raises(FencingLost):
        vectors.publish_generation(
            database, old, generation=1, manifest_sha256="x", manifest=manifest
        )
    with pytest.raises(FencingLost):
        vectors.renew_shard(database, old)
    row = vectors.publish_generation(
        database, new, generation=1, manifest_sha256="y", manifest=manifest
    )
    assert vectors.current_generation(database, "s") == row
    assert (row.token, row.manifest) == (2, manifest)


def test_a_generation_number_is_published_once(database: Database) -> None:
    lease = vectors.acquire_shard(database, "s", "me")
    publish = {"manifest_sha256": "x", "manifest": {}}
    for number in (1, 2):
        vectors.publish_generation(database, lease, generation=number, **publish)
    with pytest.raises(FencingLost, match="exists already"):
        vectors.publish_generation(database, lease, generation=2, **publish)
    assert vectors.last_generation(database, "s") == 2
    assert vectors.current_generation(database, "s", 1).generation == 1
    assert vectors.shard_names(database) == ["s"]


def test_a_receipt_is_kept_once_and_found_by_prefix(database: Database) -> None:
    for head in ("aa1", "aa2"):
        kept = vectors.insert_receipt(
            database, receipt_id=head + "0" * 61, shard="s", generation=1, statement={"n": 2**63}
        )
        assert kept
    assert not vectors.insert_receipt(
        database, receipt_id="aa1" + "0" * 61, shard="s", generation=9, statement={}
    )
    assert vectors.find_receipt(database, "aa1").statement == {"n": 2**63}
    assert vectors.find_receipt(database, "bb") is None
    with pytest.raises(UsageError, match="more digits"):
        vectors.find_receipt(database, "aa")
    assert len(vectors.find_receipts(database, shard="s", generation=1)) == 2


def test_the_list_of_receipts_says_which_bytes_are_there_and_how_many_more_there_are(
    database: Database,
) -> None:
    lease = vectors.acquire_shard(database, "s", "me")
    for number in range(1, 5):
        vectors.publish_generation(
            database, lease, generation=number, manifest_sha256=f"{number}", manifest={}
        )
        vectors.insert_receipt(
            database, receipt_id=f"{number}" * 64, shard="s", generation=number, statement={}
        )
    vectors.insert_receipt(
        database, receipt_id="9" * 64, shard="restored", generation=1, statement={}
    )
    assert vectors.pin_generation(database, "s", 2, "a paper")
    assert vectors.prune_generation(database, lease, generation=1)

    entries, total = vectors.list_receipts(database, shard="s")
    assert [(entry.generation, entry.kept) for entry in entries] == [
        (4, "kept"),
        (3, "kept"),
        (2, "pinned"),
        (1, "pruned"),
    ]
    assert total == 4
    newest, total = vectors.list_receipts(database, limit=2)
    assert [(entry.shard, entry.kept) for entry in newest] == [("restored", None), ("s", "kept")]
    assert total == 5
    assert vectors.list_receipts(database, shard="none") == ([], 0)
