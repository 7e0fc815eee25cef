"""The bench of the health metrics: its tables hold what was measured, and its silhouettes are the peer's."""

import mmap
import shutil
from pathlib import Path

import numpy as np
import pytest

from fabric_pipelines.analytics import kernels
from fabric_pipelines.analytics.plan import PASSES
from fabric_pipelines.bench import health
from fabric_pipelines.testing.host_gpu import HostGpu
from tests.support import eventually, skip_or_fail

ROOT = Path(__file__).parents[3]


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
    assert sum(n > 0 for n in every["clusters_with_value"].values()) == 38
    assert every["corrupt"] == {}
    assert {one["where"] for one in every["passes"]} == {"cpu"}
    assert every["device"] is None
    text = health.table(found)
    assert "| 600 x 5, 50 clusters |" in text
    assert "38 metrics of 3,000 x 12 in 20 clusters" in text
    assert len(said) == 7
    assert health.measure(3000, 12, 20, peer=False, say=said.append)["silhouette"] == []


def test_rows_do_not_depend_on_how_many_cores_drew_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "SPAN_ROWS", 100)
    monkeypatch.setattr(health, "workers", lambda: 1)
    alone, borders = health._uneven(1050, 33, 12)
    monkeypatch.setattr(health, "workers", lambda: 4)
    assert health._uneven(1050, 33, 12)[0].tobytes() == alone.tobytes()
    assert borders[-1] == 1050
    largest = int(np.diff(borders).argmax())
    around = alone[borders[largest] : borders[largest + 1]].mean(axis=0)
    others = alone[: borders[1]].mean(axis=0)
    assert np.abs(around - others).max() > 0.5, "a cluster has a centre of its own"


def test_a_card_has_its_passes_and_its_name_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the stand-in, whose speed means nothing."""
    if shutil.which("g++") is None:
        skip_or_fail("a C++ compiler for the kernels")
    card = HostGpu(ROOT / "cuda", ROOT / "build" / "host_cuda")
    monkeypatch.setattr(kernels, "Gpu", lambda ordinal: card)
    monkeypatch.setattr(health, "_card", lambda where: {"name": card.name, "driver": "none"})
    monkeypatch.setattr(health, "WARM_ROWS", 60)
    where = health.Where("cuda")
    found = health.measure(400, 9, 6, peer=False, say=lambda line: None, where=where)
    every = found["metrics"]
    assert every["corrupt"] == {}
    assert [one["where"] for one in every["passes"]] == ["cuda"] * len(PASSES)
    assert all(one["card_bytes"] > 0 for one in every["passes"])
    assert card.name in health.table(found)


def test_the_peak_is_what_the_process_grew_by() -> None:
    """By pages of its own: a heap that other tests have filled and emptied need not grow at all."""
    with health.resident_peak() as memory, mmap.mmap(-1, 96 << 20) as held:
        for at in range(0, len(held), mmap.PAGESIZE):
            held[at] = 1
        eventually(lambda: memory["beyond"] > 50 << 20, within_s=20, what="a look of the watcher")
    assert memory["beyond"] < 400 << 20
