"""Launches of point_score: what the silhouette and the margins need between the families and after them.

Arrays exist, and a launch queues and does nothing else. Twin: reference.point_score, in which a function has the name that one has here.
"""

from __future__ import annotations

from fabric_pipelines.device.card import Card, DeviceArray
from fabric_pipelines.device.gpu import THREADS

FAMILY = "point_score"
WARP = 32


def _queue(
    gpu: Card, name: str, warps: int, arguments: tuple[object, ...], blocks: int | None
) -> None:
    gpu.launch(FAMILY, f"{FAMILY}_{name}", blocks or gpu.blocks_for(warps), arguments)


def _spread(count: int) -> int:
    """Warps for one thread a row."""
    return -(-count // WARP)


def admit(
    gpu: Card,
    norm2: DeviceArray,
    flag: DeviceArray,
    indptr: DeviceArray,
    stride: int,
    out: tuple[DeviceArray, ...],
    *,
    cosine: bool,
    blocks: int | None = None,
) -> None:
    """norm2 f64, flag u8 [n] -> out: column f64 [2, stride], again u8 [n], weight f64 [n], own and place i64 [n], and the first
    two of mark u64 [4, stride]."""
    count, clusters = len(norm2), len(indptr) - 1
    given = (norm2, flag, indptr, count, clusters, int(cosine), stride, *out)
    _queue(gpu, "admit", _spread(count), given, blocks)


def means(
    gpu: Card,
    total: DeviceArray,
    whole: DeviceArray,
    mean: DeviceArray,
    length2: DeviceArray,
    *,
    blocks: int | None = None,
) -> None:
    """total f64 [K, d], whole i64 [K, 2] of csr_reduce -> mean f64 [K, d], length2 f64 [K]."""
    clusters, dim = total.shape
    _queue(gpu, "means", clusters, (total, whole, clusters, dim, mean, length2), blocks)


def roots(gpu: Card, value: DeviceArray, root: DeviceArray, *, blocks: int | None = None) -> None:
    """value f64 [n] -> root f64 [n]."""
    _queue(gpu, "roots", _spread(len(value)), (value, len(value), root), blocks)


def origin(
    gpu: Card, mean: DeviceArray, whole: DeviceArray, out: DeviceArray, *, blocks: int | None = None
) -> None:
    """mean f64 [K, d] -> out f64 [d]."""
    clusters, dim = mean.shape
    _queue(gpu, "origin", _spread(dim), (mean, whole, clusters, dim, out), blocks)


def reach(
    gpu: Card, mean: DeviceArray, origin: DeviceArray, far2: DeviceArray, *, blocks: int | None = None
) -> None:  # fmt: skip
    """mean f64 [K, d], origin f64 [d] -> far2 f64 [K]."""
    clusters, dim = mean.shape
    _queue(gpu, "reach", clusters, (mean, origin, clusters, dim, far2), blocks)


def unit(
    gpu: Card, far2: DeviceArray, real: DeviceArray, whole: DeviceArray, out: tuple[DeviceArray, ...]
) -> None:  # fmt: skip
    """far2 f64 [K], real f64 [K, 4] of W -> out: unit f64 [2], spread and size f64 [K]. One block."""
    _queue(gpu, "unit", THREADS // WARP, (far2, real, whole, len(far2), *out), 1)


def centres(
    gpu: Card,
    mean: DeviceArray,
    origin: DeviceArray,
    unit: DeviceArray,
    weight: DeviceArray,
    out: tuple[DeviceArray, ...],
    *,
    blocks: int | None = None,
) -> None:
    """out: rows f32 [K, pitch], norm2 f32 [K], scaled f64 [n], shifted f64 [d]."""
    (clusters, dim), count = mean.shape, len(weight)
    given = (mean, origin, unit, weight, clusters, dim, out[0].shape[1], count, *out)
    _queue(gpu, "centres", max(clusters, _spread(count)), given, blocks)


def rows(
    gpu: Card,
    found: tuple[DeviceArray, ...],
    clusters: tuple[DeviceArray, ...],
    unit: DeviceArray,
    stride: int,
    bounds: tuple[float, float, float],
    out: tuple[DeviceArray, DeviceArray, DeviceArray],
    *,
    blocks: int | None = None,
) -> None:
    """found: radius2 f64, own2 f32, near u64, b f64, flag u8 and own i64 [n]; clusters: real f64 [K, 4] of W, whole i64 [K, 2];
    bounds: rounding, told, narrow. out: column f64 [2, stride], margins f64 [n] and the last two of mark u64 [4, stride]."""
    count = len(found[0])
    given = (*found, *clusters, unit, count, stride, *bounds, *out)
    _queue(gpu, "rows", _spread(count), given, blocks)
