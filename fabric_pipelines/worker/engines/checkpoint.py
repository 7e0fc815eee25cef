"""Checkpoints: a Hugging Face folder, or its config alone, described as an engine folder.

Beside `config.json` and the weights come `manifest.json` (the nine fields) and `contents.json` (digests, sizes,
facts), as in a converted part. A folder without weights has random ones, made by the runtime at load: the timing
is that of the shape, the text means nothing, and name, facts and fingerprint say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fabric_pipelines.errors import ManifestRefused, ModelMissing
from fabric_pipelines.ids import digest
from fabric_pipelines.models.description import CHECKPOINTS, json_object
from fabric_pipelines.models.facts import CONFIG, beyond, checkpoint_facts
from fabric_pipelines.models.recipes import MANIFEST, Limits
from fabric_pipelines.records.manifest import EngineManifest
from fabric_pipelines.worker.engines.names import folder_of
from fabric_pipelines.worker.engines.opening import EngineFolder, files_of, publish

# A number of config.json and the fact that it is.
FACTS: Mapping[str, str] = MappingProxyType(
    {
        "max_position_embeddings": "context",
        "vocab_size": "vocab_size",
        "num_hidden_layers": "layers",
        "hidden_size": "dim",
    }
)
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
    judge: Callable[[EngineFolder], object] = lambda folder: None,
) -> EngineManifest:
    """Write manifest and contents beside `config.json`, or refuse and leave those that are there. version: runtime it is
    bound to ("vllm 0.25.1"); eos_ids: token ids that end a generation, none = only the cap does; judge: see `publish`.
    Weights are read once, for their digest."""
    config = read_config(folder)
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
    ends = ends_of(eos_ids, config["vocab_size"])
    files = files_of(folder)
    facts = {**checkpoint_facts(config, files), "eos_ids": ends}
    digests = {name: entry["sha256"] for name, entry in files.items()}
    root = digest({"weights": facts["weights"], "files": digests})
    described = {"weights_sha256": root, "files": files, "facts": facts}
    publish(folder, manifest, described, judge)
    return manifest


def ends_of(eos_ids: Iterable[int], vocab_size: int) -> list[int]:
    """Sorted and once each, as the fingerprint has them; ManifestRefused for a token that no vocabulary has, before a weight
    is hashed."""
    ends = sorted(set(eos_ids))
    wrong = beyond(ends, vocab_size)
    if wrong:
        raise ManifestRefused(
            f"engine manifest refused: eos_ids {', '.join(map(str, wrong))} (--eos) beyond the vocabulary of {vocab_size} "
            f"tokens: they are numbers from 0 to {vocab_size - 1}",
            ("eos_ids",),
        )
    return ends


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
    for name in (*needed[1:], "num_hidden_layers", "hidden_size"):
        value = config.get(name) or 0
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ManifestRefused(
                f"{folder / CONFIG} has {name} {value!r}, no whole number", (FACTS[name],)
            )
    return config
