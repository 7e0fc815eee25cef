"""A shard's copy on a real S3 server (SeaweedFS): whole before the pointer says so, and one winner of many."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fabric_pipelines import settings, shards
from fabric_pipelines.cli import app
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.objects import Objects
from fabric_pipelines.dataplane.writer import Writer
from fabric_pipelines.errors import (
    CorruptionFound,
    FencingLost,
    Refused,
    StorageFailed,
    StoreUnreachable,
    UsageError,
)
from fabric_pipelines.shards import remote
from fabric_pipelines.testing.vector_store import MemoryVectorStore
from tests.support_completions import pulled_batch
from tests.support_s3 import environment_of, free_ports, make_bucket, seaweed

BUCKET = "shards"
ROWS, DIM = 200, 16


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as url:
        yield url


def _use(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment_of(endpoint).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def objects(
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Objects:
    _use(endpoint, monkeypatch)
    made = Objects(f"s3://{BUCKET}/{request.node.name.replace('[', '-').rstrip(']')}")
    make_bucket(made._files, BUCKET)
    return made


@pytest.fixture
def store() -> MemoryVectorStore:
    memory = MemoryVectorStore()
    memory.put(np.arange(ROWS), np.random.default_rng(0).standard_normal((ROWS, DIM)))
    return memory


@pytest.fixture
def built(store: MemoryVectorStore, tmp_path: Path) -> MemoryVectorStore:
    shards.build(store, tmp_path, "notes", lists=4, seed=0, metric="l2", recipe={})
    return store


def move(store: MemoryVectorStore, root: Path, row: int) -> None:
    store.put(np.array([row]), np.random.default_rng(row).standard_normal((1, DIM)))
    shards.refresh(store, root, "notes")


def test_a_copy_comes_back_on_another_machine_and_answers_the_same(
    built: MemoryVectorStore, objects: Objects, tmp_path: Path
) -> None:
    first = remote.push(built, tmp_path, "notes", objects)
    assert (first.pointer.generation, first.files > 5) == (1, True)
    fetched = remote.fetch(objects, tmp_path / "elsewhere", "notes")
    xq = np.ones((3, DIM))
    with shards.Shard(fetched) as there, shards.open_shard(built, tmp_path, "notes") as here:
        np.testing.assert_array_equal(there.search(xq, 9).I, here.search(xq, 9).I)
    assert remote.push(built, tmp_path, "notes", objects).files == 0


def test_only_what_moved_is_copied(
    built: MemoryVectorStore, objects: Objects, tmp_path: Path
) -> None:
    whole = remote.push(built, tmp_path, "notes", objects)
    move(built, tmp_path, 3)
    again = remote.push(built, tmp_path, "notes", objects)
    assert again.pointer.generation == 2
    assert again.bytes < whole.bytes / 3
    assert remote.fetch(objects, tmp_path / "elsewhere", "notes").number == 2


def test_of_sixteen_writers_one_wins(
    built: MemoryVectorStore, objects: Objects, tmp_path: Path
) -> None:
    remote.push(built, tmp_path, "notes", objects)
    before = remote._pointer(objects, "notes")
    assert before is not None

    def attempt(number: int) -> bool:
        pointer = remote.Pointer(2, 100 + number, f"{number:064d}")
        try:
            remote.switch(objects, "notes", pointer, before)
        except FencingLost:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(attempt, range(16)))
    assert won.count(True) == 1
    found = remote._pointer(objects, "notes")
    assert found is not None
    assert found[0].token == 100 + won.index(True)


def test_of_sixteen_first_writers_one_wins(objects: Objects) -> None:
    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(lambda n: objects.create("first", str(n).encode()), range(16)))
    assert won.count(True) == 1
    assert objects.read("first")[0] == str(won.index(True)).encode()  # type: ignore[index]


def test_an_older_generation_never_goes_over_a_newer_copy(
    built: MemoryVectorStore, objects: Objects, tmp_path: Path
) -> None:
    newer = remote.Pointer(9, 9, "0" * 64)
    remote.switch(objects, "notes", newer, None)
    with pytest.raises(FencingLost, match="is older"):
        remote.push(built, tmp_path, "notes", objects)


def test_a_crash_before_the_pointer_leaves_the_old_copy_current(
    built: MemoryVectorStore, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.push(built, tmp_path, "notes", objects)
    move(built, tmp_path, 3)

    class WorldEnded(BaseException):
        pass

    def ended(*_: object) -> None:
        raise WorldEnded

    for step in ("put_file", "create", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(objects, step, ended)
            with pytest.raises(WorldEnded):
                remote.push(built, tmp_path, "notes", objects)
        assert remote.fetch(objects, tmp_path / step, "notes").number == 1
    assert remote.push(built, tmp_path, "notes", objects).pointer.generation == 2


def test_a_damaged_copy_and_a_damaged_original_are_not_handed_on(
    built: MemoryVectorStore, objects: Objects, tmp_path: Path
) -> None:
    current = shards.open_generation(built, tmp_path, "notes")
    entry = current.manifest.of_role("vectors")[0]
    path = current.folder / entry.path
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CorruptionFound, match="is not copied"):
        remote.push(built, tmp_path, "notes", objects)
    path.write_bytes(content)
    remote.push(built, tmp_path, "notes", objects)
    objects._files.pipe_file(
        f"{objects.root}/{remote._key('notes', entry)}", content[:-1] + bytes([content[-1] ^ 1])
    )
    with pytest.raises(CorruptionFound, match="is damaged"):
        remote.fetch(objects, tmp_path / "elsewhere", "notes")


def test_a_store_that_ignores_conditions_is_refused(
    built: MemoryVectorStore,
    objects: Objects,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    objects.require_conditions()
    monkeypatch.setattr(objects, "create", objects._put)  # as a store would that overwrites
    with pytest.raises(Refused, match="ignores If-None-Match"):
        remote.push(built, tmp_path, "notes", objects)
    assert objects.read("notes/CURRENT") is None


def test_what_is_no_store_is_said_in_one_sentence(
    objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="no s3:// URL"):
        Objects(str(tmp_path))
    with pytest.raises(StorageFailed, match="there is no copy"):
        remote.fetch(objects, tmp_path, "notes")
    _use(f"http://127.0.0.1:{free_ports(1)[0]}", monkeypatch)
    with pytest.raises(StoreUnreachable):
        Objects(f"s3://{BUCKET}/x").read("y")


def test_the_commands_push_and_fetch(
    database: Database, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(database)
    writer.land(pulled_batch(ROWS, function="embed", dim=DIM))
    writer.close()
    monkeypatch.setenv("FABRIC_HOME", str(tmp_path))
    monkeypatch.setenv("FABRIC_PG_URL", database.url)
    root = settings.load().shards_dir
    root.mkdir(parents=True)
    shards.build(database, root, "verses", lists=4, seed=0, metric="cosine", recipe={})
    url, out = f"s3://{objects.root}", str(tmp_path / "elsewhere")

    def said(*words: str) -> dict[str, object]:
        done = CliRunner().invoke(app, ["receipt", *words, "--json"])
        assert done.exit_code == 0, done.stderr
        answer: dict[str, object] = json.loads(done.stdout)
        return answer

    sent = said("push", "verses", "--to", url)
    assert (sent["generation"], int(str(sent["files_sent"])) > 5) == (1, True)
    assert said("push", "verses", "--to", url)["bytes_sent"] == 0
    assert said("fetch", "verses", "--from", url, "--out", out)["rows"] == ROWS
