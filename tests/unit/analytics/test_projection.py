"""The plane that clusters are drawn on is that of a principal component analysis of their means."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.decomposition import PCA

from fabric_pipelines.analytics.projection import plane


@pytest.mark.parametrize(("clusters", "dim"), [(3, 40), (12, 12), (30, 5), (9, 2)])
def test_it_is_the_plane_of_scikit_learn(clusters: int, dim: int) -> None:
    rng = np.random.default_rng(dim)
    means = 5 + rng.standard_normal((clusters, dim)) * np.linspace(3, 1, dim)
    size = rng.integers(1, 9, clusters)
    places, share = plane(means, size.astype(float))
    fitted = PCA(2, svd_solver="full").fit(np.repeat(means, size, axis=0))
    expected = (means - np.average(means, axis=0, weights=size)) @ fitted.components_.T
    np.testing.assert_allclose(np.abs(places), np.abs(expected), rtol=1e-9, atol=1e-9)
    assert share == pytest.approx(fitted.explained_variance_ratio_, rel=1e-9)
    assert plane(means, size.astype(float))[0].tobytes() == places.tobytes()


def test_what_has_no_extent_lies_in_the_middle_and_what_has_no_rows_nowhere() -> None:
    places, share = plane(np.array([[1.0, 2.0, 3.0], [9.0, 9.0, 9.0]]), np.array([4.0, 0.0]))
    assert places[0].tolist() == [0, 0]
    assert np.isnan(places[1]).all()
    assert share.tolist() == [0, 0]
    one, share = plane(np.array([[1.0], [3.0]]), np.ones(2))
    assert (np.abs(one[:, 0]).tolist(), one[:, 1].tolist()) == ([1, 1], [0, 0])
    assert share.tolist() == [1, 0]
    assert np.isnan(plane(np.zeros((2, 3)), np.zeros(2))[0]).all()
