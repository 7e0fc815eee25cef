"""The bench of the silhouette on a card, rehearsed on a CPU: torch's two ways and ours are one number."""

import pytest

from tests.bench import silhouette_on_cuda
from tests.support import skip_or_fail


def test_pairs_moments_and_ours_are_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        import torch
    except ImportError:
        skip_or_fail("torch, a peer")
    monkeypatch.setattr(silhouette_on_cuda, "BLOCK_VALUES", 2000)
    found = silhouette_on_cuda.compare(torch, "300x7x5", 1, "cpu")
    assert set(found["over_ours"]) == {"torch by pairs", "torch by moments"}
    assert max(found["largest_difference"].values()) < 1e-6
    assert found["byte_equal_of"] == [10, 1]
    assert silhouette_on_cuda.table([found]).count("300x7x5") == 4
