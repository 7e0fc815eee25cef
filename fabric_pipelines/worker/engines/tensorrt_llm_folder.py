"""TensorRT-LLM's own engine folder, read fail-closed: nine fields of its config.json, no defaults.

The library itself fills some twenty absent keys silently and clamps sizes with a warning, so what a folder holds is read
here and compared, before a GPU is touched. A folder without a built engine is a Hugging Face checkpoint for the
library's PyTorch backend; its sizes are said when it is described.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fabric_pipelines.errors import ManifestRefused
from fabric_pipelines.ids import digest
from fabric_pipelines.models.facts import CONFIG, built_facts
from fabric_pipelines.records.manifest import EngineManifest
from fabric_pipelines.worker.engines.checkpoint import ends_of, read_config
from fabric_pipelines.worker.engines.opening import EngineFolder, files_of, publish

BUILT = "rank0.engine"
QUANTISED = "hf_quant_config.json"  # beside a checkpoint that ModelOpt quantised
# TensorRT-LLM's words for what a manifest says in its own.
WEIGHTS: Mapping[str | None, str] = MappingProxyType(
    {
        None: "none",
        "FP8": "fp8",
        "NVFP4": "nvfp4",
        "W8A16": "int8",
        "W4A16_AWQ": "int4_awq",
        "W4A16_GPTQ": "int4_gptq",
        "W8A8_SQ_PER_CHANNEL": "int8_sq",
        "MIXED_PRECISION": "mixed_precision",
    }
)
CACHE: Mapping[str | None, str] = MappingProxyType(
    {None: "none", "FP8": "fp8", "INT8": "int8", "NVFP4": "nvfp4"}
)
NINE: Mapping[str, str] = MappingProxyType(
    {
        "version": "version",
        "architecture": "pretrained_config.architecture",
        "weight_quantisation": "pretrained_config.quantization.quant_algo",
        "kv_quantisation": "pretrained_config.quantization.kv_cache_quant_algo",
        "world_size": "pretrained_config.mapping.world_size",
        "max_batch_size": "build_config.max_batch_size",
        "max_num_tokens": "build_config.max_num_tokens",
        "max_input_len": "build_config.max_input_len",
        "max_seq_len": "build_config.max_seq_len",
    }
)
# What this project's use of an engine takes for granted: named, and refused when it is otherwise.
NEEDS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "build_config.kv_cache_type": ("PAGED", "paged"),
        "build_config.max_beam_width": (1,),
    }
)


def is_built(folder: Path) -> bool:
    return (folder / BUILT).exists()


def built_fields(folder: Path) -> dict[str, Any]:
    """The nine manifest fields as the engine's config.json has them. ManifestRefused names each manifest field whose
    key is absent (null counts only where it means "not quantised"), or has a word that is not known."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except (OSError, json.JSONDecodeError) as fault:
        raise ManifestRefused(f"{folder / CONFIG} is not readable ({fault})") from fault
    faults: dict[str, str] = {}
    found: dict[str, Any] = {}
    for field, path in NINE.items():
        there, value = _at(config, path)
        may_be_null = field in ("weight_quantisation", "kv_quantisation")
        if not there or (value is None and not may_be_null):
            faults[field] = f"has no key {path} in {CONFIG}"
        else:
            found[field] = value
    for field, words in (("weight_quantisation", WEIGHTS), ("kv_quantisation", CACHE)):
        if field in found and found[field] not in words:
            faults[field] = f"is {found[field]!r} in {CONFIG}, which has no word here"
        elif field in found:
            found[field] = words[found[field]]
    if "version" in found:
        found["version"] = f"tensorrt_llm {found['version']}"
    for path, allowed in NEEDS.items():
        there, value = _at(config, path)
        if not there or value not in allowed:
            said = repr(value) if there else "absent"
            faults[path] = f"must be {allowed[0]!r}, and is {said}"
    if faults:
        raise ManifestRefused(
            "engine manifest refused: "
            + "; ".join(f"{name} {why}" for name, why in faults.items()),
            tuple(faults),
        )
    return found


def _at(config: Any, path: str) -> tuple[bool, Any]:
    for name in path.split("."):
        if not isinstance(config, dict) or name not in config:
            return False, None
        config = config[name]
    return True, config


def describe_built(
    folder: Path,
    *,
    eos_ids: Iterable[int],
    judge: Callable[[EngineFolder], object] = lambda folder: None,
) -> EngineManifest:
    """Write manifest and contents beside a built engine, whose own config.json says everything but the end tokens; or refuse
    and leave those that are there. judge: see `publish`."""
    manifest = EngineManifest.from_json(built_fields(folder))
    config = json.loads((folder / CONFIG).read_bytes())
    lacking = [
        name
        for name in ("max_position_embeddings", "vocab_size")
        if not _at(config, f"pretrained_config.{name}")[1]
    ]
    if lacking:
        raise ManifestRefused(
            f"{folder / CONFIG} lacks {', '.join(lacking)} in pretrained_config", tuple(lacking)
        )
    shape = config["pretrained_config"]
    facts = {**built_facts(shape), "eos_ids": ends_of(eos_ids, shape["vocab_size"])}
    files = files_of(folder)
    root = digest({name: entry["sha256"] for name, entry in files.items()})
    publish(folder, manifest, {"weights_sha256": root, "files": files, "facts": facts}, judge)
    return manifest


def checkpoint_fields(folder: Path) -> dict[str, Any]:
    """What a Hugging Face checkpoint says of architecture and weight quantisation."""
    config = read_config(folder)
    algorithm: str | None = None
    if (folder / QUANTISED).exists():
        said = json.loads((folder / QUANTISED).read_bytes())
        algorithm = _at(said, "quantization.quant_algo")[1]
    elif "quantization_config" in config:
        algorithm = str(config["quantization_config"].get("quant_algo", "unknown"))
    return {
        "architecture": config["architectures"][0],
        "weight_quantisation": WEIGHTS.get(algorithm, algorithm),
    }
