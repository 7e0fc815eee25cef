"""The vLLM engine over its stand-in: a described folder, the fake modules, an open engine."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fabric_pipelines.models.recipes import Limits
from fabric_pipelines.testing.vllm_standin import Faults, next_token, standin
from fabric_pipelines.worker.engines import vllm as vllm_engine
from fabric_pipelines.worker.engines.checkpoint import describe
from fabric_pipelines.worker.engines.opening import read_folder
from fabric_pipelines.worker.engines.vllm import VllmEngine, VllmOptions

FACTS = json.loads((Path(__file__).parents[2] / "contracts" / "vllm_0_25_1.json").read_text())
VOCAB, EOS = 512, 3
LIMITS = Limits(max_batch_size=4, max_num_tokens=64, max_input_len=100, max_seq_len=128)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 128,
    "vocab_size": VOCAB,
}


@dataclass
class VllmOverStandin:
    """`open` gives an engine; what the stand-in does wrong is in `faults`."""

    folder: Path
    patch: pytest.MonkeyPatch
    faults: Faults = field(default_factory=Faults)
    facts: dict[str, Any] = field(default_factory=lambda: FACTS)

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        (self.folder / "config.json").write_text(json.dumps(CONFIG))
        describe(
            self.folder,
            LIMITS,
            version="vllm 0.25.1",
            weight_quantisation="fp8",
            kv_quantisation="fp8",
            eos_ids=[EOS],
        )
        for name, module in standin(self.facts, vocab_size=VOCAB, faults=self.faults).items():
            self.patch.setitem(sys.modules, name, module)
        self.patch.setattr(vllm_engine, "version", lambda package: "0.25.1")

    def build(self, **options: Any) -> VllmEngine:
        return VllmEngine("tiny@vllm", read_folder(self.folder), VllmOptions(**options))

    def open(self, **options: Any) -> VllmEngine:
        engine = self.build(**options)
        engine.open()
        return engine


def expected(prompt: list[int], new: int) -> tuple[list[int], str]:
    """(tokens, finish reason) that the stand-in's model gives."""
    output: list[int] = []
    while len(output) < new:
        output.append(next_token([*prompt, *output], VOCAB))
        if output[-1] == EOS:
            return output[:-1], "stop"
    return output, "length"
