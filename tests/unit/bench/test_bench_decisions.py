"""Planted faults at small size: each gets the verdict that names it, sound data none."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fabric_pipelines.analytics.decisions import Decision
from fabric_pipelines.analytics.rules import Verdict, shipped
from fabric_pipelines.bench.decisions import (
    FAULTS,
    SOUND,
    Planting,
    Store,
    drawn,
    history,
    measure_all,
    read_vectors,
    table_of,
)
from fabric_pipelines.errors import UsageError

RULES = shipped()


@pytest.fixture(scope="module")
def store() -> Store:
    return drawn(np.random.default_rng(900), 700, 48, 6)


def verdicts(store: Store, fault: str, *, digests: bool = False) -> list[str]:
    """Of the clusters that the fault touched, once each."""
    broken, decisions = history(store, FAULTS[fault][0], 3, RULES, digests=digests)
    hit = [each for each in decisions if broken.touched[each.cluster]]
    assert hit
    return sorted({each.verdict.value for each in hit})


def test_sound_data_is_kept(store: Store) -> None:
    _, decisions = history(store, None, 3, RULES)
    assert [each.verdict for each in decisions] == [Verdict.KEEP] * 6


@pytest.mark.parametrize(
    "fault",
    [
        "shuffle all labels",
        "shuffle 30 % of labels",
        "merge two",
        "split one at random",
        "stray centroid",
        "truncate dims",
        "truncate dims, normalise",
        "swap model",
        "swap model for half",
    ],
)
def test_a_planted_fault_gets_the_verdict_that_names_it(store: Store, fault: str) -> None:
    assert verdicts(store, fault) == [FAULTS[fault][1].value]


def test_one_flipped_bit_is_seen_where_digests_are_kept(store: Store) -> None:
    assert verdicts(store, "flip bits, digests kept", digests=True) == ["QUARANTINE"]


def test_others_are_left_alone_by_a_fault_of_one_cluster(store: Store) -> None:
    broken, decisions = history(store, FAULTS["merge two"][0], 3, RULES)
    spared: list[Decision] = [
        each
        for each in decisions
        if not broken.touched[each.cluster] and not broken.emptied[each.cluster]
    ]
    assert [each.verdict for each in spared] == [Verdict.KEEP] * 4


def test_the_table_counts_every_cluster_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    vectors = rng.standard_normal((5, 16))[rng.integers(0, 5, 300)] + 0.3 * rng.standard_normal(
        (300, 16)
    )
    pq.write_table(
        pa.table({"vector": vectors.astype(np.float16).tolist()}), tmp_path / "v.parquet"
    )
    assert read_vectors(tmp_path / "v.parquet").shape == (300, 16)
    planting = Planting(0, 0, 4, range(1), tmp_path / "v.parquet")
    said: list[str] = []
    found = measure_all(planting, RULES, say=said.append)
    assert [one["fault"] for one in found["faults"]] == [SOUND, *FAULTS]
    assert len(said) == 1 + len(FAULTS)
    for one in found["faults"]:
        more = {"merge two": -1, "split one at random": 1, "split one along its axis": 1}
        total = sum(one["touched"].values()) + sum(one["others"].values())
        assert total == 4 + more.get(one["fault"], 0)
    text = table_of(found)
    assert "300 x 16 in 4 clusters (cut as a shard's lists), 1 seeds" in text
    assert text.count("\n| ") == 2 + len(FAULTS)


def test_a_file_without_vectors_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "v.parquet")
    with pytest.raises(UsageError, match=r"v\.parquet has no vectors"):
        read_vectors(tmp_path / "v.parquet")
