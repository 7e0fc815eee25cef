"""Nine required fields, no defaults: every fault is refused by the name of its field."""

from __future__ import annotations

from typing import Any

import pytest

from fabric_pipelines.errors import ManifestRefused
from fabric_pipelines.records.manifest import EngineManifest

GOOD: dict[str, Any] = {
    "version": "ctranslate2 4.8.5",
    "architecture": "LlamaForCausalLM",
    "weight_quantisation": "int8",
    "kv_quantisation": "none",
    "world_size": 1,
    "max_batch_size": 32,
    "max_num_tokens": 4096,
    "max_input_len": 1024,
    "max_seq_len": 2048,
}


def _faults(**changes: Any) -> tuple[str, ...]:
    with pytest.raises(ManifestRefused) as caught:
        EngineManifest.from_json({**GOOD, **changes})
    assert all(name in str(caught.value) for name in caught.value.fields)
    return caught.value.fields


def test_there_are_nine_fields_and_none_has_a_default() -> None:
    assert len(GOOD) == 9
    assert EngineManifest.from_json(GOOD).as_json() == GOOD


@pytest.mark.parametrize("name", GOOD)
def test_a_missing_or_null_field_is_named(name: str) -> None:
    assert _faults(**{name: None}) == (name,)
    with pytest.raises(ManifestRefused, match=name):
        EngineManifest.from_json({key: value for key, value in GOOD.items() if key != name})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("version", "latest"),
        ("architecture", "  "),
        ("weight_quantisation", "int3"),
        ("kv_quantisation", ""),
        ("world_size", 0),
        ("max_batch_size", True),
        ("max_num_tokens", "4096"),
        ("max_input_len", 1.5),
        ("max_seq_len", -1),
    ],
)
def test_an_unknown_value_is_named(name: str, value: Any) -> None:
    assert _faults(**{name: value}) == (name,)


def test_contradictions_are_named() -> None:
    assert _faults(max_input_len=4096) == ("max_input_len",)
    assert _faults(max_batch_size=5000) == ("max_batch_size",)


def test_several_faults_are_named_together_and_a_stranger_is_refused() -> None:
    assert set(_faults(world_size=None, version="x", beam_width=4)) == {
        "world_size",
        "version",
        "beam_width",
    }


def test_the_fingerprint_moves_with_manifest_and_weights() -> None:
    manifest = EngineManifest.from_json(GOOD)
    other = EngineManifest.from_json({**GOOD, "max_batch_size": 16})
    assert len({manifest.fingerprint("a"), manifest.fingerprint("b"), other.fingerprint("a")}) == 3
