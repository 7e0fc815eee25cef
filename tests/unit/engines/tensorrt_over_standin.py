"""The TensorRT engine over its stand-in: a plan built from the tiny trunk, host memory for a card."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric_pipelines.models import onnx_llama
from fabric_pipelines.models.gguf_llama import GgufLlama
from fabric_pipelines.testing.host_card import HostCard
from fabric_pipelines.testing.tensorrt_standin import Faults, facts_of, standin
from fabric_pipelines.worker.engines.opening import read_folder
from fabric_pipelines.worker.engines.tensorrt import TensorRtEngine
from fabric_pipelines.worker.engines.tensorrt_plan import Step, build_plan
from tests.tiny_models import TOKENS, write_llama

CONTRACTS = json.loads((Path(__file__).parents[2] / "contracts" / "tensorrt.json").read_text())
VERSIONS = tuple(CONTRACTS["versions"])
LAYERS = (0, 2, 3)
STEP = Step(tokens=48, sequences=5)
LANES = (8, 16)


def write_trunk(folder: Path) -> Path:
    write_llama(folder)
    return onnx_llama.convert(GgufLlama(folder / "tiny.gguf"), folder)


@dataclass
class TensorRtOverStandin:
    """version: a key of the contract; `contract` may be thinned out before `build`."""

    trunk: Path
    folder: Path
    patch: pytest.MonkeyPatch
    version: str = "11"
    card: HostCard = field(default_factory=HostCard)
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        facts = facts_of(CONTRACTS, self.version)
        self.runtime = facts.runtime
        self.number = facts.version
        self.contract: dict[str, Any] = copy.deepcopy(facts.classes)

    @property
    def name(self) -> str:
        return f"tiny@{self.runtime}"

    def module(self) -> Any:
        trt = standin(self.contract, version=self.number, card=self.card, faults=self.faults)
        self.patch.setitem(sys.modules, self.runtime, trt)
        return trt

    def plan(self, **changes: Any) -> TensorRtOverStandin:
        chosen: dict[str, Any] = {
            "layers": LAYERS,
            "lanes": LANES,
            "step": STEP,
            "capabilities": [(8, 9), (12, 0)] if self.runtime == "tensorrt_rtx" else [(9, 0)],
        }
        build_plan(
            self.module(),
            self.trunk,
            self.folder,
            runtime=self.runtime,
            vocab_size=len(TOKENS),
            **{**chosen, **changes},
        )
        if self.runtime == "tensorrt_rtx":
            self.card.capability = (12, 0)
        return self

    def build(self) -> TensorRtEngine:
        return TensorRtEngine(self.name, read_folder(self.folder), lambda: self.card)

    def open(self) -> TensorRtEngine:
        engine = self.build()
        engine.open()
        return engine


def direct_states(trunk: Path, layer: int) -> Callable[[Sequence[list[int]]], list[Any]]:
    """What ONNX Runtime gives for the last token of each prompt, one by one, on the trunk as it is."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(trunk))

    def direct(prompts: Sequence[list[int]]) -> list[Any]:
        return [
            session.run(
                [f"hidden_{layer}"],
                {
                    "ids": np.array(prompt, np.int64),
                    "seg": np.zeros(len(prompt), np.int64),
                    "pos": np.arange(len(prompt), dtype=np.int64),
                },
            )[0][-1]
            for prompt in prompts
        ]

    return direct
