"""Hidden states: one partition of the corpus through the trunk, the declared layers pooled, nothing else kept.

All-token output is opt-in and budgeted elsewhere: a 7B model writes 262 GB for a million tokens and 32
layers, a pooled row writes 8 KB a layer. The layers asked for are written down with the result, and so is
the largest magnitude and the count of non-finite values per layer, which is how an fp16 overflow shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from fabric_pipelines.workloads.corpus import book_verses, verses
from fabric_pipelines.workloads.probes import stacked
from fabric_pipelines.workloads.request import (
    EngineChoice,
    Prepared,
    Row,
    Tokeniser,
    prepare,
    request_from,
)

NAME = "hidden_states"
ENGINE = "smollm2-135m-instruct@onnxruntime-fp32"
FUNCTION = "hidden_states"
CODE_VERSION = "1"


@dataclass(frozen=True, slots=True)
class HiddenStatesRequest:
    """layers: 0 is the embedding, n the output of block n before the final norm; pooling: "mean" or "last" over
    the tokens; verses_per_book: at even distance through the book, 0 for all of them."""

    layers: tuple[int, ...] = (8, 16, 30)
    pooling: str = "mean"
    verses_per_book: int = 6
    salt: str = ""


def prepare_hidden_states(
    values: Mapping[str, Any], engine: EngineChoice, tokeniser: Tokeniser, partition: str
) -> Prepared:
    """`partition` is a book of the corpus."""
    request = request_from(HiddenStatesRequest, values)
    return prepare(
        [
            Row(verse.row, verse.text, {"reference": verse.reference})
            for verse in book_verses(partition, request.verses_per_book)
        ],
        workload=NAME,
        partition=partition,
        code_version=CODE_VERSION,
        request=request,
        function=FUNCTION,
        sampling={"kind": "hidden", "layers": list(request.layers), "pooling": request.pooling},
        engine=engine,
        tokeniser=tokeniser,
    )


def results(values: Mapping[str, Any], landed: pa.Table) -> pa.Table:
    """One fp16 vector a row and layer: column layer_N, beside the verse it belongs to."""
    request = request_from(HiddenStatesRequest, values)
    corpus = verses()
    known = [corpus[row] for row in landed.column("source_row").to_pylist()]
    states = stacked(landed.column("vector")).astype(np.float16)
    per_layer = states.reshape(len(states), len(request.layers), -1)
    columns: dict[str, Any] = {
        "task_id": landed.column("task_id"),
        "source_row": landed.column("source_row"),
        "reference": [verse.reference for verse in known],
        "prompt_tokens": landed.column("prompt_tokens"),
        "engine_fingerprint": landed.column("engine_fingerprint"),
    }
    for at, layer in enumerate(request.layers):
        flat = pa.array(np.ascontiguousarray(per_layer[:, at]).reshape(-1), pa.float16())
        columns[f"layer_{layer}"] = pa.FixedSizeListArray.from_arrays(flat, per_layer.shape[2])
    return pa.table(columns)


def layer_summary(table: pa.Table) -> pa.Table:
    """One row a layer: mean norm, largest magnitude, count of values that are not finite."""
    names = [name for name in table.column_names if name.startswith("layer_")]
    states = {name: stacked(table.column(name)).astype(np.float64) for name in names}
    return pa.table(
        {
            "layer": [int(name.removeprefix("layer_")) for name in names],
            "norm_mean": [float(np.linalg.norm(states[name], axis=1).mean()) for name in names],
            "magnitude_max": [float(np.abs(states[name]).max()) for name in names],
            "non_finite": [int((~np.isfinite(states[name])).sum()) for name in names],
        }
    )
