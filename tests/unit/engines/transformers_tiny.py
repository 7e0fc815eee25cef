"""Tiny checkpoints for the transformers engine: the weights of the tiny Llama and BERT under Hugging Face's names."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fabric_pipelines.models.recipes import Limits
from fabric_pipelines.worker.engines import registry
from fabric_pipelines.worker.engines.checkpoint import describe
from tests.tiny_models import write_bert, write_llama, write_llama_checkpoint

EOS = 2
LIMITS = Limits(max_batch_size=8, max_num_tokens=256, max_input_len=500, max_seq_len=512)
GENERATE, HIDDEN, EMBED = (
    "tiny-llama@transformers-fp32",
    "tiny-llama@transformers-pass",
    "tiny-bert@transformers-pass",
)


def libraries() -> tuple[Any, Any]:
    """torch and transformers; skips without them, which CI makes a failure."""
    try:
        import torch
        import transformers
    except ImportError as fault:
        reason = f'needs `pip install "fabric-pipelines[transformers]"` ({fault})'
        if os.environ.get("CI") == "true" and os.environ.get("FABRIC_REQUIRE_PARITY") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return torch, transformers


@dataclass(frozen=True)
class TinyCheckpoints:
    """cache: a model cache with the three engines described; gguf, bert: files of the same weights, for the
    references of tests/reference_models.py."""

    cache: Path
    gguf: Path
    bert: Path

    def folder(self, name: str) -> Path:
        return self.cache / "checkpoints" / name

    def copied(self, to: Path) -> TinyCheckpoints:
        return TinyCheckpoints(Path(shutil.copytree(self.cache, to)), self.gguf, self.bert)


def write_checkpoints(folder: Path) -> TinyCheckpoints:
    _, transformers = libraries()
    made = TinyCheckpoints(folder / "models", folder / "tiny.gguf", folder / "model.safetensors")
    write_llama(folder)
    write_bert(folder)
    for name, kv in ((GENERATE, "none"), (HIDDEN, "single_pass"), (EMBED, "single_pass")):
        place = made.folder(name)
        place.mkdir(parents=True)
        if name == EMBED:
            for file in ("model.safetensors", "config.json"):
                shutil.copy(folder / file, place)
        else:
            write_llama_checkpoint(made.gguf, place)
        _describe(place, f"transformers {transformers.__version__}", kv)
    return made


def _describe(folder: Path, version: str, kv: str) -> None:
    describe(folder, LIMITS, version=version, weight_quantisation="none",
             kv_quantisation=kv, eos_ids=[EOS])  # fmt: skip


def describe_again(folder: Path) -> None:
    """After its files were changed on purpose."""
    said = json.loads((folder / "manifest.json").read_text())
    _describe(folder, said["version"], said["kv_quantisation"])


@contextmanager
def opened(name: str, cache: Path, device: str = "cpu") -> Iterator[Any]:
    engine = registry.construct_engine(name, cache=cache, threads=1, device=device)
    engine.open()
    try:
        yield engine
    finally:
        engine.close()


def edit_manifest(folder: Path, fields: dict[str, Any], *, without: str = "") -> None:
    path = folder / "manifest.json"
    manifest = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({k: v for k, v in manifest.items() if k != without}))
