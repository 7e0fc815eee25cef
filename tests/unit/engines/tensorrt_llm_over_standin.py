"""The TensorRT-LLM engine over its stand-in: a built engine's folder or a checkpoint, the fake modules, an open engine."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fabric_pipelines.models.recipes import Limits
from fabric_pipelines.testing.tensorrt_llm_standin import Faults, standin
from fabric_pipelines.testing.vllm_standin import next_token
from fabric_pipelines.worker.engines import tensorrt_llm
from fabric_pipelines.worker.engines.checkpoint import describe
from fabric_pipelines.worker.engines.opening import read_folder
from fabric_pipelines.worker.engines.tensorrt_llm import TensorRtLlmEngine, TensorRtLlmOptions
from fabric_pipelines.worker.engines.tensorrt_llm_folder import describe_built

FACTS = json.loads((Path(__file__).parents[2] / "contracts/tensorrt_llm_1_2.json").read_text())
VERSION = FACTS["source"]["version"]
VOCAB, EOS, OTHER_EOS = 512, 3, 5
LIMITS = Limits(max_batch_size=4, max_num_tokens=64, max_input_len=100, max_seq_len=128)
BUILT: dict[str, Any] = {
    "version": VERSION,
    "pretrained_config": {
        "architecture": "LlamaForCausalLM",
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None},
        "mapping": {"world_size": 1, "tp_size": 1},
    },
    "build_config": {
        "max_batch_size": 4,
        "max_num_tokens": 64,
        "max_input_len": 100,
        "max_seq_len": 128,
        "max_beam_width": 1,
        "kv_cache_type": "PAGED",
    },
}
CHECKPOINT = {
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 128,
    "vocab_size": VOCAB,
}


@dataclass
class TensorRtLlmOverStandin:
    """built: a TensorRT engine's folder, else a Hugging Face checkpoint for the PyTorch backend."""

    folder: Path
    patch: pytest.MonkeyPatch
    built: bool = True
    faults: Faults = field(default_factory=Faults)
    facts: dict[str, Any] = field(default_factory=lambda: copy.deepcopy(FACTS))

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True, parents=True)
        self.write(BUILT if self.built else CHECKPOINT)
        if self.built:
            (self.folder / "rank0.engine").write_bytes(b"engine")
            describe_built(self.folder, eos_ids=[EOS, OTHER_EOS])
        else:
            (self.folder / "model.safetensors").write_bytes(b"weights")
            quantised = {"quantization": {"quant_algo": "FP8"}}
            (self.folder / "hf_quant_config.json").write_text(json.dumps(quantised))
            describe(self.folder, LIMITS, version=f"tensorrt_llm {VERSION}",
                     weight_quantisation="fp8", kv_quantisation="fp8",
                     eos_ids=[EOS, OTHER_EOS])  # fmt: skip
        self.patch.setattr(tensorrt_llm, "version", lambda package: VERSION)

    def write(self, config: dict[str, Any]) -> None:
        (self.folder / "config.json").write_text(json.dumps(config))

    def build(self, **options: Any) -> TensorRtLlmEngine:
        modules = standin(self.facts, vocab_size=VOCAB, faults=self.faults)
        for name, module in modules.items():
            self.patch.setitem(sys.modules, name, module)
        folder = read_folder(self.folder)
        return TensorRtLlmEngine("tiny@tensorrt_llm", folder, TensorRtLlmOptions(**options))

    def open(self, **options: Any) -> TensorRtLlmEngine:
        engine = self.build(**options)
        engine.open()
        return engine


def expected(
    prompt: Sequence[int], new: int, ends: Sequence[int] = (EOS, OTHER_EOS)
) -> tuple[list[int], str]:
    """(tokens, finish reason) that the stand-in's model gives."""
    output: list[int] = []
    while len(output) < new:
        output.append(next_token([*prompt, *output], VOCAB))
        if output[-1] in ends:
            return output[:-1], "stop"
    return output, "length"
