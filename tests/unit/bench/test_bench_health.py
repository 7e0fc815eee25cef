"""The bench of the health metrics: its tables hold what was measured, and its silhouettes are the peer's."""

import mmap

import pytest

from fabric_pipelines.analytics.plan import PASSES
from fabric_pipelines.bench import health
from tests.support import eventually


def test_small_shapes_fill_both_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "SHAPES", ((600, 5), (300, 17)))
    said: list[str] = []
    found = health.measure(3000, 12, 20, peer=True, say=said.append)
    assert [one["largest_difference"] < 1e-5 for one in found["silhouette"]] == [True, True]
    every = found["metrics"]
    assert every["metrics"] == 38
    assert every["largest"] >= 0.05 * 3000
    assert every["breaches"] == 0
    assert [one["name"] for one in every["passes"]] == list(PASSES)
    assert all(one["seconds"] > 0 for one in every["passes"])
    assert sum(n > 0 for n in every["clusters_with_value"].values()) == 36  # two need a reference
    text = health.table(found)
    assert "| 600 x 5, 50 clusters |" in text
    assert "38 metrics of 3,000 x 12 in 20 clusters" in text
    assert len(said) == 6
    assert health.measure(3000, 12, 20, peer=False, say=said.append)["silhouette"] == []


def test_the_peak_is_what_the_process_grew_by() -> None:
    """By pages of its own: a heap that other tests have filled and emptied need not grow at all."""
    with health.resident_peak() as memory, mmap.mmap(-1, 96 << 20) as held:
        for at in range(0, len(held), mmap.PAGESIZE):
            held[at] = 1
        eventually(lambda: memory["beyond"] > 50 << 20, within_s=20, what="a look of the watcher")
    assert memory["beyond"] < 400 << 20
