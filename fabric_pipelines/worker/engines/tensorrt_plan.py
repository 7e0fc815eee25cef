"""TensorRT plans: built from the packed ONNX trunk for the lanes in use, one folder a compute capability.

The same file that ONNX Runtime runs is cut behind the deepest chosen layer and pooled inside the graph, so a plan has one
named output a layer, [sequences, dim]. Each lane's full step is the upper end, and the optimum, of an optimisation
profile. TensorRT builds on the card it will run on; TensorRT-RTX builds for named capabilities, also without a card.
Speed of either is not measured by this project.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from fabric_pipelines.errors import (
    DeviceRefused,
    EngineFailed,
    MissingDependency,
    StorageFailed,
    UsageError,
)
from fabric_pipelines.folders import published
from fabric_pipelines.ids import digest
from fabric_pipelines.models.onnx_graph import graph_facts, pooled
from fabric_pipelines.models.sources import sha256_file
from fabric_pipelines.records.manifest import EngineManifest
from fabric_pipelines.worker.engines.opening import publish

PLAN = "plan.engine"
MODULES: Mapping[str, tuple[str, ...]] = {
    "tensorrt": ("tensorrt",),
    # `tensorrt_rtx` is a stub on the index that brings the second.
    "tensorrt_rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings"),
}
WORKSPACE_BYTES = 4 << 30
PROFILES_MAX = 8
NEAR = 1 / 16  # two profiles whose ends are closer than this are one
TOKEN_INPUTS = ("ids", "seg", "pos", "weight")
ROWS = "rows"


@dataclass(frozen=True, slots=True)
class Step:
    """The largest step of a plan: tokens and sequences."""

    tokens: int
    sequences: int


def import_runtime(runtime: str) -> Any:
    """The Python module of "tensorrt" or "tensorrt_rtx"."""
    for name in MODULES[runtime]:
        try:
            return import_module(name)
        except ImportError:
            continue
    raise MissingDependency(MODULES[runtime][-1], runtime.replace("_", "-"), "TensorRT engines")


def profile_ends(lane_lengths: Iterable[int], tokens_max: int) -> list[int]:
    """Upper ends of the optimisation profiles, ascending, the last one `tokens_max`: the full step of each lane (as
    many sequences of its length as fit), then halves down to the shortest lane, for the tail of a run.

    At most PROFILES_MAX; ends nearer than 1/16 are one, the larger."""
    lengths = sorted(set(lane_lengths))
    if not lengths or lengths[0] < 1 or lengths[-1] > tokens_max:
        raise UsageError(f"lanes must be lengths from 1 to {tokens_max}, not {lengths}")
    wanted = {tokens_max, *(tokens_max // length * length for length in lengths)}
    half = tokens_max // 2
    while half >= lengths[0]:
        wanted.add(half)
        half //= 2
    ends: list[int] = []
    for end in sorted(wanted, reverse=True):
        if not ends or end < ends[-1] * (1 - NEAR):
            ends.append(end)
    return sorted(ends[:PROFILES_MAX])


def build_plan(
    trt: Any,
    trunk: Path,
    folder: Path,
    *,
    runtime: str,
    layers: Sequence[int],
    lanes: Iterable[int],
    step: Step,
    vocab_size: int,
    capabilities: Sequence[tuple[int, int]],
) -> EngineManifest:
    """Build the plan, then put it, manifest and contents in the place of what is there, which stays as it is when anything is
    refused. capabilities: the cards it is for; TensorRT takes
    exactly the one of the card at hand. UsageError for layers or sizes that the trunk has not, EngineFailed with
    the parser's or builder's words."""
    facts = graph_facts(trunk)
    known = [name.removeprefix("hidden_") for name in facts.outputs]
    wrong = [layer for layer in layers if str(layer) not in known]
    if wrong or not layers:
        raise UsageError(f"layers {wrong} are not in {trunk.name}; it has {', '.join(known)}")
    if step.tokens > facts.context or not 1 <= step.sequences <= step.tokens:
        raise UsageError(
            f"a step of {step.tokens} tokens and {step.sequences} sequences is impossible: at most "
            f"{facts.context} tokens, and no more sequences than tokens"
        )
    ends = profile_ends(lanes, step.tokens)
    graph = pooled(trunk, layers)
    plan = _built(
        trt, trunk, graph, facts.architecture, facts.weight_quantisation, ends, step, capabilities
    )
    manifest = EngineManifest.from_json(
        {
            "version": f"{runtime} {trt.__version__}",
            "architecture": facts.architecture,
            "weight_quantisation": facts.weight_quantisation,
            "kv_quantisation": "single_pass",
            "world_size": 1,
            "max_batch_size": step.sequences,
            "max_num_tokens": step.tokens,
            "max_input_len": step.tokens,
            "max_seq_len": step.tokens,
        }
    )
    entry = {"size": len(plan), "sha256": hashlib.sha256(plan).hexdigest()}
    described = {
        "weights_sha256": digest({PLAN: entry["sha256"]}),
        "files": {PLAN: entry},
        "facts": {
            "context": facts.context,
            "vocab_size": vocab_size,
            "dim": facts.dim,
            "layers": sorted(set(layers)),
            "profile_ends": ends,
            "compute_capabilities": [f"{major}.{minor}" for major, minor in capabilities],
            "trunk_sha256": sha256_file(trunk),
        },
    }
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with published(folder) as beside:
            (beside / PLAN).write_bytes(plan)
            publish(beside, manifest, described)
    except OSError as fault:
        raise StorageFailed(
            f"the plan {folder} cannot be written ({fault.strerror or fault}): free some space"
        ) from fault
    return manifest


def _built(
    trt: Any,
    trunk: Path,
    graph: bytes,
    architecture: str,
    weights: str,
    ends: Sequence[int],
    step: Step,
    capabilities: Sequence[tuple[int, int]],
) -> bytes:
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    # From TensorRT 11 on a network is always strongly typed, and the flag says nothing new.
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    network.name = network_name(architecture, weights)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(graph, path=str(trunk)):
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        said = "; ".join(f"{error.desc()} (node {error.node_name()})" for error in errors)
        raise EngineFailed(f"TensorRT cannot parse {trunk.name}: {said}")
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, WORKSPACE_BYTES)
    least = 1
    for end in ends:
        profile = builder.create_optimization_profile()
        for name in TOKEN_INPUTS:
            profile.set_shape(name, (least,), (end,), (end,))
        rows = min(step.sequences, end)
        profile.set_shape(ROWS, (1,), (rows,), (rows,))
        config.add_optimization_profile(profile)
        least = end + 1
    _aim(trt, config, capabilities)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise EngineFailed(f"TensorRT could not build {trunk.name}; its log stands above")
    return bytes(plan)


def _aim(trt: Any, config: Any, capabilities: Sequence[tuple[int, int]]) -> None:
    """TensorRT-RTX is told its cards; TensorRT builds for the one at hand."""
    if not hasattr(trt, "ComputeCapability"):
        if len(capabilities) != 1:
            raise UsageError("TensorRT builds for one card, the one it is built on")
        return
    config.num_compute_capabilities = len(capabilities)
    for index, (major, minor) in enumerate(capabilities):
        target = getattr(trt.ComputeCapability, f"SM{major}{minor}", None)
        if target is None or not config.set_compute_capability(target, index):
            raise DeviceRefused(
                f"TensorRT-RTX does not build for compute capability {major}.{minor}"
            )


def network_name(architecture: str, weights: str) -> str:
    """What a plan carries of its model: an opened engine gives it back as its name."""
    return f"{architecture} weights={weights}"
