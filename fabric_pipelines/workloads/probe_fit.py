"""A linear probe: ridge regression on the labels, read at its sign, beside the controls that give it meaning.

Ridge in its dual form (rows are fewer than dimensions) has one exact solution and no iteration to tune; on
balanced labels its sign is the same classifier as a mean-difference with whitening. The control fits the
same probe to shuffled labels: what it reaches is what the probe can do without any help of the model
(control tasks, Hewitt and Liang 2019, arXiv:1909.03368). Intervals are a bootstrap over entities, since two
statements of one entity are not independent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.errors import UsageError

Matrix = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

RIDGE = 1e-2  # of the mean kernel diagonal
BOOTSTRAPS = 500


@dataclass(frozen=True, slots=True)
class Fit:
    """Shares of the held-out rows: accuracy with its 95 % interval (low, high); control: mean accuracy under
    shuffled training labels; majority: of always answering the commoner label."""

    accuracy: float
    low: float
    high: float
    control: float
    majority: float
    train_rows: int
    test_rows: int


def fit_probe(
    features: Matrix,
    labels: Mask,
    test: Mask,
    entities: npt.NDArray[Any],
    *,
    shuffles: int,
    seed: int,
) -> Fit:
    """features [rows, dims]; labels, test [rows]; entities [rows] name what a row is about."""
    if set(entities[test]) & set(entities[~test]):
        raise UsageError("an entity stands in both halves of a probe's split; split by entity")
    if not (0 < labels[~test].sum() < (~test).sum()) or not test.any():
        raise UsageError("a probe needs both labels among its training rows and a held-out row")
    generator = np.random.default_rng(seed)
    train_x, test_x = standardised(features[~test], features[test])
    kernel = train_x @ train_x.T
    cross = test_x @ train_x.T
    signs = np.where(labels, 1.0, -1.0)
    columns = [signs[~test]] + [generator.permutation(signs[~test]) for _ in range(shuffles)]
    scores = cross @ _dual(kernel, np.stack(columns, axis=1))
    right = (scores > 0) == labels[test][:, None]
    low, high = _interval(right[:, 0], entities[test], generator)
    share = float(labels[test].mean())
    return Fit(
        accuracy=float(right[:, 0].mean()),
        low=low,
        high=high,
        control=float(right[:, 1:].mean()) if shuffles else float("nan"),
        majority=max(share, 1 - share),
        train_rows=int((~test).sum()),
        test_rows=int(test.sum()),
    )


def standardised(train: Matrix, test: Matrix) -> tuple[Matrix, Matrix]:
    """Both by the mean and spread of `train`; a dimension that does not vary there becomes zero."""
    mean, spread = train.mean(axis=0), train.std(axis=0)
    scale = np.divide(1.0, spread, out=np.zeros_like(spread), where=spread > 1e-9)
    return (train - mean) * scale, (test - mean) * scale


def _dual(kernel: Matrix, targets: Matrix) -> Matrix:
    """Dual weights [rows, targets]. The penalty is relative to the kernel, so it means the same in every layer;
    the floor keeps a kernel of zeros (a layer that says nothing) solvable."""
    penalty = RIDGE * float(np.trace(kernel)) / len(kernel) + 1e-9
    return np.linalg.solve(kernel + penalty * np.eye(len(kernel)), targets).astype(np.float64)


def _interval(
    right: Mask, entities: npt.NDArray[Any], generator: np.random.Generator
) -> tuple[float, float]:
    names, member = np.unique(entities, return_inverse=True)
    hits = np.bincount(member, weights=right, minlength=len(names))
    sizes = np.bincount(member, minlength=len(names))
    drawn = generator.integers(0, len(names), (BOOTSTRAPS, len(names)))
    shares = hits[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    low, high = np.quantile(shares, (0.025, 0.975))
    return float(low), float(high)
