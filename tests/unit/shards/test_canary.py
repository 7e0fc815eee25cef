"""Canaries: what a search answers today is what it answered when the generation was new, to the last bit."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from fabric_pipelines import shards
from fabric_pipelines.shards import canary


@pytest.fixture
def generation(store, tmp_path):
    return shards.build(
        store, tmp_path, "notes", lists=6, seed=7, metric="l2", recipe={}, lists_per_block=2
    )


def test_whole_files_answer_as_they_did_and_json_keeps_the_answers(generation):
    with shards.Shard(generation) as shard:
        known = json.loads(json.dumps(canary.answers(shard)))
        assert list(canary.changed_answers(shard, known)) == []
        assert [len(item["ids"]) for item in known] == [canary.K] * canary.QUESTIONS


def test_one_flipped_bit_in_what_was_loaded_is_named_though_every_file_is_whole(
    generation, store, tmp_path
):
    """The lowest bit of a number in memory, in a row that answers a canary."""
    with shards.Shard(generation) as shard:
        known = canary.answers(shard)
        wanted = int(known[3]["ids"][2])
        for at, block in enumerate(shard.blocks):
            row = np.flatnonzero(block.ids == wanted)
            if len(row):
                rotten = block.vectors.copy()
                rotten.view(np.uint32)[row[0], 5] ^= 1
                shard.blocks[at] = dataclasses.replace(block, vectors=rotten)
        found = list(canary.changed_answers(shard, known))
    assert any(item.what.startswith("canary[3]") for item in found)
    assert "what was loaded from them is not" in str(found[0])
    assert shards.scrub(store, tmp_path, "notes").ok


def test_a_lost_row_is_noticed_too(generation):
    with shards.Shard(generation) as shard:
        known = canary.answers(shard)
        shard.alive[np.flatnonzero(shard.stored_ids() == int(known[0]["ids"][0]))] = False
        found = list(canary.changed_answers(shard, known))
    assert found[0].what == "canary[0].ids"


def test_questions_do_not_depend_on_rows_or_on_a_library():
    assert canary.questions(4)[0].tolist() == canary.questions(4)[0].tolist()
    assert np.abs(canary.questions(384)).max() <= 1
    assert [value.hex() for value in canary.questions(2)[0].tolist()] == PINNED


PINNED = ["0x1.8882a00000000p-1", "0x1.10a2d00000000p-3"]
