"""Building: make the folder that an engine is opened from, each kind in its own way.

The shipped engines are converted from the catalogue's models and know their sizes; a checkpoint (vllm, transformers)
is described where it lies, and all of its sizes and quantisations must be said: a manifest has no defaults. A TensorRT
plan is built from a model's ONNX trunk, for a card and for the lanes in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fabric_pipelines import models
from fabric_pipelines.errors import MissingDependency, UsageError
from fabric_pipelines.models.description import CHECKPOINTS
from fabric_pipelines.models.recipes import Limits
from fabric_pipelines.telemetry import ProgressBoard
from fabric_pipelines.worker.engines import tensorrt_plan
from fabric_pipelines.worker.engines.checkpoint import describe
from fabric_pipelines.worker.engines.names import folder_of
from fabric_pipelines.worker.engines.plans import PLANS, card_capability, folder_name
from fabric_pipelines.worker.engines.registry import (
    checkpoint_runtime,
    engine_folder,
    engine_spec,
    judged,
    plan_runtime,
)
from fabric_pipelines.worker.engines.tensorrt_llm_folder import describe_built, is_built

TRUNK_PART, GRAPH = (
    "onnxruntime-fp32",
    "trunk.onnx",
)  # TensorRT gets the file that ONNX Runtime runs


@dataclass(frozen=True, slots=True)
class Declared:
    """What a caller says of an engine's sizes; None = not said. Names are those of the manifest."""

    weight_quantisation: str | None = None
    kv_quantisation: str | None = None
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_input_len: int | None = None
    max_seq_len: int | None = None

    def options(self, *, said: bool) -> list[str]:
        """Command-line names of the fields that were said, or were not."""
        return [
            f"--{field.name.replace('_', '-')}"
            for field in fields(self)
            if (getattr(self, field.name) is not None) is said
        ]


@dataclass(frozen=True, slots=True)
class PlanTarget:
    """What a TensorRT plan is for. layers: whose states it gives; lanes: aligned lengths of the tasks to come;
    capabilities: of the cards, e.g. (9, 0); none: the card at hand."""

    layers: tuple[int, ...] = ()
    lanes: tuple[int, ...] = ()
    capabilities: tuple[tuple[int, int], ...] = ()

    def options(self) -> list[str]:
        named = (
            ("--layer", self.layers),
            ("--lane", self.lanes),
            ("--compute-capability", self.capabilities),
        )
        return [name for name, value in named if value]


NO_TARGET = PlanTarget()


def build(
    name: str,
    declared: Declared,
    target: PlanTarget = NO_TARGET,
    *,
    cache: Path,
    eos_ids: tuple[int, ...] = (),
    progress: ProgressBoard | None = None,
) -> Path:
    """Make the engine `name` ready to open and say where it lies; idempotent. UsageError names what must, or may not,
    be said."""
    folder_of(cache, name)  # before anything is read or fetched
    ends = ["--eos"] if eos_ids else []
    if plan_runtime(name) is not None:
        _refuse(name, ends, "it generates nothing")
        return _build_plan(name, declared, target, cache, progress)
    if checkpoint_runtime(name) is not None:
        _refuse(name, target.options(), "it is no TensorRT plan")
        return _describe_checkpoint(name, declared, cache, eos_ids)
    spec = engine_spec(name)
    given = [*declared.options(said=True), *ends, *target.options()]
    _refuse(name, given, "its conversion fixes them")
    models.pull(spec.model, cache, progress=progress)
    return engine_folder(name, cache)


def _refuse(name: str, given: Sequence[str], why: str) -> None:
    if given:
        raise UsageError(f"{', '.join(given)} cannot be chosen for {name}: {why}")


def _describe_checkpoint(
    name: str, declared: Declared, cache: Path, eos_ids: tuple[int, ...]
) -> Path:
    folder = folder_of(cache / CHECKPOINTS, name)
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}: put config.json and the weights into it")
    if checkpoint_runtime(name) == "tensorrt_llm" and is_built(folder):
        _refuse(name, declared.options(said=True), "the engine's own config.json says it")
        describe_built(folder, eos_ids=eos_ids, judge=partial(judged, name))
        return folder
    missing = declared.options(said=False)
    if missing:
        raise UsageError(f"building {name} needs {', '.join(missing)}: a manifest has no defaults")
    assert declared.weight_quantisation is not None
    assert declared.kv_quantisation is not None
    describe(
        folder,
        Limits(
            declared.max_batch_size or 0,
            declared.max_num_tokens or 0,
            declared.max_input_len or 0,
            declared.max_seq_len or 0,
        ),
        version=_installed(str(checkpoint_runtime(name))),
        weight_quantisation=declared.weight_quantisation,
        kv_quantisation=declared.kv_quantisation,
        eos_ids=eos_ids,
        judge=partial(judged, name),
    )
    return folder


def _build_plan(
    name: str,
    declared: Declared,
    target: PlanTarget,
    cache: Path,
    progress: ProgressBoard | None,
) -> Path:
    step_options = ("--max-batch-size", "--max-num-tokens")
    others = [option for option in declared.options(said=True) if option not in step_options]
    _refuse(name, others, "they follow from the trunk and the step")
    missing = [option for option in declared.options(said=False) if option in step_options]
    missing += [
        option
        for option, value in (("--layer", target.layers), ("--lane", target.lanes))
        if not value
    ]
    if missing:
        raise UsageError(f"building {name} needs {', '.join(missing)}")
    runtime = str(plan_runtime(name))
    trt = tensorrt_plan.import_runtime(runtime)
    model = name.partition("@")[0]
    models.pull(model, cache, progress=progress)
    trunk = models.part_folder(model, TRUNK_PART, cache)
    capabilities = target.capabilities or (card_capability(),)
    folder = folder_of(cache / PLANS, name) / folder_name(capabilities)
    tensorrt_plan.build_plan(
        trt,
        trunk / GRAPH,
        folder,
        runtime=runtime,
        layers=target.layers,
        lanes=target.lanes,
        step=tensorrt_plan.Step(declared.max_num_tokens or 0, declared.max_batch_size or 0),
        vocab_size=models.contents(trunk)["facts"]["vocab_size"],
        capabilities=capabilities,
    )
    return folder


def _installed(runtime: str) -> str:
    try:
        return f"{runtime} {version(runtime)}"
    except PackageNotFoundError:
        raise MissingDependency(
            runtime, runtime.replace("_", "-"), f"describing a checkpoint for {runtime}"
        ) from None
