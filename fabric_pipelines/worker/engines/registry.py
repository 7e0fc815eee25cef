"""Registry: every engine by name, opened lazily.

A name is model@runtime-precision. Knowing an engine costs nothing; its runtime is imported only when it is
opened, and a missing one is one sentence with the install command. The shipped engines are in ENGINES; an engine
`<anything>@vllm...` or `<anything>@transformers...` is whatever checkpoint was described under that name in the model cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from fabric_pipelines import models
from fabric_pipelines.errors import UsageError
from fabric_pipelines.ids import digest
from fabric_pipelines.worker.engines.checkpoint import checkpoint_folder
from fabric_pipelines.worker.engines.door import Engine
from fabric_pipelines.worker.engines.opening import EngineFolder, read_folder
from fabric_pipelines.worker.engines.plans import plan_folder
from fabric_pipelines.worker.engines.sampling import SAMPLING_KEYS


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """kinds: sampling kinds it serves; vocab_size: token ids are below it; extra: what `pip install
    fabric-pipelines[extra]` brings; dim: of one layer's vector, 0 for generation; layers: last layer number
    that `hidden` may ask for, 0 otherwise; device: "cpu" or "cuda"; generate_keys: fields of its sampling."""

    name: str
    model: str
    part: str
    kinds: frozenset[str]
    vocab_size: int
    extra: str
    dim: int
    layers: int
    device: str
    build: Callable[[str, EngineFolder, int], Engine]
    generate_keys: frozenset[str] = SAMPLING_KEYS


@dataclass(frozen=True, slots=True)
class Opening:
    """How an engine is opened on this machine, never what it answers: threads of a processor, "cpu" or "cuda", and steps
    that vLLM's scheduler runs ahead, None = as its adapter has it."""

    threads: int
    device: str
    steps_ahead: int | None


def _ctranslate2(name: str, folder: EngineFolder, threads: int) -> Engine:
    from fabric_pipelines.worker.engines.ctranslate2 import Ctranslate2Engine

    return Ctranslate2Engine(name, folder, threads)


def _hidden(name: str, folder: EngineFolder, threads: int) -> Engine:
    from fabric_pipelines.worker.engines.onnxruntime import HiddenEngine

    return HiddenEngine(name, folder, threads)


def _embed(name: str, folder: EngineFolder, threads: int) -> Engine:
    from fabric_pipelines.worker.engines.onnxruntime import EmbedEngine

    return EmbedEngine(name, folder, threads)


def _vllm(name: str, folder: EngineFolder, how: Opening) -> Engine:
    from fabric_pipelines.worker.engines.vllm import VllmEngine, VllmOptions

    options = None if how.steps_ahead is None else VllmOptions(steps_ahead=how.steps_ahead)
    return VllmEngine(name, folder, options)


def _transformers(name: str, folder: EngineFolder, how: Opening) -> Engine:
    from fabric_pipelines.worker.engines.transformers import transformers_engine

    return transformers_engine(name, folder, how.threads, how.device)


def _tensorrt_llm(name: str, folder: EngineFolder, how: Opening) -> Engine:
    from fabric_pipelines.worker.engines.tensorrt_llm import TensorRtLlmEngine

    return TensorRtLlmEngine(name, folder)


def _tensorrt(name: str, folder: EngineFolder) -> Engine:
    from fabric_pipelines.worker.engines.tensorrt import TensorRtEngine

    return TensorRtEngine(name, folder)


# Runtimes that open a described checkpoint; an engine `<anything>@<runtime>...` is one of theirs.
CHECKPOINT_ENGINES: Mapping[str, Callable[[str, EngineFolder, Opening], Engine]] = MappingProxyType(
    {"vllm": _vllm, "transformers": _transformers, "tensorrt_llm": _tensorrt_llm}
)


def checkpoint_runtime(name: str) -> str | None:
    """The runtime of an engine that is a described checkpoint, None for one of ENGINES."""
    runtime = name.partition("@")[2].partition("-")[0]
    return runtime if runtime in CHECKPOINT_ENGINES else None


GENERATE = EngineSpec(
    name="smollm2-135m-instruct@ctranslate2-int8",
    model="smollm2-135m-instruct",
    part="ctranslate2-int8",
    kinds=frozenset({"generate"}),
    vocab_size=49_152,
    extra="embedded",
    dim=0,
    layers=0,
    device="cpu",
    build=_ctranslate2,
)
HIDDEN = EngineSpec(
    name="smollm2-135m-instruct@onnxruntime-fp32",
    model="smollm2-135m-instruct",
    part="onnxruntime-fp32",
    kinds=frozenset({"hidden"}),
    vocab_size=49_152,
    extra="embedded",
    dim=576,
    layers=30,
    device="cpu",
    build=_hidden,
)
EMBED = EngineSpec(
    name="all-minilm-l6-v2@onnxruntime-fp32",
    model="all-minilm-l6-v2",
    part="onnxruntime-fp32",
    kinds=frozenset({"embed"}),
    vocab_size=30_522,
    extra="embedded",
    dim=384,
    layers=0,
    device="cpu",
    build=_embed,
)
ENGINES: Mapping[str, EngineSpec] = MappingProxyType(
    {spec.name: spec for spec in (GENERATE, HIDDEN, EMBED)}
)


def plan_runtime(name: str) -> str | None:
    """ "tensorrt" or "tensorrt_rtx" for an engine that is a built plan, else None."""
    runtime = name.partition("@")[2].partition("-")[0]
    return runtime if runtime in ("tensorrt", "tensorrt_rtx") else None


def engine_spec(name: str) -> EngineSpec:
    """The registry's entry; UsageError names the engines that exist."""
    try:
        return ENGINES[name]
    except KeyError:
        raise UsageError(f"engine {name!r} is unknown; known are {', '.join(ENGINES)}") from None


def spec_of(name: str, cache: Path) -> EngineSpec:
    """As engine_spec, also for an engine that was described or built in this cache; its model is the part before
    the "@", which may be none of the catalogue's. UsageError, ModelMissing or ManifestRefused otherwise."""
    runtime = checkpoint_runtime(name) or plan_runtime(name)
    if runtime is None:
        return engine_spec(name)
    folder = read_folder(engine_folder(name, cache))
    engine = construct_engine(name, cache=cache, threads=1)
    layers = folder.facts.get("layers", 0)

    def build(name: str, folder: EngineFolder, threads: int) -> Engine:
        return construct_engine(name, cache=cache, threads=threads)

    return EngineSpec(
        name=name,
        model=name.partition("@")[0],
        part="",
        kinds=engine.capabilities.kinds,
        vocab_size=folder.facts["vocab_size"],
        extra=runtime.replace("_", "-"),
        dim=0,
        layers=layers if isinstance(layers, int) else max(layers),
        device=engine.capabilities.device,
        build=build,
        generate_keys=SAMPLING_KEYS | {"ignore_eos"},
    )


def open_engine(name: str, *, cache: Path, threads: int) -> Engine:
    """An open engine from the model cache; `threads` 0 = all cores this process may use. Raises ModelMissing,
    MissingDependency or ManifestRefused before anything heavy is loaded."""
    engine = construct_engine(name, cache=cache, threads=threads)
    engine.open()
    return engine


def construct_engine(
    name: str, *, cache: Path, threads: int, device: str = "cpu", steps_ahead: int | None = None
) -> Engine:
    """As open_engine, without loading: manifest and fingerprint are known, no device is touched. device: "cpu" or
    "cuda", for engines that run on either; steps_ahead: of vLLM's, which nobody else has."""
    folder = read_folder(engine_folder(name, cache))
    if plan_runtime(name) is not None:
        return _tensorrt(name, folder)
    threads = threads or len(os.sched_getaffinity(0))
    runtime = checkpoint_runtime(name)
    if runtime is not None:
        return CHECKPOINT_ENGINES[runtime](name, folder, Opening(threads, device, steps_ahead))
    return engine_spec(name).build(name, folder, threads)


def judged(name: str, folder: EngineFolder) -> Engine:
    """A checkpoint's engine as its folder would open it, not opened: ManifestRefused for what it does not serve."""
    runtime = checkpoint_runtime(name)
    assert runtime is not None, f"{name} is no described checkpoint"
    return CHECKPOINT_ENGINES[runtime](name, folder, Opening(1, "cpu", None))


def engine_folder(name: str, cache: Path) -> Path:
    """Where the engine lies in the model cache; ModelMissing when it was not built there."""
    if checkpoint_runtime(name) is not None:
        return checkpoint_folder(name, cache)
    if plan_runtime(name) is not None:
        return plan_folder(name, cache)
    spec = engine_spec(name)
    return models.part_folder(spec.model, spec.part, cache)


def engine_identity(name: str) -> str:
    """Hex digest of what pins this engine's answers (source bytes, converter, runtime version), known before
    the model is pulled. Raises MissingDependency when the runtime is not installed."""
    spec = engine_spec(name)
    return digest({"engine": name, "part": models.part_mark(spec.model, spec.part)})
