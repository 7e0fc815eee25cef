"""Probes: labelled true and false statements that differ in one fact, and a linear reader of hidden states.

Each entity gives one true and one false statement. The false one carries the attribute of another entity of
the same split, by a rotation, so that every word stands equally often on both sides: a bag of words knows
nothing about the label, and what a probe finds above that floor the model put there. The split is by
entity, never by statement or token; two statements of one entity in both halves would leak the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fabric_pipelines.errors import UsageError
from fabric_pipelines.workloads.corpus import read_table
from fabric_pipelines.workloads.overlap import words_of
from fabric_pipelines.workloads.probe_fit import Fit, fit_probe
from fabric_pipelines.workloads.request import (
    WHOLE,
    EngineChoice,
    Prepared,
    Row,
    Tokeniser,
    prepare,
    request_from,
)

NAME = "probes"
ENGINE = "smollm2-135m-instruct@onnxruntime-fp32"
FUNCTION = "hidden_states"
CODE_VERSION = "1"
TOPICS = {
    "capitals": "The capital of {entity} is {attribute}.",
    "kinds": "The {entity} is a kind of {attribute}.",
}


@dataclass(frozen=True, slots=True)
class ProbesRequest:
    """topics: of TOPICS; layers: 0 is the embedding, n the output of block n before the final norm; the state
    is read at the last token; test_share: share of entities held out; entities: cap per topic, 0 for all;
    shuffles: label shuffles of the control; seed: of split, shuffles and bootstrap."""

    topics: tuple[str, ...] = ("capitals", "kinds")
    layers: tuple[int, ...] = (0, 6, 12, 18, 24, 30)
    test_share: float = 0.3
    entities: int = 0
    shuffles: int = 20
    seed: int = 7
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Statement:
    row: int
    topic: str
    entity: str
    text: str
    label: bool
    held_out: bool


def statements(request: ProbesRequest) -> list[Statement]:
    """True and false statements in turn, topic by topic; row numbers are dense."""
    made: list[Statement] = []
    for topic in request.topics:
        if topic not in TOPICS:
            raise UsageError(f"there is no probe topic {topic!r}; there are {', '.join(TOPICS)}")
        facts = read_table(f"{topic}.tsv")
        facts = facts[: request.entities or len(facts)]
        test_count = round(len(facts) * request.test_share)
        order = np.random.default_rng(request.seed).permutation(len(facts))
        for members, held_out in ((order[test_count:], False), (order[:test_count], True)):
            split = [facts[at] for at in members]
            for (entity, true), false in zip(split, _rotated(split), strict=True):
                for attribute, label in ((true, True), (false, False)):
                    text = TOPICS[topic].format(entity=entity, attribute=attribute)
                    made.append(Statement(len(made), topic, entity, text, label, held_out))
    return made


def _rotated(split: Sequence[Sequence[str]]) -> list[str]:
    """Each entity's false attribute: those of the split rotated (sorted by attribute, turned by the largest
    group) so that none meets its own and each is used exactly as often as it is true."""
    by_attribute = sorted(range(len(split)), key=lambda at: split[at][1])
    attributes = [split[at][1] for at in by_attribute]
    largest = max(attributes.count(name) for name in set(attributes))
    if 2 * largest > len(attributes):
        raise UsageError("half of a probe split shares one attribute; ask for more entities")
    false = [""] * len(split)
    for position, at in enumerate(by_attribute):
        false[at] = attributes[(position + largest) % len(attributes)]
    return false


def prepare_probes(
    values: Mapping[str, Any],
    engine: EngineChoice,
    tokeniser: Tokeniser,
    partition: str = WHOLE,
) -> Prepared:
    request = request_from(ProbesRequest, values)
    return prepare(
        [
            Row(item.row, item.text, {"topic": item.topic, "entity": item.entity})
            for item in statements(request)
        ],
        workload=NAME,
        partition=partition,
        code_version=CODE_VERSION,
        request=request,
        function=FUNCTION,
        sampling={"kind": "hidden", "layers": list(request.layers), "pooling": "last"},
        engine=engine,
        tokeniser=tokeniser,
    )


def results(values: Mapping[str, Any], landed: pa.Table) -> pa.Table:
    """Landed states (one vector a row, the layers end to end) with statement, label and split."""
    by_row = {item.row: item for item in statements(request_from(ProbesRequest, values))}
    known = [by_row[row] for row in landed.column("source_row").to_pylist()]
    return pa.table(
        {
            "task_id": landed.column("task_id"),
            "source_row": landed.column("source_row"),
            "topic": [item.topic for item in known],
            "entity": [item.entity for item in known],
            "statement": [item.text for item in known],
            "label": [item.label for item in known],
            "held_out": [item.held_out for item in known],
            "prompt_tokens": landed.column("prompt_tokens"),
            "vector": landed.column("vector"),
            "engine_fingerprint": landed.column("engine_fingerprint"),
        }
    )


@dataclass(frozen=True, slots=True)
class LayerFit:
    layer: int
    fit: Fit


def fit_layers(values: Mapping[str, Any], table: pa.Table) -> tuple[list[LayerFit], Fit]:
    """One probe a layer, and the bag-of-words floor fitted the same way."""
    request = request_from(ProbesRequest, values)
    labels = np.asarray(table.column("label").to_pylist(), bool)
    test = np.asarray(table.column("held_out").to_pylist(), bool)
    entities = np.asarray(table.column("entity").to_pylist())
    vectors = stacked(table.column("vector")).astype(np.float64)
    per_layer = vectors.reshape(len(vectors), len(request.layers), -1)
    settings = {"shuffles": request.shuffles, "seed": request.seed}
    fits = [
        LayerFit(layer, fit_probe(per_layer[:, at], labels, test, entities, **settings))
        for at, layer in enumerate(request.layers)
    ]
    floor = fit_probe(
        bag_of_words(table.column("statement").to_pylist()), labels, test, entities, **settings
    )
    return fits, floor


def report(fits: Sequence[LayerFit], floor: Fit) -> pa.Table:
    """One row a layer: accuracy with its interval, the shuffled-label control and the floors."""
    return pa.table(
        {
            "layer": [item.layer for item in fits],
            "accuracy": [item.fit.accuracy for item in fits],
            "low": [item.fit.low for item in fits],
            "high": [item.fit.high for item in fits],
            "control": [item.fit.control for item in fits],
            "majority": [item.fit.majority for item in fits],
            "bag_of_words": [floor.accuracy] * len(fits),
            "train_rows": [item.fit.train_rows for item in fits],
            "test_rows": [item.fit.test_rows for item in fits],
        }
    )


def bag_of_words(texts: Sequence[str]) -> npt.NDArray[np.float64]:
    """Word counts, float64 [texts, words]."""
    split = [words_of(text) for text in texts]
    column = {
        word: at for at, word in enumerate(sorted({word for words in split for word in words}))
    }
    counts = np.zeros((len(texts), len(column)))
    for row, words in enumerate(split):
        for word in words:
            counts[row, column[word]] += 1
    return counts


def stacked(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """A list column of equal lengths as a matrix [rows, length], dtype kept."""
    values = column.combine_chunks()
    flat = values.flatten().to_numpy(zero_copy_only=False)
    matrix: npt.NDArray[Any] = flat.reshape(len(values), -1)
    return matrix
