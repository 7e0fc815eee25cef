"""Engine manifest: nine required fields, no defaults; anything missing or contradictory is refused by name.

Reading one touches no GPU. The fields and why each is there: docs/architecture.md, "The nine fields".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fabric_pipelines.errors import ManifestRefused
from fabric_pipelines.ids import digest

WEIGHT_QUANTISATIONS = (
    "none", "int8", "int8_sq", "int4_awq", "int4_gptq", "fp8", "nvfp4", "mixed_precision",
)  # fmt: skip
KV_QUANTISATIONS = ("none", "int8", "fp8", "nvfp4", "single_pass")


@dataclass(frozen=True, slots=True)
class EngineManifest:
    """version:               runtime that the engine is bound to, e.g. "ctranslate2 4.8.5"
    architecture:          model class, e.g. "LlamaForCausalLM"
    weight_quantisation:   one of WEIGHT_QUANTISATIONS ("none" is an explicit word, never absence)
    kv_quantisation:       one of KV_QUANTISATIONS ("single_pass": the engine keeps no cache)
    world_size:            devices that one engine spans
    max_batch_size:        sequences at once
    max_num_tokens:        packed tokens a step
    max_input_len:         longest prompt; longer tasks are failed back, the broker never filters
    max_seq_len:           longest prompt plus output
    """

    version: str
    architecture: str
    weight_quantisation: str
    kv_quantisation: str
    world_size: int
    max_batch_size: int
    max_num_tokens: int
    max_input_len: int
    max_seq_len: int

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> EngineManifest:
        """Raises ManifestRefused naming every field at fault: missing, unknown, wrong type or value, or one
        that contradicts another."""
        names = tuple(cls.__dataclass_fields__)
        faults: dict[str, str] = {}
        for name in sorted(set(fields) - set(names)):
            faults[name] = "is not a manifest field"
        for name in names:
            if name not in fields or fields[name] is None:
                faults[name] = "is missing"
        for name in names[:4]:
            if name not in faults and not (isinstance(fields[name], str) and fields[name].strip()):
                faults[name] = "must be a non-empty string"
        for name in names[4:]:
            value = fields.get(name)
            if name not in faults and (
                isinstance(value, bool) or not isinstance(value, int) or value < 1
            ):
                faults[name] = f"must be a positive integer, not {value!r}"
        for name, allowed in (
            ("weight_quantisation", WEIGHT_QUANTISATIONS),
            ("kv_quantisation", KV_QUANTISATIONS),
        ):
            if name not in faults and fields[name] not in allowed:
                faults[name] = f"is {fields[name]!r}, not one of {', '.join(allowed)}"
        if "architecture" not in faults and not fields["architecture"].isidentifier():
            faults["architecture"] = f"must be a model class, not {fields['architecture']!r}"
        if "version" not in faults and not re.fullmatch(r"[\w.+-]+ \d[\w.+-]*", fields["version"]):
            faults["version"] = f"must be '<runtime> <version>', not {fields['version']!r}"
        numbers = {name: fields[name] for name in names[4:] if name not in faults}
        for low, high in (
            ("max_input_len", "max_seq_len"),
            ("max_batch_size", "max_num_tokens"),
        ):
            if low in numbers and high in numbers and numbers[low] > numbers[high]:
                faults[low] = f"is {numbers[low]}, above {high} {numbers[high]}"
        if faults:
            raise ManifestRefused(
                "engine manifest refused: "
                + "; ".join(f"{name} {why}" for name, why in faults.items()),
                tuple(faults),
            )
        return cls(**{name: fields[name] for name in names})

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def fingerprint(self, weights_sha256: str, facts: Mapping[str, Any] | None = None) -> str:
        """Hex sha256 of manifest, weights digest and facts (end tokens, vocabulary, layers, ...): all by which an engine
        answers. Stands on every completion and receipt."""
        return digest(
            {
                "manifest": self.as_json(),
                "weights_sha256": weights_sha256,
                "facts": dict(facts or {}),
            }
        )

    def earlier_fingerprint(self, weights_sha256: str) -> str:
        """As programs before December 2026 had it, without the facts: what they left behind can be told by it."""
        return digest({"manifest": self.as_json(), "weights_sha256": weights_sha256})
