"""Shard manifest: what one generation consists of, to the byte. Its sha256 is the generation's identity.

Written once as canonical JSON. `source` and `recipe` ride along in full, so that a receipt can be issued from
the folder alone after a crash. Reading refuses other formats, anything whose digest is not the one the database
published, and numbers that contradict each other; a file's path follows from its role and digest alone, so that no
manifest, whoever wrote it, names a place outside its folder.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.errors import CorruptionFound, SchemaError, VersionRefused
from fabric_pipelines.given import value_of
from fabric_pipelines.ids import canonical_json
from fabric_pipelines.records.receipt import Receipt

FORMAT = "fabric-shard-2"
READABLE = ("fabric-shard-1", FORMAT)  # 1 had neither increments nor columns of quarantined rows
FILE_NAME = "manifest.json"
VECTOR_DTYPE = "<f4"
METRICS = ("cosine", "l2")
NPY_HEADER_BYTES = 128

ISSUE_AGAIN = "issue the receipt again with the program that made the generation"
BLOCK_ROLES = ("vectors", "ids", "columns")  # one file each per group of lists
LAYER_ROLES = ("layer_vectors", "layer_ids", "layer_columns")  # one file each per increment
SINGLE_ROLES = ("centroids", "marks", "quarantine_ids", "quarantine_vectors")  # one file of all
SPARE_ROLES = ("quarantine_columns", "tombstones")  # one file of all, where there is anything
ROLES = (*BLOCK_ROLES, *LAYER_ROLES, *SINGLE_ROLES, *SPARE_ROLES)
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
BUILD_ANEW = "build the shard anew"
COUNT_MAX = (1 << 63) - 1
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DECIMAL = re.compile(r"-?\d+(\.\d+)?(e-?\d+)?")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file. Blocks cover lists [first_list, first_list + lists); in the files of an increment `first_list`
    is the number of its layer; other roles cover all lists."""

    role: str
    path: str
    bytes: int
    rows: int
    first_list: int
    lists: int
    sha256: str
    logical_sha256: str

    @property
    def place(self) -> str:
        """Where a file of this role and digest lies; nowhere else."""
        role = self.role.removeprefix("layer_")
        folder = "quarantine" if role.startswith("quarantine_") else role
        return f"{folder}/{self.sha256}{'.arrow' if role.endswith('columns') else '.npy'}"

    @property
    def label(self) -> str:
        """How a message names it."""
        if self.role in BLOCK_ROLES:
            last = self.first_list + self.lists - 1
            return f"{self.role} block of lists {self.first_list}..{last} ({self.path})"
        if self.role in LAYER_ROLES:
            return f"{self.role} of layer {self.first_list} ({self.path})"
        return f"{self.role} ({self.path})"


@dataclass(frozen=True, slots=True)
class Increment:
    """What a generation has beside the blocks of an older full build.

    parent_generation: the one that it was made from; base_generation: the full build at the bottom. lists: how
    many there are now, those cut off by a split included; a merged list keeps its number and has no centroid.
    layers: indptr of each, over the lists of its time, oldest first. tombstones: stored rows that no longer
    count. reference_rows [lists]: rows of each list when it was last cut. base_recall: recall@10 of probed
    search right after the full build, as a decimal string."""

    parent_generation: int
    base_generation: int
    lists: int
    layers: Sequence[Sequence[int]]
    tombstones: int
    reference_rows: Sequence[int]
    base_recall: str


@dataclass(frozen=True, slots=True)
class ShardManifest:
    """indptr [base_lists + 1]: stored rows indptr[l]:indptr[l+1] form list l of the blocks, counted through all
    blocks in order. rows: those that count, in blocks and layers."""

    name: str
    generation: int
    token: int
    dim: int
    dtype: str
    metric: str
    rows: int
    quarantined: Mapping[str, int]
    lists_per_block: int
    indptr: Sequence[int]
    files: Sequence[FileEntry]
    source: Mapping[str, Any]
    recipe: Mapping[str, Any]
    parents: Sequence[str] = ()
    increment: Increment | None = None

    @property
    def base_lists(self) -> int:
        return len(self.indptr) - 1

    @property
    def lists(self) -> int:
        return self.increment.lists if self.increment else self.base_lists

    @property
    def folder_name(self) -> str:
        return folder_name(self.generation, self.token)

    def of_role(self, role: str) -> list[FileEntry]:
        return [entry for entry in self.files if entry.role == role]

    def offsets(self) -> npt.NDArray[np.int64]:
        return np.asarray(self.indptr, np.int64)

    def as_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    def to_bytes(self) -> bytes:
        return canonical_json(self.as_json())

    @classmethod
    def from_json(cls, told: object, where: str, *, remedy: str = BUILD_ANEW) -> ShardManifest:
        """`told`: fields, or the JSON text of them. VersionRefused for one of another program, CorruptionFound with
        `remedy` for what no build writes: other types, counts that contradict each other, names of files elsewhere."""
        try:
            fields = json.loads(told) if isinstance(told, str | bytes) else told
        except (ValueError, RecursionError) as fault:
            raise CorruptionFound(f"{where} is no shard manifest: {fault}; {remedy}") from fault
        if not isinstance(fields, Mapping):
            raise CorruptionFound(f"{where} is no shard manifest: it is no JSON object; {remedy}")
        if fields.get("format") not in READABLE:
            raise VersionRefused(
                f"{where} has format {fields.get('format')!r:.60}; this program reads {', '.join(READABLE)}: "
                "use the version that wrote it"
            )
        given = {name: value for name, value in fields.items() if name != "format"}
        files, increment = given.get("files"), given.get("increment")

        def part(kind: type[Any], value: object) -> Any:
            return value_of(kind, value, where, what="shard manifest", remedy=remedy)

        if isinstance(files, list | tuple):
            given["files"] = [part(FileEntry, each) for each in files]
        if increment is not None:
            given["increment"] = part(Increment, increment)
        manifest: ShardManifest = part(cls, given)
        for wrong in _contradictions(manifest):
            raise CorruptionFound(f"{where} is no shard manifest: {wrong}; {remedy}")
        return manifest


def _contradictions(manifest: ShardManifest) -> Iterator[str]:
    """What no build writes, in words. Later rules rely on the earlier ones."""
    grown = manifest.increment
    if not NAME_PATTERN.fullmatch(manifest.name):
        yield f"its name is {manifest.name!r:.60}"
    if manifest.dtype != VECTOR_DTYPE or manifest.metric not in METRICS:
        yield f"its vectors are {manifest.dtype!r:.60} under {manifest.metric!r:.60}"
    counts = {"rows": manifest.rows, "generation": manifest.generation, "token": manifest.token}
    counts |= {"dim": manifest.dim, "lists_per_block": manifest.lists_per_block}
    counts |= {f"quarantined {reason}": count for reason, count in manifest.quarantined.items()}
    if grown:
        counts |= {"lists": grown.lists, "tombstones": grown.tombstones}
        counts |= {"parent_generation": grown.parent_generation}
        counts |= {"base_generation": grown.base_generation}
    for name, count in counts.items():
        least = 1 if name in ("generation", "lists_per_block", "lists") else 0
        if not least <= count <= COUNT_MAX:
            yield f"its {name} is {count:.60g}"
    layers = [*grown.layers] if grown else []
    for indptr in (manifest.indptr, *layers):
        if len(indptr) < 2 or indptr[0] != 0 or any(a > b for a, b in pairwise(indptr)):
            yield "its offsets of lists do not grow from 0"
        if indptr[-1] > COUNT_MAX:
            yield "its offsets of lists are beyond what a file holds"
    if grown and (
        len(grown.reference_rows) != grown.lists
        or grown.lists < manifest.base_lists
        or not _DECIMAL.fullmatch(grown.base_recall)
    ):
        yield "its increment contradicts itself"
    stored = manifest.indptr[-1] + sum(indptr[-1] for indptr in layers)
    if manifest.rows != stored - (grown.tombstones if grown else 0):
        yield f"it counts {manifest.rows} rows, and its lists hold others"
    for entry in manifest.files:
        yield from _contradictions_of(manifest, entry)
    yield from _missing_files(manifest, layers)


def _contradictions_of(manifest: ShardManifest, entry: FileEntry) -> Iterator[str]:
    if entry.role not in ROLES:
        yield f"it has a file of role {entry.role!r:.60}"
    if not all(map(_SHA256.fullmatch, (entry.sha256, entry.logical_sha256))):
        yield f"{entry.role} has no digest of 64 hex digits"
    if entry.path != entry.place:
        yield f"{entry.role} lies at {entry.path!r:.80}, and its place is {entry.place}"
    for name, count in (("first_list", entry.first_list), ("lists", entry.lists)):
        if not 0 <= count <= COUNT_MAX:
            yield f"{entry.role} has {count:.60g} as {name}"
    if not 0 <= entry.rows <= COUNT_MAX or not 0 < entry.bytes <= COUNT_MAX:
        yield f"{entry.role} has {entry.rows:.60g} rows and {entry.bytes:.60g} bytes"
    width = {"vectors": 4 * manifest.dim, "centroids": 8 * manifest.dim, "marks": 16}
    if not entry.role.endswith("columns"):
        each = width.get(entry.role.rpartition("_")[2], 8)
        if entry.bytes != NPY_HEADER_BYTES + each * entry.rows:
            yield f"{entry.label} has {entry.bytes} bytes for {entry.rows} rows"


def _missing_files(manifest: ShardManifest, layers: Sequence[Sequence[int]]) -> Iterator[str]:
    """Which blocks, layers and single files there must be follows from the lists."""
    lists, step, indptr = manifest.base_lists, manifest.lists_per_block, manifest.indptr
    cut = [(first, min(step, lists - first)) for first in range(0, lists, step)]
    blocks = [(first, count, indptr[first + count] - indptr[first]) for first, count in cut]
    grown = [(number, len(layer) - 1, layer[-1]) for number, layer in enumerate(layers)]
    out = sum(manifest.quarantined.values())
    own, travels = (0, manifest.lists), bool(manifest.of_role("columns"))
    wanted = {
        **dict.fromkeys(BLOCK_ROLES[:2], blocks),
        **dict.fromkeys(LAYER_ROLES[:2], grown),
        "columns": blocks if travels else [],
        "layer_columns": grown if travels else [],
        "centroids": [(*own, manifest.lists)],
        "marks": [(0, lists, lists)],
        "quarantine_ids": [(*own, out)],
        "quarantine_vectors": [(*own, out)],
        "quarantine_columns": [(*own, out)],
        "tombstones": [(*own, manifest.increment.tombstones)] if manifest.increment else [],
    }
    for role, expected in wanted.items():
        found = [(entry.first_list, entry.lists, entry.rows) for entry in manifest.of_role(role)]
        # a generation of format 1 kept no columns of what it kept out
        if found != expected and (found or role != "quarantine_columns"):
            yield f"its files of {role} are not those of its lists"


def file_entries(receipt: Receipt) -> list[FileEntry]:
    """The files that a receipt names. SchemaError or VersionRefused for one of another program."""
    where = f"receipt {receipt.receipt_id[:12]}"
    files = receipt.outputs.get("files")
    if not isinstance(files, list):
        raise SchemaError(f"{where} names no files: {ISSUE_AGAIN}")
    return [
        value_of(
            FileEntry, each, where, what="receipt of files", remedy=ISSUE_AGAIN, error=SchemaError
        )
        for each in files
    ]


def folder_name(generation: int, token: int) -> str:
    """The token is part of the name, so that two holders of one number never write into one folder."""
    return f"g{generation:06d}-t{token}"


def read_manifest(folder: Path, sha256: str) -> ShardManifest:
    """The manifest in `folder`. CorruptionFound unless its bytes have the published digest."""
    path = folder / FILE_NAME
    try:
        content = path.read_bytes()
    except OSError as fault:
        raise CorruptionFound(
            f"{path} cannot be read ({fault.strerror}): the database says this generation is published; "
            "bring the folder back, or build the shard anew"
        ) from fault
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise CorruptionFound(
            f"{path} has sha256 {found}, the database published {sha256}: build the shard anew"
        )
    return ShardManifest.from_json(content, str(path))
