"""Recipes: which parts a model is converted into, and what each part says about itself.

A part is a folder that an engine opens: weights, `manifest.json` (the nine fields) and `contents.json` (digests
and sizes of its files, shape, where it came from). Its identity is the digest of source bytes, converter
and runtime version, so a new runtime gets its own conversion and never meets an old one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fabric_pipelines.errors import MissingDependency
from fabric_pipelines.ids import canonical_json, digest
from fabric_pipelines.models import onnx_bert, onnx_llama, to_ctranslate2, tokenisation
from fabric_pipelines.models.catalogue import ModelSpec
from fabric_pipelines.models.gguf_llama import GgufLlama
from fabric_pipelines.models.sources import sha256_file
from fabric_pipelines.records.manifest import EngineManifest

MANIFEST = "manifest.json"
CONTENTS = "contents.json"
TOKENISER = "tokeniser"
Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Limits:
    """The four sizes of a manifest. CPU numbers: attention over a step is O(T^2) in memory, 9 heads x 2,048^2
    floats are 151 MB, so no step and no prompt goes beyond 2,048."""

    max_batch_size: int
    max_num_tokens: int
    max_input_len: int
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """part: name of the folder; package: runtime it is bound to ("" = none); build(sources, folder) writes the
    files and returns facts for contents.json; limits None = not an engine."""

    part: str
    converter: str
    package: str
    build: Callable[[Path, Path], Facts]
    weights: str = ""
    weight_quantisation: str = "none"
    kv_quantisation: str = "none"
    limits: Limits | None = None

    @property
    def runtime(self) -> str:
        """E.g. "ctranslate2 4.8.5"; MissingDependency when it is not installed."""
        if not self.package:
            return ""
        try:
            return f"{self.package} {version(self.package)}"
        except PackageNotFoundError:
            raise MissingDependency(
                self.package, "embedded", f"the conversion {self.part}"
            ) from None

    def mark(self, spec: ModelSpec) -> str:
        """Digest (24 hex digits) that names the part's folder."""
        return digest(
            {
                "files": [file.sha256 for file in spec.files],
                "converter": self.converter,
                "runtime": self.runtime,
            }
        )[:24]

    def mark_if_installed(self, spec: ModelSpec) -> str | None:
        """None where its runtime is not installed: which folder would be opened is then unknown."""
        try:
            return self.mark(spec)
        except MissingDependency:
            return None


def manifest_bytes(recipe: Recipe, spec: ModelSpec) -> bytes | None:
    """What a part says about itself as an engine; None for what is no engine."""
    if recipe.limits is None:
        return None
    manifest = EngineManifest(
        version=recipe.runtime,
        architecture=spec.architecture,
        weight_quantisation=recipe.weight_quantisation,
        kv_quantisation=recipe.kv_quantisation,
        world_size=1,
        max_batch_size=recipe.limits.max_batch_size,
        max_num_tokens=recipe.limits.max_num_tokens,
        max_input_len=recipe.limits.max_input_len,
        max_seq_len=recipe.limits.max_seq_len,
    )
    return json.dumps(manifest.as_json(), indent=2).encode()


def write_part(recipe: Recipe, spec: ModelSpec, sources: Path, folder: Path) -> None:
    """Convert into `folder` and describe the result there."""
    facts = recipe.build(sources, folder)
    files = {
        path.name: {"size": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(folder.iterdir())
    }
    contents = {**origin_of(recipe, spec, files), "files": files, "facts": facts}
    (folder / CONTENTS).write_bytes(json.dumps(contents, indent=2, sort_keys=True).encode())
    if (manifest := manifest_bytes(recipe, spec)) is not None:
        (folder / MANIFEST).write_bytes(manifest)
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)


def origin_of(
    recipe: Recipe, spec: ModelSpec, files: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
    """What a part says of where it came from; all of it follows from recipe, model and the digests of its files."""
    return {
        "model": spec.name,
        "part": recipe.part,
        "converter": recipe.converter,
        "runtime": recipe.runtime,
        "source_sha256": spec.weights.sha256,
        "weights_sha256": weights_digest(recipe, files),
    }


def weights_digest(recipe: Recipe, files: Mapping[str, Mapping[str, Any]]) -> str:
    """One digest over everything that decides what the engine computes: names and digests of all files."""
    named = {name: entry["sha256"] for name, entry in files.items()}
    return hashlib.sha256(canonical_json({"part": recipe.part, "files": named})).hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _gguf(sources: Path) -> GgufLlama:
    return GgufLlama(next(iter(sources.glob("*.gguf"))))


def _llama_facts(model: GgufLlama) -> Facts:
    return {
        **model.shape.as_json(),
        "eos_id": model.field("tokenizer.ggml.eos_token_id"),
    }


def _llama_tokeniser(sources: Path, folder: Path) -> Facts:
    tokenisation.from_gguf(_gguf(sources), folder)
    return {}


def _llama_ctranslate2(sources: Path, folder: Path) -> Facts:
    model = _gguf(sources)
    to_ctranslate2.convert(model, folder)
    return _llama_facts(model)


def _llama_onnx(sources: Path, folder: Path) -> Facts:
    model = _gguf(sources)
    onnx_llama.convert(model, folder)
    return _llama_facts(model)


def _bert_tokeniser(sources: Path, folder: Path) -> Facts:
    shape = onnx_bert.BertShape.from_config(sources / "config.json")
    tokenisation.from_wordpiece(sources / "tokenizer.json", folder, shape.vocab_size)
    return {}


def _bert_onnx(sources: Path, folder: Path) -> Facts:
    shape = onnx_bert.BertShape.from_config(sources / "config.json")
    onnx_bert.convert(sources / "model.safetensors", shape, folder)
    return shape.as_json()


RECIPES: Mapping[str, tuple[Recipe, ...]] = {
    "LlamaForCausalLM": (
        Recipe(TOKENISER, tokenisation.CONVERTER, "tokenizers", _llama_tokeniser),
        Recipe(
            "ctranslate2-int8",
            to_ctranslate2.CONVERTER,
            "ctranslate2",
            _llama_ctranslate2,
            weight_quantisation="int8",
            limits=Limits(32, 4096, 2048, 4096),
        ),
        Recipe(
            "onnxruntime-fp32",
            onnx_llama.CONVERTER,
            "onnxruntime",
            _llama_onnx,
            kv_quantisation="single_pass",
            limits=Limits(256, 2048, 2048, 2048),
        ),
    ),
    "BertModel": (
        Recipe(TOKENISER, tokenisation.CONVERTER, "tokenizers", _bert_tokeniser),
        Recipe(
            "onnxruntime-fp32",
            onnx_bert.CONVERTER,
            "onnxruntime",
            _bert_onnx,
            kv_quantisation="single_pass",
            limits=Limits(256, 4096, 512, 512),
        ),
    ),
}


def part_mark(spec: ModelSpec, part: str) -> str:
    """Digest that names the folder of one part of a model."""
    return next(recipe for recipe in RECIPES[spec.architecture] if recipe.part == part).mark(spec)
