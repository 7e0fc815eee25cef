"""Planted faults: what the rule table says of damage that is known, and of data without any.

`fabric bench decisions`. Clusters are drawn like those of an embedding model (unit rows, a common direction, widths that
fall off), or are the lists that a shard would cut from the vectors of a lake table (`--vectors`). A history is three
generations, each with another 95 % of the rows: a sound one, and two with the fault. A cluster counts under the verdict
that stands after the last; clusters that the fault did not touch count in a line of their own, where everything but KEEP
is a false alarm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from fabric_pipelines.analytics.csr import F32, F64, I64, Bool, group
from fabric_pipelines.analytics.decisions import Decision, decide
from fabric_pipelines.analytics.health import HealthTable, measure
from fabric_pipelines.analytics.probes import Probes, of_own_rows, questions
from fabric_pipelines.analytics.rules import RuleTable, Verdict
from fabric_pipelines.analytics.signals import Earlier, signals
from fabric_pipelines.errors import UsageError
from fabric_pipelines.shards.lists import ITERATIONS_DEFAULT, cut

KEPT_SHARE = 0.95
SOUND = "none"
LISTS_SEED = 11
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Store:
    """rows f32 [N, d], labels [N] below `clusters`, and which clusters a fault touched (emptied: has no rows now). centroids f64
    [clusters, d]: by which searches choose lists (NaN: of none); rows that come, go or change do not move them."""

    rows: F32
    labels: I64
    clusters: int
    touched: Bool
    emptied: Bool
    centroids: F64

    @classmethod
    def sound(cls, rows: F32, labels: I64, clusters: int) -> Store:
        none = np.zeros(clusters, np.bool_)
        return cls(rows, labels, clusters, none, none, _means(rows, labels, clusters))


def drawn(rng: np.random.Generator, rows: int, dim: int, clusters: int) -> Store:
    """Unit rows around means that share a direction; sizes differ by a few times, no cluster is a ball."""
    means = rng.standard_normal((clusters, dim)) + rng.standard_normal(dim)
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    share = rng.lognormal(0.0, 0.4, clusters)
    labels = np.repeat(np.arange(clusters), np.maximum(32, share / share.sum() * rows).astype(int))
    width = np.exp(-np.arange(dim) / (dim / 3))
    width *= 0.7 / np.linalg.norm(width)
    found = means[labels]
    for cluster in range(clusters):
        own = labels == cluster
        axes = np.linalg.qr(rng.standard_normal((dim, dim)))[0]
        found[own] += (rng.standard_normal((int(own.sum()), dim)) * width) @ axes
    return Store.sound(_unit(found), labels.astype(np.int64), clusters)


def cut_from(vectors: F32, clusters: int) -> Store:
    """The lists of a shard of these rows, as `shards` would cut them."""
    ids = np.arange(len(vectors), dtype=np.int64)
    lists = cut(
        vectors, ids, clusters, metric="cosine", seed=LISTS_SEED, iterations=ITERATIONS_DEFAULT
    )
    labels = np.empty(len(vectors), np.int64)
    labels[lists.order] = np.repeat(np.arange(clusters), np.diff(lists.indptr))
    return Store.sound(_unit(vectors.astype(np.float64)), labels, clusters)


def read_vectors(path: Path) -> F32:
    """Column `vector` of a Parquet file. UsageError where there is none."""
    try:
        column = pq.read_table(path, columns=["vector"]).column("vector").combine_chunks()
    except (OSError, pa.ArrowException, KeyError) as fault:
        raise UsageError(
            f"{path} has no vectors ({fault}): give a Parquet file of the embeddings' results in the lake"
        ) from fault
    flat = column.flatten().to_numpy(zero_copy_only=False).astype(np.float32)
    found: F32 = flat.reshape(len(column), -1)
    return found


# ---- faults: each takes a sound store and says which clusters it touched


def shuffle_labels(store: Store, rng: np.random.Generator) -> Store:
    return replace(store, labels=rng.permutation(store.labels), touched=_all(store))


def shuffle_some_labels(store: Store, rng: np.random.Generator) -> Store:
    labels, some = store.labels.copy(), rng.random(len(store.labels)) < 0.3
    labels[some] = rng.permutation(labels[some])
    return replace(store, labels=labels, touched=_all(store))


def merge_two(store: Store, rng: np.random.Generator) -> Store:
    kept, gone = rng.choice(store.clusters, 2, replace=False)
    labels = np.where(store.labels == gone, kept, store.labels)
    means = _means(store.rows, labels, store.clusters)
    touched, emptied = _only(store, kept), _only(store, gone)
    return replace(store, labels=labels, touched=touched, emptied=emptied, centroids=means)


def split_at_random(store: Store, rng: np.random.Generator) -> Store:
    own = np.flatnonzero(store.labels == rng.integers(store.clusters))
    return _cut_off(store, own, own[rng.random(len(own)) < 0.5])


def split_along_axis(store: Store, rng: np.random.Generator) -> Store:
    own = np.flatnonzero(store.labels == rng.integers(store.clusters))
    rows = store.rows[own].astype(np.float64)
    rows -= rows.mean(axis=0)
    widest = np.linalg.svd(rows, full_matrices=False)[2][0]
    return _cut_off(store, own, own[rows @ widest > 0])


def swap_centroids(store: Store, rng: np.random.Generator) -> Store:
    """Of two clusters: rows and labels are as they were, and searches are sent to the wrong one of them."""
    two = rng.choice(store.clusters, 2, replace=False)
    centroids = store.centroids.copy()
    centroids[two] = centroids[two[::-1]]
    return replace(store, centroids=centroids, touched=_only(store, *two))


def stray_centroid(store: Store, rng: np.random.Generator) -> Store:
    """Of one cluster, now beside another's: who is at home there is sent to both, and nobody finds the first."""
    gone, host = rng.choice(store.clusters, 2, replace=False)
    centroids = store.centroids.copy()
    centroids[gone] = centroids[host] * (1 + 1e-3 * rng.standard_normal(centroids.shape[1]))
    return replace(store, centroids=centroids, touched=_only(store, gone))


def flip_bits(store: Store, rng: np.random.Generator) -> Store:
    """One bit anywhere in each of a tenth of the rows of one cluster."""
    cluster = int(rng.integers(store.clusters))
    own = np.flatnonzero(store.labels == cluster)
    hit = rng.choice(own, max(1, len(own) // 10), replace=False)
    rows = store.rows.copy()
    bits = rows.view(np.uint32)
    places = rng.integers(rows.shape[1], size=len(hit))
    bits[hit, places] ^= np.uint32(1) << rng.integers(32, size=len(hit)).astype(np.uint32)
    return replace(store, rows=rows, touched=_only(store, cluster))


def truncate_dims(store: Store, rng: np.random.Generator) -> Store:
    """Everything past a third of the dimensions is lost, and nobody normalises again."""
    rows = store.rows.copy()
    rows[:, rows.shape[1] // 3 :] = 0.0
    return replace(store, rows=rows, touched=_all(store))


def truncate_and_normalise(store: Store, rng: np.random.Generator) -> Store:
    cutted = truncate_dims(store, rng)
    return replace(cutted, rows=_unit(cutted.rows.astype(np.float64)))


def swap_model(store: Store, rng: np.random.Generator) -> Store:
    """Another model has another basis: the same rows, turned."""
    dim = store.rows.shape[1]
    turn = np.linalg.qr(rng.standard_normal((dim, dim)))[0]
    return replace(store, rows=_unit(store.rows @ turn), touched=_all(store))


def swap_model_for_half(store: Store, rng: np.random.Generator) -> Store:
    half = rng.random(len(store.rows)) < 0.5
    other = swap_model(store, rng).rows
    rows = np.where(half[:, None], other, store.rows)
    return replace(store, rows=rows, touched=_all(store))


def _all(store: Store) -> Bool:
    return np.ones(store.clusters, np.bool_)


def _only(store: Store, *clusters: Any) -> Bool:
    only = np.zeros(store.clusters, np.bool_)
    only[list(clusters)] = True
    return only


def _cut_off(store: Store, own: I64, off: I64) -> Store:
    """Rows `off` of the cluster with rows `own` move to a new one."""
    labels = store.labels.copy()
    labels[off] = store.clusters
    more = Store.sound(store.rows, labels, store.clusters + 1)
    return replace(more, touched=_only(more, store.labels[own[0]], store.clusters))


def _means(rows: F32, labels: I64, clusters: int) -> F64:
    """[clusters, d]; NaN of none."""
    total = np.zeros((clusters, rows.shape[1]))
    np.add.at(total, labels, rows)
    with np.errstate(invalid="ignore"):
        means: F64 = total / np.bincount(labels, minlength=clusters)[:, None]
    return means


def _unit(rows: npt.NDArray[np.float64]) -> F32:
    unit: F32 = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return unit


Fault = Callable[[Store, np.random.Generator], Store]
FAULTS: Mapping[str, tuple[Fault, Verdict]] = {
    "shuffle all labels": (shuffle_labels, Verdict.REBUILD),
    "shuffle 30 % of labels": (shuffle_some_labels, Verdict.REBUILD),
    "merge two": (merge_two, Verdict.SPLIT),
    "split one at random": (split_at_random, Verdict.MERGE),
    "split one along its axis": (split_along_axis, Verdict.MERGE),
    "swap two centroids": (swap_centroids, Verdict.REBUILD),
    "stray centroid": (stray_centroid, Verdict.REBUILD),
    "flip bits": (flip_bits, Verdict.REEMBED),
    "flip bits, digests kept": (flip_bits, Verdict.QUARANTINE),
    "truncate dims": (truncate_dims, Verdict.REEMBED),
    "truncate dims, normalise": (truncate_and_normalise, Verdict.REEMBED),
    "swap model": (swap_model, Verdict.REEMBED),
    "swap model for half": (swap_model_for_half, Verdict.REEMBED),
}
"""Each with the verdict that names it."""
HEALING: Mapping[Verdict, frozenset[Verdict]] = {
    Verdict.SPLIT: frozenset({Verdict.SPLIT, Verdict.REBUILD}),
    Verdict.MERGE: frozenset({Verdict.MERGE, Verdict.REBUILD}),
    Verdict.REEMBED: frozenset({Verdict.REEMBED, Verdict.QUARANTINE}),
}
"""Verdicts that lead to the same repair: a rebuild cuts all lists anew, and what is quarantined is not served."""
DIGESTS_KEPT = "flip bits, digests kept"


# ---- histories


def history(
    store: Store, fault: Fault | None, seed: int, table: RuleTable, *, digests: bool = False
) -> tuple[Store, list[Decision]]:
    """Generations 1 (sound), 2 and 3 (with the fault); the decisions after 3. digests: the rows of all three are the
    same, and the digests of 1 are known."""
    rng = np.random.default_rng(seed)
    broken = store if fault is None else fault(store, np.random.default_rng(seed + 1))
    kept = [rng.random(len(store.rows)) < KEPT_SHARE for _ in range(3)]
    if digests:
        kept = kept[:1] * 3
    first, asked = _of(store, kept[0])
    before = {each.cluster: each for each in decide(table, signals(first, None, asked), {}, 1)}
    then = Earlier.of(first, broken.clusters, same_rows=digests, probes=asked)
    decisions: list[Decision] = []
    for generation in (2, 3):
        health, asked = _of(broken, kept[generation - 1], then)
        decisions = decide(table, signals(health, then, asked), before, generation)
        before = {each.cluster: each for each in decisions}
    return broken, decisions


def _of(store: Store, kept: Bool, then: Earlier | None = None) -> tuple[HealthTable, Probes]:
    at = np.flatnonzero(kept)
    csr, _ = group(store.rows[at], store.labels[at], at.astype(np.int64), store.clusters)
    health = measure(
        csr.rows,
        csr.indptr,
        csr.ids,
        metric="cosine",
        reference=then.reference if then else None,
    )

    def list_rows(number: int) -> tuple[F32, I64]:
        own = slice(csr.indptr[number], csr.indptr[number + 1])
        return csr.rows[own], csr.ids[own]

    asked = questions(csr.ids, store.clusters)
    probes = of_own_rows(
        csr.rows[asked], csr.ids[asked], store.centroids, list_rows,
        lambda names: store.labels[names], "cosine",
    )  # fmt: skip
    return health, probes


# ---- the table


def confusion(stores: Mapping[int, Store], table: RuleTable, say: Say) -> list[dict[str, Any]]:
    """One row a fault: `right`, the verdict that names it; `touched`, clusters that it touched by verdict; `rules`,
    those that decided; `others`, the rest by verdict."""
    found = []
    planted: dict[str, tuple[Fault | None, Verdict]] = {SOUND: (None, Verdict.KEEP), **FAULTS}
    for name, (fault, right) in planted.items():
        say(f"{name}, {len(stores)} seeds")
        touched: Counter[str] = Counter()
        others: Counter[str] = Counter()
        rules: Counter[str] = Counter()
        for seed, store in stores.items():
            broken, decisions = history(
                store, fault, 1000 + seed, table, digests=name == DIGESTS_KEPT
            )
            for at, decision in enumerate(decisions):
                if broken.emptied[at]:
                    continue
                hit = bool(broken.touched[at])
                (touched if hit else others)[decision.verdict.value] += 1
                if hit or name == SOUND:
                    rules[decision.shown.rule] += 1
        found.append(
            {
                "fault": name,
                "right": right.value,
                "touched": dict(touched),
                "named": touched[right.value],
                "healed": sum(touched[each.value] for each in HEALING.get(right, {right})),
                "others": dict(others),
                "false_alarms": sum(others.values()) - others[Verdict.KEEP.value],
                "rules": dict(rules.most_common()),
            }
        )
    return found


@dataclass(frozen=True, slots=True)
class Planting:
    """`clusters` of `rows` drawn rows of `dim`; with `vectors`, that many lists cut from that Parquet file instead."""

    rows: int
    dim: int
    clusters: int
    seeds: range
    vectors: Path | None = None


def measure_all(planting: Planting, table: RuleTable, *, say: Say) -> dict[str, Any]:
    asked = planting
    if asked.vectors is None:
        draw = np.random.default_rng
        stores = {
            seed: drawn(draw(seed), asked.rows, asked.dim, asked.clusters) for seed in asked.seeds
        }
    else:
        stores = dict.fromkeys(asked.seeds, cut_from(read_vectors(asked.vectors), asked.clusters))
    first = stores[asked.seeds[0]]
    return {
        "rules_sha256": table.sha256,
        "rows": len(first.rows),
        "dim": int(first.rows.shape[1]),
        "clusters": asked.clusters,
        "seeds": len(asked.seeds),
        "drawn": asked.vectors is None,
        "faults": confusion(stores, table, say),
    }


def table_of(found: Mapping[str, Any]) -> str:
    """For the page and the terminal; only verdicts that were given have a column."""
    faults = found["faults"]
    given = [
        each.value
        for each in Verdict
        if any(each.value in fault[side] for fault in faults for side in ("touched", "others"))
    ]
    what = "drawn" if found["drawn"] else "cut as a shard's lists"
    lines = [
        f"{found['rows']:,} x {found['dim']} in {found['clusters']} clusters ({what}), {found['seeds']} seeds, "
        f"rules {found['rules_sha256'][:12]}",
        "",
        f"| fault | right | {' | '.join(given)} | named | named or healed | false alarms elsewhere |",
        f"|---|---|{'---|' * len(given)}---|---|---|",
    ]
    for fault in faults:
        sound = fault["fault"] == SOUND
        row = fault["others" if sound else "touched"]
        cells = " | ".join(str(row.get(verdict, 0)) for verdict in given)
        total, elsewhere = sum(row.values()), sum(fault["others"].values())
        marks = (
            ["-", "-"] if sound else [f"{fault[name]} of {total}" for name in ("named", "healed")]
        )
        marks.append(f"{fault['false_alarms']} of {elsewhere}" if elsewhere else "-")
        lines.append(f"| {fault['fault']} | {fault['right']} | {cells} | {' | '.join(marks)} |")
    return "\n".join(lines)
