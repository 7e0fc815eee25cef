"""Facts: what `contents.json` says of a model's shape and ends, held against the files that it stands beside.

An engine answers by its facts (end tokens, vocabulary, layers), so they are in its fingerprint, and a fact that a file beside
it denies is no fact. Only small files are read here, and `graph` when asked; what no file tells is believed, and pinned by the
fingerprint alone. A file that cannot be read says nothing here: its digest, or whoever opens it, will.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fabric_pipelines.ids import digest
from fabric_pipelines.models.onnx_graph import graph_facts

CONFIG, VOCABULARY, GRAPH = "config.json", "vocabulary.json", "trunk.onnx"
RANDOM, FILES = "random", "files"  # the weights of a checkpoint


def checkpoint_facts(config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """What a Hugging Face folder with this config.json and these files says of itself."""
    return {
        "context": config["max_position_embeddings"],
        "vocab_size": config["vocab_size"],
        "layers": config.get("num_hidden_layers") or 0,
        "dim": config.get("hidden_size") or 0,
        "weights": FILES if any(name.endswith(".safetensors") for name in names) else RANDOM,
    }


def built_facts(shape: Mapping[str, Any]) -> dict[str, Any]:
    """What the pretrained_config of an engine that TensorRT-LLM built says of it."""
    return {
        "context": shape["max_position_embeddings"],
        "vocab_size": shape["vocab_size"],
        "weights": FILES,
    }


def graph_shape(context: int, dim: int, outputs: Collection[str]) -> dict[str, Any]:
    """What a trunk's own graph says: its longest sequence, and by its outputs `hidden_<layer>` how wide and deep it is."""
    hidden = [int(name.removeprefix("hidden_")) for name in outputs if name.startswith("hidden_")]
    return {
        "context": context,
        **({"dim": dim} if dim else {}),
        **({"layers": max(hidden)} if len(hidden) > 1 else {}),
    }


def contradictions(
    folder: Path, described: Mapping[str, Any], *, graph: bool = False
) -> dict[str, str]:
    """Facts that a file of the folder denies, and what is wrong with each. graph: a trunk is read too, which imports onnx."""
    facts: Mapping[str, Any] = described["facts"]
    found = {
        name: f"says {facts[name]!r}, but {who} {value!r}"
        for name, (value, who) in _told(folder, described, graph=graph).items()
        if name in facts and facts[name] != value
    }
    for name in ("eos_id", "eos_ids"):
        wrong = beyond(facts.get(name, []), facts.get("vocab_size"))
        if wrong:
            found[name] = (
                f"says {', '.join(map(str, wrong))}, beyond the vocabulary of {facts['vocab_size']}"
            )
    return found


def beyond(ends: int | list[int], vocab_size: int | None) -> list[int]:
    """Token ids that a vocabulary of that size has not."""
    listed = ends if isinstance(ends, list) else [ends]
    return [] if vocab_size is None else [end for end in listed if not 0 <= end < vocab_size]


def roots(described: Mapping[str, Any]) -> set[str]:
    """What `weights_sha256` may be: one digest over names and digests of the files, as conversions, checkpoints and built
    engines each write it."""
    files = {name: entry["sha256"] for name, entry in described["files"].items()}
    if "part" in described:
        return {digest({"part": described["part"], "files": files})}
    return {digest(files), digest({"weights": described["facts"].get("weights"), "files": files})}


def _told(folder: Path, described: Mapping[str, Any], *, graph: bool) -> dict[str, tuple[Any, str]]:
    names = described["files"]
    told: dict[str, tuple[Any, str]] = {}
    if CONFIG in names:
        config = _json(folder / CONFIG)
        if VOCABULARY in names:
            told = _of_vocabulary(config, _json(folder / VOCABULARY), described["facts"])
        elif isinstance(config, dict):
            told = _says(_of_config(config, names), CONFIG)
    if graph and GRAPH in names:
        read = graph_facts(folder / GRAPH)
        told |= _says(graph_shape(read.context, read.dim, read.outputs), GRAPH)
    return told


def _says(values: Mapping[str, Any], who: str) -> dict[str, tuple[Any, str]]:
    return {name: (value, f"{who} says") for name, value in values.items()}


def _of_config(config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    shape = config.get("pretrained_config")
    try:
        return built_facts(shape) if isinstance(shape, dict) else checkpoint_facts(config, names)
    except KeyError:
        return {}


def _of_vocabulary(
    config: Any, vocabulary: Any, facts: Mapping[str, Any]
) -> dict[str, tuple[Any, str]]:
    if not isinstance(vocabulary, list):
        return {}
    told = _says({"vocab_size": len(vocabulary)}, VOCABULARY)
    end = config.get("eos_token") if isinstance(config, dict) else None
    ends = [number for number, token in enumerate(vocabulary) if token == end]
    if ends and facts.get("eos_id") not in ends:
        told["eos_id"] = (ends[0], f"the end token {end!r} of {CONFIG} is")
    return told


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
