"""P6, the spectrum: eigenvalues of the centred and of the uncentred second moments of each cluster.

XX' and X'X share their eigenvalues, so the smaller of n x n and d x d is built: no cap on rows, no sample. Rows are
centred before the product; the uncentred one follows by adding the mean back, which adds and so loses no digit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fabric_pipelines.analytics.csr import F64, Bool, Csr, unknown
from fabric_pipelines.analytics.stacks import Members, Stack
from fabric_pipelines.analytics.sweeps import Spectra, Sweeps

CODING_ERROR = 0.5  # epsilon of the coding rate: distortion allowed, in the unit of the rows
LOST = 1e-6  # of a logarithm of a determinant
EPSILON = float(np.finfo(np.float64).eps)
NUDGE = 1e-10  # of the largest eigenvalue: the shift of inverse iteration, far above its rounding
SAME = 1e-9  # of a trace that is known: further from it, a device has lost something
AXIS_RESIDUAL = 1e-7  # |Gv - lv| / l above which the axis is taken from a full decomposition


@dataclass(frozen=True, slots=True)
class Spectrum:
    """P6. Per cluster, NaN where none was asked: trace, sum of eigenvalues and largest eigenvalue of the
    covariance, entropy of its spectrum (nats); entropy and sum of squares of the spectrum of the directions; coding rate, uncentred
    and centred (nats). Per row: upper, whether it lies on the positive side of the first axis."""

    trace: F64
    total: F64
    largest: F64
    entropy: F64
    direction_entropy: F64
    direction_purity: F64
    coding_rate: F64
    coding_rate_centred: F64
    upper: Bool


def spectrum(csr: Csr, sweeps: Sweeps, members: Members, norm: F64, *, cosine: bool) -> Spectrum:
    """norm f64 [N]: length of each row as stored."""
    out = Spectrum(
        trace=unknown(csr.clusters),
        total=unknown(csr.clusters),
        largest=unknown(csr.clusters),
        entropy=unknown(csr.clusters),
        direction_entropy=unknown(csr.clusters),
        direction_purity=unknown(csr.clusters),
        coding_rate=unknown(csr.clusters),
        coding_rate_centred=unknown(csr.clusters),
        upper=np.zeros(len(csr.rows), dtype=np.bool_),
    )
    inverse = np.divide(1.0, norm, out=np.zeros_like(norm), where=norm > 0)
    if _by_sweeps(csr, sweeps, members, inverse, out, cosine=cosine):
        return out
    members.sweep(
        1,
        lambda count: count * csr.dim,
        lambda stack: _measure(stack, inverse, out, cosine=cosine),
    )
    return out


def flop(size: F64, dim: int) -> float:
    """Two products of rows and, of two matrices of the smaller side, the eigenvalues; one factorisation."""
    small = np.minimum(size, dim)
    return float((4 * size * dim * small + 5 * small**3).sum())


def workspace_bytes(largest: int, dim: int) -> int:
    """The matrix of the largest cluster, what is made from it, and the library's copies; the rows of an n x n."""
    small = min(largest, dim)
    return 8 * (4 * small * small + (largest * dim if largest < dim else 0))


def _by_sweeps(
    csr: Csr, sweeps: Sweeps, members: Members, inverse: F64, out: Spectrum, *, cosine: bool
) -> bool:
    """False where the sweeps leave it to the CPU. Where a matrix has no eigenvalues, or its trace is not what it must be, the trace of the
    cluster is NaN: the invariant checks then call it corrupt."""
    growth = csr.dim / CODING_ERROR**2

    def spectra(weight: F64, *, centred: bool) -> Spectra | None:
        return sweeps.spectra(members, weight, growth, centred=centred, sided=centred)

    around = spectra(members.weight, centred=True)
    if around is None:
        return False
    straight = spectra(inverse, centred=False)
    stored = straight if cosine else spectra(members.weight, centred=False)
    assert straight is not None
    assert stored is not None
    asked = members.size > 0
    length2 = around.trace + np.einsum("kd,kd->k", members.mean, members.mean)
    sound = around.sound & straight.sound & stored.sound
    sound &= (np.abs(straight.trace - 1.0) <= SAME) & (
        np.abs(stored.trace - length2) <= SAME * length2
    )
    for into, found in (
        (out.trace, np.where(sound, around.trace, np.nan)),
        (out.total, around.total),
        (out.largest, around.largest),
        (out.entropy, around.entropy),
        (out.coding_rate_centred, 0.5 * around.logs),
        (out.direction_entropy, straight.entropy),
        (out.direction_purity, straight.squares),
        (out.coding_rate, 0.5 * stored.logs),
    ):
        into[asked] = found[asked]
    out.upper[:] = around.upper & (members.size > 1)[csr.owner()]
    return True


def _measure(stack: Stack, inverse: F64, out: Spectrum, *, cosine: bool) -> None:
    at, count, dim = stack.clusters, stack.count, stack.dim
    wide = count < dim  # the n x n form
    centred = _moment(stack, wide=wide)
    values = _eigenvalues(centred)
    out.trace[at], out.total[at] = np.einsum("gii->g", centred), values.sum(axis=1)
    out.largest[at], out.entropy[at] = values[:, -1], _entropy(values)
    growth = dim / CODING_ERROR**2
    out.coding_rate_centred[at] = 0.5 * np.log1p(growth * values).sum(axis=1)
    if count > 1:
        out.upper[stack.places] = _side(stack, centred, values[:, -1], wide=wide)
    moment = _add_mean(stack, centred, wide=wide)
    if not cosine:
        out.coding_rate[at] = 0.5 * _log_det(moment, growth)
        moment = _directions(stack, moment, inverse, wide=wide)
    values = _eigenvalues(moment)
    if cosine:
        out.coding_rate[at] = 0.5 * np.log1p(growth * values).sum(axis=1)
    out.direction_entropy[at] = _entropy(values)
    out.direction_purity[at] = (values**2).sum(axis=1)


def _moment(stack: Stack, *, wide: bool) -> F64:
    """Xc Xc' / n [g, n, n] or Xc' Xc / n [g, d, d] of centred rows."""
    if wide:
        rows = stack.centred(slice(0, stack.count))
        moment = rows @ rows.swapaxes(1, 2)
    else:
        moment = np.zeros((len(stack.clusters), stack.dim, stack.dim))
        for _, block in stack.blocks():
            moment += block.swapaxes(1, 2) @ block
    moment /= stack.count
    return moment


def _add_mean(stack: Stack, moment: F64, *, wide: bool) -> F64:
    """The same of rows that are not centred, in place."""
    mean, count = stack.mean, stack.count
    if not wide:
        moment += mean[:, :, None] * mean[:, None, :]
        return moment
    along = np.concatenate([block @ mean[:, :, None] for _, block in stack.blocks()], axis=1)
    moment += (along + along.swapaxes(1, 2)) / count
    moment += np.einsum("gd,gd->g", mean, mean)[:, None, None] / count
    return moment


def _directions(stack: Stack, moment: F64, inverse: F64, *, wide: bool) -> F64:
    """The same of the rows' directions."""
    if wide:
        scale = inverse[stack.places]
        moment *= scale[:, :, None]
        moment *= scale[:, None, :]
        return moment
    moment[:] = 0.0
    for part, _ in stack.blocks():
        block = stack.rows(part, inverse)
        moment += block.swapaxes(1, 2) @ block
    moment /= stack.count
    return moment


def _eigenvalues(moment: F64) -> F64:
    """[g, m], rising. A second moment has none below 0: what rounding leaves there is 0."""
    values: F64 = np.maximum(np.linalg.eigvalsh(moment), 0.0)
    return values


def _entropy(values: F64) -> F64:
    """-sum p ln p of each row's shares, 0 ln 0 = 0; NaN without any spread."""
    total = values.sum(axis=1, keepdims=True)
    share = np.divide(values, total, out=np.full_like(values, np.nan), where=total > 0)
    entropy: F64 = -(share * np.log(share, out=np.zeros_like(share), where=share > 0)).sum(axis=1)
    return entropy


def _log_det(moment: F64, growth: float) -> F64:
    """ln det(I + growth x moment). By factorisation, which needs no eigenvalues; by those where rounding beside rows far from the
    origin, or of fewer dimensions than they have, would be more than LOST."""
    count, size, _ = moment.shape
    near = growth * np.einsum("gii->g", moment) * size * EPSILON <= LOST
    log_det = np.empty(count)
    factor = np.linalg.cholesky(growth * moment[near] + np.eye(size))
    log_det[near] = 2.0 * np.log(np.einsum("gii->gi", factor)).sum(axis=1)
    values = np.linalg.eigvalsh(moment[~near])
    values[values <= size * EPSILON * values[:, -1:]] = 0.0  # nothing but rounding of the largest
    log_det[~near] = np.log1p(growth * values).sum(axis=1)
    return log_det


def _side(stack: Stack, moment: F64, largest: F64, *, wide: bool) -> Bool:
    """Which rows have a positive coordinate on the first axis, [g, n]."""
    axis = _first_axis(moment, largest)
    if wide:  # the eigenvector of the n x n form is the coordinate of each row
        return axis > 0
    return np.concatenate(
        [(block @ axis[:, :, None])[:, :, 0] > 0 for _, block in stack.blocks()], axis=1
    )


def _first_axis(moment: F64, largest: F64) -> F64:
    """Eigenvector of the largest eigenvalue [g, m] by inverse iteration: a fifth of the time of the eigenvalues,
    where a full decomposition would take three times as long."""
    count, size, _ = moment.shape
    shift = np.where(largest > 0, largest, 1.0)
    shifted = -moment
    np.einsum("gii->gi", shifted)[:] += (shift * (1.0 + NUDGE))[:, None]
    axis = np.broadcast_to(np.cos(np.arange(size) * 1.7), (count, size))
    for _ in range(2):
        axis = np.linalg.solve(shifted, axis[:, :, None])[:, :, 0]
        axis = axis / np.sqrt(np.einsum("gm,gm->g", axis, axis))[:, None]
    missed = (moment @ axis[:, :, None])[:, :, 0] - largest[:, None] * axis
    far = np.sqrt(np.einsum("gm,gm->g", missed, missed)) > AXIS_RESIDUAL * shift
    for index in np.flatnonzero(far):
        axis[index] = np.linalg.eigh(moment[index])[1][:, -1]
    return axis
