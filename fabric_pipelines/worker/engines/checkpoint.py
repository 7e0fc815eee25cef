"""Checkpoints: a Hugging Face folder, or its config alone, described as an engine folder.

Beside `config.json` and the weights come `manifest.json` (the nine fields) and `contents.json` (digests, sizes,
facts), as in a converted part. A folder without weights has random ones, made by the runtime at load: the timing
is that of the shape, the text means nothing, and name, facts and fingerprint say so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fabric_pipelines.errors import ManifestRefused, ModelMissing
from fabric_pipelines.ids import digest
from fabric_pipelines.models.description import json_object
from fabric_pipelines.models.recipes import CONTENTS, MANIFEST, Limits
from fabric_pipelines.models.sources import sha256_file
from fabric_pipelines.records.manifest import EngineManifest
from fabric_pipelines.worker.engines.names import folder_of

CONFIG = "config.json"
CHECKPOINTS = "checkpoints"  # <model cache>/checkpoints/<engine name>/
RANDOM, FILES = "random", "files"
QWEN_7B_SHAPE: Mapping[str, Any] = MappingProxyType(
    {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
)


def checkpoint_folder(name: str, cache: Path) -> Path:
    """Where the engine `name` was described; ModelMissing when it was not."""
    folder = folder_of(cache / CHECKPOINTS, name)
    if not (folder / MANIFEST).exists():
        raise ModelMissing(
            f"engine {name!r} is not described in {folder}: put config.json and its weights there and run "
            f"`fabric engine build {name}` with its sizes"
        )
    return folder


def describe(
    folder: Path,
    limits: Limits,
    *,
    version: str,
    weight_quantisation: str,
    kv_quantisation: str,
    eos_ids: Iterable[int] = (),
) -> EngineManifest:
    """Write manifest and contents beside `config.json`. version: runtime it is bound to ("vllm 0.25.1");
    eos_ids: token ids that end a generation, none = only the cap does. Weights are read once, for their digest."""
    config = read_config(folder)
    files = {
        path.name: {"size": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name not in (MANIFEST, CONTENTS)
    }
    weights = FILES if any(name.endswith(".safetensors") for name in files) else RANDOM
    manifest = EngineManifest.from_json(
        {
            "version": version,
            "architecture": config["architectures"][0],
            "weight_quantisation": weight_quantisation,
            "kv_quantisation": kv_quantisation,
            "world_size": 1,
            "max_batch_size": limits.max_batch_size,
            "max_num_tokens": limits.max_num_tokens,
            "max_input_len": limits.max_input_len,
            "max_seq_len": limits.max_seq_len,
        }
    )
    contents = {
        "weights_sha256": digest(
            {"weights": weights, "files": {name: entry["sha256"] for name, entry in files.items()}}
        ),
        "files": files,
        "facts": {
            "context": config["max_position_embeddings"],
            "vocab_size": config["vocab_size"],
            "layers": config.get("num_hidden_layers") or 0,
            "dim": config.get("hidden_size") or 0,
            "eos_ids": sorted(eos_ids),
            "weights": weights,
        },
    }
    (folder / CONTENTS).write_text(json.dumps(contents, indent=2, sort_keys=True))
    (folder / MANIFEST).write_text(json.dumps(manifest.as_json(), indent=2))
    return manifest


def read_config(folder: Path) -> dict[str, Any]:
    """The model's config.json; ManifestRefused when it does not tell what a manifest must be compared with."""
    try:
        config = json_object((folder / CONFIG).read_bytes())
    except (OSError, ValueError) as fault:
        raise ManifestRefused(f"{folder / CONFIG} is not readable ({fault})") from fault
    needed = ("architectures", "max_position_embeddings", "vocab_size")
    missing = [name for name in needed if not config.get(name)]
    if missing:
        raise ManifestRefused(f"{folder / CONFIG} lacks {', '.join(missing)}", ("architecture",))
    named = config["architectures"]
    if not isinstance(named, list) or not isinstance(named[0], str):
        raise ManifestRefused(
            f"{folder / CONFIG} has architectures {named!r}, no list of names", ("architecture",)
        )
    return config
