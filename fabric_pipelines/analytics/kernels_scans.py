"""Launches of the scans of cuda/ (e8_codec_scan, ivf_scan): probed lists against the queries that probe them.

Work is planned on the host: a task is a list and up to four of its queries, tasks of one list are neighbours, so what a
list holds is read once for them. Results depend on neither grid nor run; `blocks` is set by hand only to prove that.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics.csr import F32, F64, I64
from fabric_pipelines.analytics.index.lattice import DIMS_AT_ONCE
from fabric_pipelines.device.card import Card, DeviceArray
from fabric_pipelines.errors import UsageError

QUERIES = 4  # kQueries of both sources
GROUP_ROWS = 32  # rows side by side in device codes: one a lane
PIECE_ROWS = 1024  # kPiece of ivf_scan.cu
K_MAX = 128  # of the lists that a warp keeps in registers
BINS = 64  # of the margin histogram
STEP_DIMS = 32  # device codes are filled up to a multiple
LIMIT = 1 << 31
ROWS_MAX = 1 << 32  # a key numbers its row in 32 bits
INT8_TOP, PLANES_MAX = 127, 3

I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
Distance = Literal["l2", "ip", "cosine"]


class Plan(NamedTuple):
    """task_list [T], task_query [T, 4] (-1: none), first [T + 1]: prefix sum of what each task has to do, at [m, probes]:
    4 task + place of each probe (-1: none); all int64."""

    task_list: I64
    task_query: I64
    first: I64
    at: I64

    @property
    def items(self) -> int:
        return int(self.first[-1])


class E8Codes(NamedTuple):
    """On the card, as e8_codec_scan.cu has them: codes u32 [groups, words, 32], factor and constant f32 [groups, 32],
    list_group i64 [lists + 1], size i64 [lists]. sizes: the same here."""

    codes: DeviceArray
    factor: DeviceArray
    constant: DeviceArray
    list_group: DeviceArray
    size: DeviceArray
    sizes: I64
    bits: int
    dims: int


class E8Queries(NamedTuple):
    """On the card: words i32 [m, planes, dims / 4] and total i64 [m]; unit f32 [m] of one level."""

    words: DeviceArray
    total: DeviceArray
    unit: DeviceArray
    planes: int


class FloatStore(NamedTuple):
    """On the card: rows f32 [n, d] list after list, length f32 [n] (NaN: does not count), ids i64 [n], indptr i64; sizes [lists]."""

    rows: DeviceArray
    length: DeviceArray
    ids: DeviceArray
    indptr: DeviceArray
    sizes: I64


class Health(NamedTuple):
    """On the card, int64: probe, hit and wasted [lists], margin [64]. Scans add to them."""

    probe: DeviceArray
    hit: DeviceArray
    wasted: DeviceArray
    margin: DeviceArray


class Keys(NamedTuple):
    """On the card, but for the plan: key u64 [items, 4, k], and parts of the plan."""

    key: DeviceArray
    plan: Plan
    task_list: DeviceArray
    first: DeviceArray
    at: DeviceArray


class Found(NamedTuple):
    """On the card: distance f32 [m, k] ascending (NaN: none), id i64 [m, k] (-1: none), found i64 [m]."""

    distance: DeviceArray
    id: DeviceArray
    found: DeviceArray


def planned(probes: I64, sizes: I64, rows_at_once: int) -> Plan:
    """probes [m, p]: lists of each query, -1: none. UsageError where a query names a list twice or one that is not there."""
    flat = probes.ravel()
    if len(flat) and not -1 <= int(flat.min()) <= int(flat.max()) < len(sizes):
        raise UsageError(
            f"probes name lists -1 .. {len(sizes) - 1}, not {flat.min()} .. {flat.max()}"
        )
    there = np.flatnonzero(flat >= 0)
    query = there // max(1, probes.shape[1])
    order = np.lexsort((query, flat[there]))
    query, numbers = query[order], flat[there][order]
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    if np.any((np.diff(numbers) == 0) & (np.diff(query) == 0)):
        raise UsageError("a query probes one list twice: name each list once, -1 for no list")
    place = np.arange(len(numbers)) - np.repeat(starts, np.diff(starts, append=len(numbers)))
    task = np.cumsum(place % QUERIES == 0) - 1
    count = int(task[-1]) + 1 if len(task) else 0
    task_list, task_query = np.empty(count, np.int64), np.full((count, QUERIES), -1, np.int64)
    task_list[task], task_query[task, place % QUERIES] = numbers, query
    at = np.full(flat.shape, -1, np.int64)
    at[there[order]] = QUERIES * task + place % QUERIES
    first = np.zeros(count + 1, np.int64)
    np.cumsum(-(-sizes[task_list] // rows_at_once), out=first[1:])
    return Plan(task_list, task_query, first, at.reshape(probes.shape))


def planes_of(levels: npt.NDArray[Any]) -> npt.NDArray[np.int8]:
    """Whole numbers [m, d] -> int8 [m, planes, d] with levels = sum 256^p plane p, and as few planes as hold them."""
    left = np.asarray(levels).astype(np.int64)
    if not np.array_equal(left, levels):
        raise UsageError("queries of the code scan are whole levels")
    parts: list[npt.NDArray[np.int8]] = []
    while not parts or left.any():
        part = (left + 128) % 256 - 128
        parts.append(part.astype(np.int8))
        left = (left - part) // 256
    if len(parts) > PLANES_MAX:
        raise UsageError(f"levels beyond {PLANES_MAX} bytes: round the queries to fewer")
    return np.stack(parts, axis=1)


def interleaved(codes: U8, bits: int) -> U32:
    """One list's codes uint8 [n, bytes], as the CPU index packs them -> u32 [groups, words, 32]."""
    groups = -(-len(codes) // GROUP_ROWS)
    words = -(-codes.shape[1] // (4 * bits)) * bits
    padded = np.zeros((groups * GROUP_ROWS, 4 * words), np.uint8)
    padded[: len(codes), : codes.shape[1]] = codes
    by_row = padded.view("<u4").reshape(groups, GROUP_ROWS, words)
    return np.ascontiguousarray(by_row.transpose(0, 2, 1))


def e8_codes(
    gpu: Card, lists: list[tuple[U8, F32, F32]], bits: int, *, width: int | None = None
) -> E8Codes:
    """Upload lists of (codes uint8 [n, bytes], factor [n], constant [n]) of index.lattice.CodeList."""
    if bits not in (2, 3, 4):
        raise UsageError(f"codes of {bits} bits: the scan has 2, 3 and 4")
    if any(column.dtype != np.float32 for _, *columns in lists for column in columns):
        raise UsageError("rows beyond float32 have float64 terms: the scan takes float32 ones")
    sizes = np.array([len(codes) for codes, _, _ in lists], np.int64)
    bytes_a_row = width or max((codes.shape[1] for codes, _, _ in lists), default=bits)
    words = -(-bytes_a_row // (4 * bits)) * bits
    list_group = np.concatenate([[0], np.cumsum(-(-sizes // GROUP_ROWS))]).astype(np.int64)
    whole = np.zeros((int(list_group[-1]), words, GROUP_ROWS), np.uint32)
    terms = np.zeros((2, len(whole) * GROUP_ROWS), np.float32)
    for (codes, *columns), start, stop in zip(lists, list_group, list_group[1:], strict=False):
        if len(codes):
            whole[start:stop] = interleaved(codes, bits)
            terms[:, start * GROUP_ROWS : start * GROUP_ROWS + len(codes)] = columns
    factor, constant = (send(gpu, term.reshape(-1, GROUP_ROWS)) for term in terms)
    groups, there = send(gpu, list_group), send(gpu, sizes)
    dims = STEP_DIMS * words // bits
    return E8Codes(send(gpu, whole), factor, constant, groups, there, sizes, bits, dims)


def e8_queries(gpu: Card, codes: E8Codes, levels: npt.NDArray[Any], unit: F32) -> E8Queries:
    """levels: whole numbers [m, padded] of index.lattice (or int8); UsageError where products could pass 2^31."""
    planes = planes_of(levels)
    count, number, width = planes.shape
    if width > codes.dims:
        raise UsageError(f"queries of {width} dimensions, codes of {codes.dims}")
    top = 2 ** (codes.bits + 1) - 1
    reach = np.abs(np.asarray(levels, np.float64)).sum(axis=1).max(initial=0.0)
    if reach * top >= LIMIT or count * number * codes.dims >= LIMIT:
        raise UsageError("products or queries pass 2^31: fewer levels or fewer queries at once")
    padded = np.zeros((count, number, codes.dims), np.int8)
    padded[..., :width] = planes
    total = np.asarray(levels).astype(np.int64).sum(axis=1)
    words = send(gpu, padded.view("<i4"))
    return E8Queries(words, send(gpu, total), send(gpu, unit.astype(np.float32)), number)


def e8_codec_scan(
    gpu: Card, codes: E8Codes, queries: E8Queries, plan: Plan, *, blocks: int | None = None
) -> DeviceArray:
    """Exact products i32 [items, 4, 32]; plan of groups of 32 rows. Twin: reference.e8_codec_scan.products."""
    product = gpu.empty((plan.items, QUERIES, GROUP_ROWS), np.int32)
    if plan.items:
        there = [send(gpu, part) for part in plan[:3]]
        gpu.launch(
            "e8_codec_scan",
            f"e8_codec_scan_{codes.bits}_{queries.planes}",
            blocks or gpu.blocks_for(plan.items),
            (codes.codes, codes.list_group, queries.words, queries.total, *there,
             len(plan.task_list), plan.items, codes.dims, product),
        )  # fmt: skip
    return product


def e8_codec_best(
    gpu: Card, codes: E8Codes, queries: E8Queries, plan: Plan, product: DeviceArray, apart: F64,
    k: int, *, blocks: int | None = None,
) -> DeviceArray:  # fmt: skip
    """Keys u64 [T, 4, k] of the k least scores of each query and list; apart [m, probes]: squared distances to the lists'
    centroids. UsageError above DIMS_AT_ONCE dimensions, where the index's own scores are float64 and these are not.
    Twin: reference.e8_codec_scan.best."""
    if codes.dims > DIMS_AT_ONCE:
        raise UsageError(
            f"scores of {codes.dims:,} dimensions: above {DIMS_AT_ONCE:,} only the products are exact, so take those"
        )
    key = gpu.empty((len(plan.task_list), QUERIES, _held(k)), np.uint64)
    if len(plan.task_list):
        far = np.zeros(plan.task_query.size, np.float32)
        far[plan.at[plan.at >= 0]] = apart[plan.at >= 0]
        there = [send(gpu, part) for part in plan[:3]]
        gpu.launch(
            "e8_codec_scan",
            f"e8_codec_best_{_slots(k)}",
            blocks or gpu.blocks_for(far.size),
            (product, codes.factor, codes.constant, codes.list_group, codes.size, *there,
             queries.unit, send(gpu, far), len(plan.task_list), k, key),
        )  # fmt: skip
    return key


def ivf_scan(
    gpu: Card, store: FloatStore, xq: DeviceArray, reach: DeviceArray, probes: I64, k: int,
    metric: Distance, *, health: Health | None = None, blocks: int | None = None,
) -> Found:  # fmt: skip
    """xq f32 [m, d] and its norms reach f32 [m] on the card; probes int64 [m, p] here. k up to 128. With `health` the scan
    also counts; its answer is the same bytes. Twin: reference.ivf_scan."""
    keys = ivf_keys(gpu, store, xq, reach, probes, k, metric, blocks=blocks)
    return ivf_merge(gpu, store, keys, health=health, blocks=blocks)


def ivf_keys(
    gpu: Card, store: FloatStore, xq: DeviceArray, reach: DeviceArray, probes: I64, k: int,
    metric: Distance, *, blocks: int | None = None,
) -> Keys:  # fmt: skip
    """The first half of ivf_scan: the k nearest of each piece of a list and query."""
    count, dim = xq.shape
    if len(store.rows) >= ROWS_MAX or count * dim >= LIMIT:
        raise UsageError(
            f"{len(store.rows):,} rows and {count:,} queries: at most 2^32 rows and 2^31 numbers"
        )
    if len(probes) != count:
        raise UsageError(f"{count} queries, and probes of {len(probes)}")
    plan = planned(probes, store.sizes, PIECE_ROWS)
    key = gpu.empty((plan.items, QUERIES, _held(k)), np.uint64)
    task_list, task_query, first, at = (send(gpu, part) for part in plan)
    if plan.items:
        gpu.launch(
            "ivf_scan",
            f"ivf_scan_{metric}_{_slots(k)}",
            blocks or gpu.blocks_for(plan.items),
            (store.rows, store.length, store.indptr, xq, reach, task_list, task_query, first,
             len(plan.task_list), plan.items, dim, k, key),
        )  # fmt: skip
    return Keys(key, plan, task_list, first, at)


def ivf_merge(
    gpu: Card, store: FloatStore, keys: Keys, *, health: Health | None = None,
    blocks: int | None = None,
) -> Found:  # fmt: skip
    """The second half: of all lists of a query."""
    (count, probes), k = keys.at.shape, keys.key.shape[2]
    out = Found(
        gpu.empty((count, k), np.float32),
        gpu.empty((count, k), np.int64),
        gpu.empty(count, np.int64),
    )
    if count:
        counted = () if health is None else (keys.task_list, *health)
        gpu.launch(
            "ivf_scan",
            f"ivf_scan_merge_{'' if health is None else 'health_'}{_slots(k)}",
            blocks or gpu.blocks_for(count),
            (keys.key, keys.first, keys.at, store.ids, count, probes, k, *out, *counted),
        )
    return out


def health_of(gpu: Card, lists: int) -> Health:
    """Counts of nothing yet."""
    return Health(*(send(gpu, np.zeros(size, np.int64)) for size in (lists, lists, lists, BINS)))


def unpacked(key: npt.NDArray[np.uint64]) -> tuple[F32, I64]:
    """Keys -> numbers f32 (NaN: none) and places int64 (-1: none)."""
    none = key == np.uint64(2**64 - 1)
    word = (key >> np.uint64(32)).astype(np.uint32)
    bits = np.where(word >> 31, word ^ np.uint32(1 << 31), ~word)
    place = np.where(none, -1, (key & np.uint64(2**32 - 1)).astype(np.int64))
    return np.where(none, np.float32(np.nan), bits.view(np.float32)), place


def _held(k: int) -> int:
    if not 1 <= k <= K_MAX:
        raise UsageError(f"k = {k}: a scan keeps 1 to {K_MAX}; for more use the exact search")
    return k


def _slots(k: int) -> int:
    return 32 if k <= 32 else K_MAX


def send(gpu: Card, host: npt.NDArray[Any]) -> DeviceArray:
    there = gpu.empty(host.shape, host.dtype)
    gpu.store(there, np.ascontiguousarray(host))
    return there
