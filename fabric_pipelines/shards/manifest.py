"""Shard manifest: what one generation consists of, to the byte. Its sha256 is the generation's identity.

Written once as canonical JSON. `source` and `recipe` ride along in full, so that a receipt can be issued from
the folder alone after a crash. Reading refuses other formats and anything whose digest is not the one
the database published.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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

ISSUE_AGAIN = "issue the receipt again with the program that made the generation"
BLOCK_ROLES = ("vectors", "ids", "columns")  # one file each per group of lists
LAYER_ROLES = ("layer_vectors", "layer_ids", "layer_columns")  # one file each per increment


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
    def from_json(cls, fields: Mapping[str, Any], where: str) -> ShardManifest:
        if fields.get("format") not in READABLE:
            raise VersionRefused(
                f"{where} has format {fields.get('format')!r}; this program reads {', '.join(READABLE)}: "
                "use the version that wrote it"
            )
        given = {name: value for name, value in fields.items() if name != "format"}
        try:
            files = [FileEntry(**entry) for entry in given.pop("files")]
            increment = given.pop("increment", None)
            return cls(**given, files=files, increment=increment and Increment(**increment))
        except (KeyError, TypeError) as fault:
            raise CorruptionFound(f"{where} is not a shard manifest: {fault}") from fault


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
    return ShardManifest.from_json(json.loads(content), str(path))
