"""Embeddings: the verse corpus as unit vectors, and how well their neighbours agree with known near-duplicates.

The known pairs were found by word overlap (corpus.known_pairs), so they judge the vectors from outside. A
pair counts as found when one verse is among the other's k nearest; a threshold on the cosine would have to
be tuned, a rank does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fabric_pipelines.workloads.corpus import known_pairs, verses
from fabric_pipelines.workloads.request import (
    WHOLE,
    EngineChoice,
    Prepared,
    Row,
    Tokeniser,
    prepare,
    request_from,
)

NAME = "embeddings"
ENGINE = "all-minilm-l6-v2@onnxruntime-fp32"
FUNCTION = "embed"
CODE_VERSION = "1"
NEIGHBOURS = 10


@dataclass(frozen=True, slots=True)
class EmbeddingsRequest:
    """verses: the first so many of the corpus, 0 for all 800."""

    verses: int = 0
    salt: str = ""


def prepare_embeddings(
    values: Mapping[str, Any],
    engine: EngineChoice,
    tokeniser: Tokeniser,
    partition: str = WHOLE,
) -> Prepared:
    request = request_from(EmbeddingsRequest, values)
    return prepare(
        [
            Row(verse.row, verse.text, {"reference": verse.reference, "book": verse.book})
            for verse in verses()[: request.verses or None]
        ],
        workload=NAME,
        partition=partition,
        code_version=CODE_VERSION,
        request=request,
        function=FUNCTION,
        sampling={"kind": "embed", "pooling": "mean", "normalise": True},
        engine=engine,
        tokeniser=tokeniser,
    )


def results(values: Mapping[str, Any], landed: pa.Table) -> pa.Table:
    """Landed vectors with book, reference and text."""
    request_from(EmbeddingsRequest, values)
    corpus = verses()
    known = [corpus[row] for row in landed.column("source_row").to_pylist()]
    return pa.table(
        {
            "task_id": landed.column("task_id"),
            "source_row": landed.column("source_row"),
            "book": [verse.book for verse in known],
            "reference": [verse.reference for verse in known],
            "text": [verse.text for verse in known],
            "prompt_tokens": landed.column("prompt_tokens"),
            "vector": landed.column("vector"),
            "engine_fingerprint": landed.column("engine_fingerprint"),
        }
    )


@dataclass(frozen=True, slots=True)
class NearDuplicates:
    """known: pairs whose two rows are both here; found: of these, one end is among the k nearest of the other;
    table: one row a known pair, closest first; similarities: cosine of every row to its nearest other."""

    known: int
    found: int
    table: pa.Table
    similarities: npt.NDArray[np.float64]

    @property
    def found_share(self) -> float:
        return self.found / self.known if self.known else 1.0


def near_duplicates(
    source_rows: npt.NDArray[np.int64],
    vectors: npt.NDArray[np.float32],
    neighbours: npt.NDArray[np.int64],
) -> NearDuplicates:
    """`vectors` [rows, dim], row i being corpus row source_rows[i]; `neighbours` [rows, k]: the
    corpus rows nearest to row i, itself left out."""
    position = {int(row): at for at, row in enumerate(source_rows)}
    corpus = verses()
    wide = vectors.astype(np.float64)
    unit = wide / np.linalg.norm(wide, axis=1, keepdims=True)
    records: list[dict[str, Any]] = []
    for pair in known_pairs():
        if pair.left not in position or pair.right not in position:
            continue
        left, right = position[pair.left], position[pair.right]
        found = bool(
            (neighbours[left] == pair.right).any() or (neighbours[right] == pair.left).any()
        )
        cosine = float(unit[left] @ unit[right])
        records.append(
            {
                "left": corpus[pair.left].reference,
                "right": corpus[pair.right].reference,
                "jaccard": pair.jaccard,
                "cosine": cosine,
                "found": found,
            }
        )
    records.sort(key=lambda record: (-record["cosine"], record["left"], record["right"]))
    nearest = np.array([position[int(row)] for row in neighbours[:, 0]])
    similarities = np.einsum("nd,nd->n", unit, unit[nearest])
    return NearDuplicates(
        known=len(records),
        found=sum(record["found"] for record in records),
        table=pa.Table.from_pylist(records),
        similarities=similarities,
    )


def others(
    ids: npt.NDArray[np.int64],
    source_rows: npt.NDArray[np.int64],
    neighbours: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Neighbour ids [rows, k + 1] of row i = ids[i], as source rows [rows, k], row i itself left out. Among equal
    vectors the row itself need not come first, nor be among the k + 1 at all; then the last one is dropped."""
    order = np.argsort(ids)
    found = source_rows[order[np.searchsorted(ids[order], neighbours)]]
    own = neighbours == ids[:, None]
    own[~own.any(axis=1), -1] = True
    kept: npt.NDArray[np.int64] = found[~own].reshape(len(ids), -1)
    return kept
