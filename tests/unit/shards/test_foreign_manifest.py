"""What a bucket says of a shard decides nothing outside the shard's folder, and makes no error but a typed one."""

from __future__ import annotations

import copy
import hashlib
import json
from types import SimpleNamespace

import numpy as np
import pytest

from fabric_pipelines import shards
from fabric_pipelines.device.cubins import Cubin
from fabric_pipelines.errors import CorruptionFound, FabricError
from fabric_pipelines.shards import remote
from fabric_pipelines.shards.manifest import ShardManifest
from fabric_pipelines.testing.vector_store import MemoryVectorStore

DIM = 8


class Bucket(dict):
    """Objects by key, with the calls that a fetch makes."""

    root = "bucket/p"

    def read(self, key):
        return (self[key], "etag") if key in self else None

    def get_file(self, key, path):
        path.write_bytes(self[key])


@pytest.fixture(scope="module")
def pushed(tmp_path_factory):
    """A generation with an increment and a row that was kept out, as a push leaves it."""
    store, root = MemoryVectorStore(), tmp_path_factory.mktemp("own")
    store.put(np.arange(40), np.random.default_rng(0).standard_normal((40, DIM)))
    store.put(np.array([47]), np.full((1, DIM), np.nan))
    spec = {"lists": 4, "seed": 1, "metric": "cosine", "recipe": {}, "lists_per_block": 2}
    shards.build(store, root, "notes", **spec)
    store.put(np.array([49]), np.ones((1, DIM)))
    made = shards.refresh(store, root, "notes").generation
    assert made.manifest.increment
    assert made.manifest.quarantined
    files = [made.folder / entry.path for entry in made.manifest.files]
    blocks = {f"notes/blocks/{file.name}": file.read_bytes() for file in files}
    return SimpleNamespace(blocks=blocks, manifest=json.loads(made.manifest.to_bytes()))


@pytest.fixture
def bucket(pushed):
    found = Bucket(pushed.blocks)
    point(found, pushed.manifest)
    return SimpleNamespace(objects=found, manifest=pushed.manifest)


def point(objects, manifest, raw=None):
    """CURRENT names generation 2 under token 2, whose manifest says `manifest`, or is `raw`."""
    content = json.dumps(manifest).encode() if raw is None else raw
    objects["notes/g000002-t2.json"] = content
    sha256 = hashlib.sha256(content).hexdigest()
    current = {"generation": 2, "token": 2, "manifest_sha256": sha256}
    objects["notes/CURRENT"] = json.dumps(current).encode()


def moved(manifest, place):
    leaf = manifest["files"][0]["path"].rpartition("/")[2]
    manifest["files"][0]["path"] = f"{place}/{leaf}"


def changed(key, value):
    return lambda manifest: manifest.__setitem__(key, value)


def of_file(key, value):
    return lambda manifest: manifest["files"][0].__setitem__(key, value)


LIES = {
    "files above": lambda manifest: moved(manifest, "../../../escaped"),
    "files elsewhere": lambda manifest: moved(manifest, "/work-elsewhere"),
    "files under dots": lambda manifest: moved(manifest, "vectors/./"),
    "path a number": of_file("path", 5),
    "bytes a text": of_file("bytes", "x"),
    "bytes of another count": of_file("bytes", 1),
    "rows below zero": of_file("rows", -1),
    "an unknown role": of_file("role", "letters"),
    "a digest of dots": of_file("sha256", "../../x"),
    "files a text": changed("files", "abc"),
    "no files": changed("files", []),
    "a file less": lambda manifest: manifest["files"].pop(0),
    "one file twice": lambda manifest: manifest["files"].append(manifest["files"][0]),
    "indptr a text": changed("indptr", "abc"),
    "indptr empty": changed("indptr", []),
    "indptr falls": lambda manifest: manifest["indptr"].__setitem__(1, 10**6),
    "increment a list": changed("increment", [1]),
    "layers of texts": lambda manifest: manifest["increment"].__setitem__("layers", [["a"]]),
    "recall of words": lambda manifest: manifest["increment"].__setitem__("base_recall", "good"),
    "another name": changed("name", "../../evil"),
    "another shard": changed("name", "letters"),
    "generation a text": changed("generation", "1"),
    "another generation": changed("generation", 1),
    "lists huge": changed("lists_per_block", 10**30),
    "rows of others": changed("rows", 1),
    "another metric": changed("metric", "nope"),
    "more than we know": changed("colour", 1),
    "another format": changed("format", ["fabric-shard-9"] * 1000),
}
RAW = {"a list": b"[]", "no text": b"\x00\xff", "nested": b"[" * 100_000, "a number": b"9" * 9000}


@pytest.mark.parametrize("lie", [*LIES, *RAW])
def test_of_a_manifest_that_lies_nothing_is_written_and_the_object_is_named(bucket, tmp_path, lie):
    manifest = copy.deepcopy(bucket.manifest)
    LIES.get(lie, lambda _: None)(manifest)
    point(bucket.objects, manifest, RAW.get(lie))
    with pytest.raises(FabricError, match=r"bucket/p/notes/g000002-t2\.json") as told:
        remote.fetch(bucket.objects, tmp_path / "out" / "below", "notes")
    assert type(told.value).__name__ in ("CorruptionFound", "VersionRefused")
    assert not (tmp_path / "out").exists()
    assert len(str(told.value)) < 700


@pytest.mark.parametrize(
    "change",
    [{"generation": 10**30}, {"token": -1}, {"prunes": -1}, {"generation": "2"}],
)
def test_of_a_pointer_that_lies_nothing_is_written(bucket, tmp_path, change):
    told = json.loads(bucket.objects["notes/CURRENT"])
    bucket.objects["notes/CURRENT"] = json.dumps(told | change).encode()
    with pytest.raises(CorruptionFound, match=r"notes/CURRENT is no pointer: .* remove the object"):
        remote.fetch(bucket.objects, tmp_path / "out", "notes")
    assert not (tmp_path / "out").exists()


def test_what_a_build_writes_is_whole_in_every_count(bucket, tmp_path):
    fetched = remote.fetch(bucket.objects, tmp_path / "out", "notes")
    assert ShardManifest.from_json(bucket.manifest, "the same") == fetched.manifest


def test_a_manifest_of_kernels_names_no_file_elsewhere():
    told = {"family": "../../x", "arch": "sm_90", "sha256": "0", "size": 1, "ptx": False}
    with pytest.raises(CorruptionFound, match="reinstall"):
        Cubin.from_json(told | {"entries": {}})
    assert Cubin.from_json(told | {"entries": {}, "family": "pair_tile"}).path.is_absolute()
