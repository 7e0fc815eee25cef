"""Rebuild a generation from its receipt into a scratch folder and say how equal it is.

    identical    every file has the same sha256
    logical      other bytes, the same rows, assignments and (to 1e-6) centroids
    equivalent   the same rows, at least 99 % of them in the same list, recall@10 within half a point
    different    anything else, and always when the source has moved: then there is nothing to prove

Each difference is named, whatever the verdict: a newer library that gives identical files is still a
difference of the recipe. Nothing is published and the scratch folder goes; the original is only read.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics.search import recall_at_k
from fabric_pipelines.analytics.truth import true_neighbours
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.source import RowSet, SourceRows
from fabric_pipelines.dataplane.vectors import ReceiptRow
from fabric_pipelines.errors import FabricError, SchemaError, StorageFailed, UsageError
from fabric_pipelines.given import value_of
from fabric_pipelines.receipts.source_check import content_then, moved_rows, place_differences
from fabric_pipelines.receipts.verification import find
from fabric_pipelines.records.receipt import Receipt
from fabric_pipelines.shards.blocks import Block
from fabric_pipelines.shards.building import full_recipe
from fabric_pipelines.shards.content import IndexSpec, content_of
from fabric_pipelines.shards.difference import Difference, field_differences
from fabric_pipelines.shards.disk import DISK, REMEDIES, reading
from fabric_pipelines.shards.generation import (
    SCRATCH,
    Generation,
    sweep_scratch,
    write_generation,
)
from fabric_pipelines.shards.increment import change_of, grow
from fabric_pipelines.shards.manifest import (
    COUNT_MAX,
    ISSUE_AGAIN,
    NAME_PATTERN,
    FileEntry,
    ShardManifest,
    file_entries,
)
from fabric_pipelines.shards.quality import K, sample
from fabric_pipelines.shards.scrub import damaged_files
from fabric_pipelines.shards.shard import Shard, open_generation
from fabric_pipelines.shards.store import VectorStore, source_of, store_of

Verdict = Literal["identical", "logical", "equivalent", "different"]
CENTROID_TOLERANCE = 1e-6
SAME_LIST_SHARE = 0.99
RECALL_TOLERANCE = 0.005
PRUNED = "pruned"
PARAMETERS = ("lists", "seed", "metric", "iterations", "lists_per_block")


@dataclass(frozen=True, slots=True)
class Rebuild:
    """verdict: of the rows and the recipe, against what the receipt says. damage: what is wrong with the files of the
    generation itself, which a good verdict does not heal; among `differences` too. `ok` unless the verdict is
    "different" or there is damage; there may be other differences all the same."""

    ok: bool
    verdict: Verdict
    receipt_id: str
    differences: tuple[Difference, ...]
    damage: tuple[Difference, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def rebuild(
    db: Database | VectorStore,
    root: Path,
    receipt_id: str,
    *,
    overrides: Mapping[str, Any] | None = None,
) -> Rebuild:
    """Build anew what receipt `receipt_id` describes and compare. `overrides` changes index parameters
    (PARAMETERS) to see what they do. UsageError when there is no such receipt, SchemaError when it was
    changed after it was issued (verify says where)."""
    store = store_of(db)
    row = find(store, receipt_id)
    receipt = Receipt.from_statement(row.statement)
    _require_outputs(receipt)
    original, found_first = _opened(store, root, row.shard, row.generation)
    damage = [found for found in found_first if found.found != PRUNED]
    spec = _spec(receipt, overrides or {}, original)
    rows = store.read_source(source_of(receipt.source))
    moved = rows.state.content != content_then(receipt.source)
    recipe = full_recipe(_given(receipt.recipe), spec)
    differences = [
        *found_first,
        *place_differences(receipt.source, rows.state),
        *(moved_rows(rows, receipt.source, original) if moved else ()),
        *field_differences(
            "recipe", dict(receipt.recipe), recipe, "{expected} in the receipt, {found} now"
        ),
    ]
    parent, lost = _parent(store, root, row, receipt)
    differences += lost
    with _scratch(root) as folder:
        if parent is None or overrides:
            made = _built(folder, receipt, rows, spec, recipe)
        else:
            made = _replayed(folder, receipt, rows, parent, recipe)
        with Shard(made) as rebuilt:
            verdict, found = compare(receipt, original, rebuilt)
    if parent is not None:
        parent.close()
    if original is not None:
        original.close()
    if moved:
        verdict = "different"
    ok = verdict != "different" and not damage
    return Rebuild(ok, verdict, row.receipt_id, (*differences, *found), tuple(damage))


@dataclass(frozen=True, slots=True)
class _Outputs:
    """What of a receipt's outputs becomes a folder, or is counted with."""

    shard: str
    generation: int
    token: int
    parent_generation: int = 0
    base_recall: str = "0"

    def __post_init__(self) -> None:
        if not NAME_PATTERN.fullmatch(self.shard):
            raise SchemaError(f"its shard is {self.shard!r:.60}")
        if not (0 <= self.generation <= COUNT_MAX and 0 <= self.token <= COUNT_MAX):
            raise SchemaError("its generation or token is none")


def _require_outputs(receipt: Receipt) -> None:
    where = f"receipt {receipt.receipt_id[:12]}"
    told = {name: receipt.outputs.get(name) for name in ("shard", "generation", "token")}
    grown = receipt.outputs.get("increment")
    if grown is not None:
        parts = grown if isinstance(grown, Mapping) else {}
        told |= {name: parts.get(name) for name in ("parent_generation", "base_recall")}
    value_of(
        _Outputs, told, where, what="receipt of outputs", remedy=ISSUE_AGAIN, error=SchemaError
    )


def compare(
    receipt: Receipt, original: Shard | None, rebuilt: Shard
) -> tuple[Verdict, list[Difference]]:
    """`original` is None when its files cannot be trusted: then only digests are compared."""
    expected = {_place(entry): entry for entry in file_entries(receipt)}
    found = {_place(entry): entry for entry in rebuilt.manifest.files}
    differences = list(_file_differences(expected, found))
    if not differences:
        return "identical", []
    same_values = expected.keys() == found.keys() and all(
        entry.logical_sha256 == found[place].logical_sha256 for place, entry in expected.items()
    )
    if same_values:
        return "logical", differences
    if original is None:
        return "different", differences
    if not _same_rows(original, rebuilt):
        return "different", differences
    share = _same_list_share(original, rebuilt)
    if share == 1 and _same_centroids(original, rebuilt):
        return "logical", differences
    drop = _probed_recall(original) - _probed_recall(rebuilt)
    differences.append(
        Difference(
            "lists",
            "1",
            f"{share:.4f}",
            f"{share:.2%} of the rows lie in the same list; recall@{K} of probed search changed by "
            f"{-drop:+.4f}",
        )
    )
    close = share >= SAME_LIST_SHARE and abs(drop) <= RECALL_TOLERANCE
    return ("equivalent" if close else "different"), differences


def _opened(
    store: VectorStore, root: Path, name: str, number: int
) -> tuple[Shard | None, list[Difference]]:
    """The generation, or None and why it cannot be trusted: damage, or PRUNED by policy."""
    published = store.current_generation(name, number)
    if published is not None and published.pruned:
        return None, [Difference("generation", str(number), PRUNED, published.pruned)]
    try:
        generation = open_generation(store, root, name, number)
        with reading(generation.folder):
            damage = list(damaged_files(generation))
            return (None if damage else Shard(generation)), damage
    except FabricError as fault:
        return None, [Difference("generation", str(number), "unreadable", str(fault))]


def _parent(
    store: VectorStore, root: Path, row: ReceiptRow, receipt: Receipt
) -> tuple[Shard | None, list[Difference]]:
    """The generation that an increment was laid over; None for a full build, and where it cannot be trusted."""
    increment = receipt.outputs.get("increment")
    if increment is None:
        return None, []
    number = int(increment["parent_generation"])
    parent, damage = _opened(store, root, row.shard, number)
    if parent is not None:
        return parent, []
    return None, [
        Difference(
            "parent",
            str(number),
            "unreadable",
            f"generation {number}, which this one was laid over, cannot be read ({damage[0]}): built in full "
            "instead, so lists and files are others",
        )
    ]


def _replayed(
    folder: Path,
    receipt: Receipt,
    rows: SourceRows,
    parent: Shard,
    recipe: Mapping[str, Any],
) -> Generation:
    """The increment made again: all rows are candidates, those that are as in the parent drop out."""
    known = np.union1d(parent.stored_ids(), parent.quarantined().ids)
    ids = np.union1d(rows.ids, known)
    now = RowSet(rows.ids, rows.vectors, rows.columns)
    grown = grow(
        parent,
        change_of(parent, ids, now, rows.state),
        receipt.outputs["increment"]["base_recall"],
    )
    manifest = grown.manifest(
        parent.manifest,
        generation=receipt.outputs["generation"],
        token=receipt.outputs["token"],
        source=rows.state.as_json(),
        recipe=recipe,
        parents=receipt.parents,
    )
    # by link where it can be: the scratch folder lies beside the shards, on their disk
    return _written(folder, manifest, grown.blocks(), parent.generation.folder)


def _given(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value for key, value in recipe.items() if key not in ("index", "code", "libraries")
    }


def _spec(receipt: Receipt, overrides: Mapping[str, Any], original: Shard | None) -> IndexSpec:
    unknown = sorted(set(overrides) - set(PARAMETERS))
    if unknown:
        raise UsageError(f"{unknown} cannot be changed; index parameters are {list(PARAMETERS)}")
    try:
        index = receipt.recipe["index"]
        fields = {name: index[name] for name in PARAMETERS}
        training = index["training"]
    except (KeyError, TypeError) as fault:
        raise SchemaError(f"the receipt's recipe lacks the index parameter {fault}") from fault
    if training == "none":
        if original is None:
            raise StorageFailed(
                "this generation kept the centroids of an older one, and its own files are damaged or pruned: "
                "bring its folder back, or build with new centroids"
            )
        fields["centroids"] = original.centroids()
    where = f"the recipe of receipt {receipt.receipt_id[:12]}"
    spec = value_of(IndexSpec, fields, where, what="index", remedy=ISSUE_AGAIN, error=SchemaError)
    return replace(spec, **overrides)


def _built(
    folder: Path,
    receipt: Receipt,
    rows: SourceRows,
    spec: IndexSpec,
    recipe: Mapping[str, Any],
) -> Generation:
    content = content_of(rows, spec)
    manifest = content.manifest(
        name=receipt.outputs["shard"],
        generation=receipt.outputs["generation"],
        token=receipt.outputs["token"],
        spec=spec,
        source=rows.state.as_json(),
        recipe=recipe,
        parents=receipt.parents,
    )
    return _written(folder, manifest, {block.path: block for _, block in content.blocks}, None)


def _written(
    folder: Path,
    manifest: ShardManifest,
    blocks: Mapping[str, Block | FileEntry],
    previous: Path | None,
) -> Generation:
    path, _ = write_generation(DISK, folder, manifest, blocks, previous)
    generation = Generation(path, manifest, hashlib.sha256(manifest.to_bytes()).hexdigest())
    damage = list(damaged_files(generation))
    if damage:
        raise StorageFailed(f"the scratch folder does not keep what is written: {damage[0]}")
    return generation


@contextmanager
def _scratch(root: Path) -> Iterator[Path]:
    """A folder beside the shards, so on their disk, gone afterwards; what a killed rebuild left goes first."""
    sweep_scratch(DISK, root)
    try:
        folder = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=root))
    except OSError as fault:
        remedy = REMEDIES.get(fault.errno or 0, "look at the disk before building again")
        raise StorageFailed(
            f"cannot make a scratch folder in {root}, beside the shards: {fault.strerror}; {remedy}. The generation was "
            f"not touched, and `fabric receipt verify` only reads"
        ) from fault
    try:
        with reading(folder):
            yield folder
    finally:
        shutil.rmtree(folder)


Place = tuple[str, int]


def _place(entry: FileEntry) -> Place:
    return entry.role, entry.first_list


def _file_differences(
    expected: Mapping[Place, FileEntry], found: Mapping[Place, FileEntry]
) -> Iterator[Difference]:
    for place in sorted(expected.keys() | found.keys()):
        left, right = expected.get(place), found.get(place)
        if left is None or right is None:
            known = left or right
            assert known is not None
            side = "the receipt" if right is None else "the rebuilt generation"
            yield Difference(
                known.path,
                left.sha256 if left else "none",
                right.sha256 if right else "none",
                f"{known.label} exists only in {side}",
            )
        elif left.sha256 != right.sha256:
            same = left.logical_sha256 == right.logical_sha256
            yield Difference(
                left.path,
                left.sha256,
                right.sha256,
                f"{left.label} was rebuilt with {'other bytes, same values' if same else 'other values'}"
                f" ({left.rows} rows then, {right.rows} now)",
            )


def _by_id(shard: Shard) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    ids = shard.ids()
    return ids, np.argsort(ids)


def _same_rows(one: Shard, two: Shard) -> bool:
    (ids_one, order_one), (ids_two, order_two) = _by_id(one), _by_id(two)
    return np.array_equal(ids_one[order_one], ids_two[order_two]) and np.array_equal(
        one.vectors()[order_one], two.vectors()[order_two]
    )


def _same_list_share(one: Shard, two: Shard) -> float:
    labels = [
        np.repeat(np.arange(shard.manifest.lists), np.diff(shard.indptr))[_by_id(shard)[1]]
        for shard in (one, two)
    ]
    return float((labels[0] == labels[1]).mean())


def _same_centroids(one: Shard, two: Shard) -> bool:
    left, right = one.centroids(), two.centroids()
    return left.shape == right.shape and bool(np.abs(left - right).max() <= CENTROID_TOLERANCE)


def _probed_recall(shard: Shard) -> float:
    vectors, ids = shard.vectors(), shard.ids()
    xq = sample(vectors, ids)
    truth = true_neighbours(xq, vectors, ids, K, metric=shard.manifest.metric)
    return recall_at_k(shard.search(xq, K, exact=False).I, truth)
