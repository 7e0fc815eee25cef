"""A saved index answers as it did, and a folder that was changed is refused by name."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fabric_pipelines.analytics.index import Exact, Inverted, Lattice, VectorIndex
from fabric_pipelines.errors import CorruptionFound, UsageError, VersionRefused


def built(kind, metric="cosine"):
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((300, 12)).astype(np.float32)
    rows[5] = 0
    index = VectorIndex.build(rows, np.arange(300), kind=kind, metric=metric, seed=4)
    index.remove(np.arange(20, 60))
    index.add(rows[20:30] + 1, np.arange(290, 300))
    return index, rows


@pytest.mark.parametrize("metric", ["cosine", "l2"])
@pytest.mark.parametrize("kind", [Exact(), Inverted(), Lattice(bits=3)], ids=str)
def test_what_was_saved_answers_as_before_and_goes_on(kind, metric, tmp_path):
    index, rows = built(kind, metric)
    index.save(tmp_path / "one")
    again = VectorIndex.load(tmp_path / "one")
    assert again.recipe() == index.recipe()
    assert again.content_sha256() == index.content_sha256()
    assert again.save(tmp_path / "two") == index.save(tmp_path / "three")
    for one in (index, again):
        one.add(rows[40:50], np.arange(1000, 1010))
        one.remove(np.array([7]))
    for before, after in zip(index.search(rows, 5), again.search(rows, 5), strict=True):
        assert before.tobytes() == after.tobytes()


def test_the_digest_of_the_content_forgets_how_the_rows_came(tmp_path):
    index, _ = built(Exact())
    live = index.search(np.ones((1, 12)), 999).I[0]
    rows = {
        int(i): index._rows.vectors[index._rows.find(np.array([i]))[0][0]] for i in live if i >= 0
    }
    rows[5] = np.zeros(12, np.float32)
    ids = np.array(sorted(rows, reverse=True))
    other = VectorIndex.build(np.array([rows[i] for i in ids.tolist()]), ids, kind=Inverted(), metric="l2")  # fmt: skip
    assert other.content_sha256() == index.content_sha256()
    other.remove(np.array([9]))
    assert other.content_sha256() != index.content_sha256()


def test_an_empty_index_can_be_kept(tmp_path):
    VectorIndex(4, kind=Inverted(), metric="l2").save(tmp_path / "none")
    again = VectorIndex.load(tmp_path / "none")
    assert len(again) == 0
    assert again.add(np.eye(4), np.arange(4)) == 4
    assert again.search(np.eye(4), 1).I[:, 0].tolist() == [0, 1, 2, 3]


def test_a_changed_folder_is_refused(tmp_path):
    index, _ = built(Inverted())
    folder = tmp_path / "index"
    index.save(folder)
    with pytest.raises(UsageError, match="there already"):
        index.save(folder)
    with pytest.raises(UsageError, match="no index in"):
        VectorIndex.load(tmp_path)
    vectors = bytearray((folder / "vectors.npy").read_bytes())
    vectors[500] ^= 1
    (folder / "vectors.npy").write_bytes(vectors)
    with pytest.raises(CorruptionFound, match=r"vectors\.npy is not what"):
        VectorIndex.load(folder)
    (folder / "vectors.npy").unlink()
    with pytest.raises(CorruptionFound, match="missing"):
        VectorIndex.load(folder)
    manifest = json.loads((folder / "index.json").read_text()) | {"format": "fabric-index-9"}
    (folder / "index.json").write_text(json.dumps(manifest))
    with pytest.raises(VersionRefused, match="fabric-index-9"):
        VectorIndex.load(folder)
