"""What the bench of kernels queues, on the stand-in that has no time: every call is one that its kernel takes."""

from pathlib import Path

import numpy as np
import pytest

from fabric_pipelines.bench import kernels
from fabric_pipelines.errors import MissingDependency
from fabric_pipelines.testing.host_gpu import HostGpu

ROOT = Path(__file__).parents[3]


def test_every_line_of_the_bench_runs_and_moves_what_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "ROWS_A_CLUSTER", 50)
    monkeypatch.setattr(kernels, "LISTS_ROWS", 300)
    try:
        card = HostGpu(ROOT / "cuda", ROOT / "build" / "host_cuda")
    except MissingDependency as fault:
        pytest.skip(str(fault))
    load = kernels.Load.draw(card, 500, 8)
    todo = kernels.work(card, load)
    for size, queue in todo.values():
        queue()
        assert size > 0
    products = kernels.dense(card, load)
    for each in products.values():
        each.queue()
        assert min(each.flop, each.size, each.matrices) > 0
    graph = load.lists[0]
    assert 0 < len(graph) <= 300
    owner = np.repeat(np.arange(len(load.lists[3]) - 1), np.diff(load.lists[3]))
    listed = graph >= 0
    assert (owner[graph] == owner[:, None])[listed].all()
    families = {name.split(" ")[0].rstrip(",") for name in (*todo, *products)} - {"copy"}
    launched = {symbol for symbol, count in card.launches.items() if count}
    assert all(any(symbol.startswith(family) for symbol in launched) for family in families)
