"""Receipt: all that is needed to rebuild a generation and to prove it equal.

Identity = sha256 of the canonical JSON of source, recipe, outputs and parents. Quality (recall, imbalance,
health) rides along outside the identity: measuring again must not make another receipt. Numbers in
the identity are integers or decimal strings, never floats (RFC 8785 leaves no room for doubt then).
The envelope is an in-toto Statement v1 so that outside tools can read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fabric_pipelines.errors import SchemaError
from fabric_pipelines.ids import digest

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://fabric-pipelines.dev/receipt/v1"


def _require_no_floats(value: Any, path: str) -> None:
    if isinstance(value, float):
        raise SchemaError(f"receipt identity field {path} is a float; write it as a decimal string")
    if isinstance(value, Mapping):
        for key, item in value.items():
            _require_no_floats(item, f"{path}.{key}")
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, item in enumerate(value):
            _require_no_floats(item, f"{path}[{index}]")


@dataclass(frozen=True, slots=True)
class Receipt:
    """source:  cluster, relation, columns, filter, pg_snapshot, rows, content_hash, bucket_sums
    recipe:  weights, tokenizer, engine fingerprint, metric, index kind and parameters, seed, code, libraries
    outputs: one mapping a file {role, path, bytes, rows, sha256, logical_sha256} plus generation and token
    parents: receipt ids; quality: anything measured, floats welcome"""

    source: Mapping[str, Any]
    recipe: Mapping[str, Any]
    outputs: Mapping[str, Any]
    parents: Sequence[str] = ()
    quality: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_no_floats(self.identity(), "receipt")

    def identity(self) -> dict[str, Any]:
        return {
            "source": dict(self.source),
            "recipe": dict(self.recipe),
            "outputs": dict(self.outputs),
            "parents": list(self.parents),
        }

    @property
    def receipt_id(self) -> str:
        return digest(self.identity())

    def to_statement(self) -> dict[str, Any]:
        return {
            "_type": STATEMENT_TYPE,
            "subject": [
                {"name": item["path"], "digest": {"sha256": item["sha256"]}}
                for item in self.outputs.get("files", [])
            ],
            "predicateType": PREDICATE_TYPE,
            "predicate": {
                "receipt_id": self.receipt_id,
                **self.identity(),
                "quality": dict(self.quality),
            },
        }

    @classmethod
    def from_statement(cls, statement: Mapping[str, Any]) -> Receipt:
        try:
            predicate = statement["predicate"]
            receipt = cls(
                predicate["source"],
                predicate["recipe"],
                predicate["outputs"],
                tuple(predicate["parents"]),
                dict(predicate["quality"]),
            )
        except (KeyError, TypeError, ValueError) as fault:
            raise SchemaError(f"not a receipt statement: {fault}") from fault
        if receipt.receipt_id != predicate.get("receipt_id"):
            raise SchemaError(
                f"receipt {predicate.get('receipt_id')} does not match its own content "
                f"({receipt.receipt_id}): it was changed after it was issued"
            )
        return receipt
