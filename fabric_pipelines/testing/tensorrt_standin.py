"""A stand-in for TensorRT's Python API, as strict as a contract read from its own wheels; ONNX Runtime computes.

A class here may offer nothing that the contract's class has not, and every call is bound to the contract's signature, so an
adapter that runs on it uses names and parameters that exist. A plan holds the graph itself. It says nothing about
speed, and nothing about what TensorRT makes of a graph: a real builder is asked that elsewhere.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from fabric_pipelines.testing.host_card import HostCard

SEPARATOR = b"\n"


@dataclass
class Faults:
    """What the runtime does wrong. parse_error: what the parser says; refuses_build, refuses_plan, refuses_context:
    None comes back; refuses_steps: execute gives False; deny: name of an engine's fact -> what it says instead;
    used: every class and attribute that was touched."""

    parse_error: str = ""
    refuses_build: bool = False
    refuses_plan: bool = False
    refuses_context: bool = False
    refuses_steps: bool = False
    deny: dict[str, Any] = field(default_factory=dict)
    used: set[tuple[str, str]] = field(default_factory=set)


def signature_of(text: str) -> inspect.Signature | None:
    """Of a pybind docstring, `self` left out; None where it only says *args, an overloaded function."""
    inner = text[text.index("(") + 1 : text.rindex(")")]
    if inner.startswith("*args"):
        return None
    kind = inspect.Parameter
    parameters = []
    for part in _top_level(inner)[1:]:
        name, _, rest = part.partition(":")
        default = kind.empty if "=" not in rest else None
        parameters.append(kind(name.strip(), kind.POSITIONAL_OR_KEYWORD, default=default))
    return inspect.Signature(parameters)


def _top_level(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[(<") - (letter in "])>")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def strict(contract: Mapping[str, Any], used: set[tuple[str, str]]) -> Callable[[type], type]:
    """A class decorator: what the contract's class of that name has not is taken away, calls are bound to it."""

    def check(made: type) -> type:
        facts = contract[made.__name__]
        for name, member in list(vars(made).items()):
            if name.startswith("_") and name != "__init__":
                continue
            if name not in facts:
                delattr(made, name)  # this version has it not
            elif callable(member):
                text = facts[name]
                signature = signature_of(text) if text.startswith(f"{name}(") else None
                setattr(made, name, _bound(member, signature))

        def look(self: Any, name: str) -> Any:
            if not name.startswith("_"):
                if name not in facts:
                    raise AttributeError(f"{made.__name__} has no attribute {name!r}")
                used.add((made.__name__, name))
            return object.__getattribute__(self, name)

        def put(self: Any, name: str, value: Any) -> None:
            if not name.startswith("_"):
                if facts.get(name) != "prop":
                    raise AttributeError(f"{made.__name__} has no attribute {name!r} to set")
                used.add((made.__name__, name))
            object.__setattr__(self, name, value)

        made.__getattribute__ = look  # type: ignore[assignment]
        made.__setattr__ = put  # type: ignore[assignment]
        return made

    return check


def _bound(call: Callable[..., Any], signature: inspect.Signature | None) -> Callable[..., Any]:
    """`call` with its arguments bound as the real signature binds them."""

    @functools.wraps(call)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if signature is not None:
            given = signature.bind(*args, **kwargs)
            return call(self, **given.arguments)
        return call(self, *args, **kwargs)

    return checked


def standin(
    contract: Mapping[str, Any], *, version: str, card: HostCard, faults: Faults
) -> ModuleType:
    """A module for sys.modules. contract: classes of one version, as in tests/contracts/tensorrt.json."""
    trt = ModuleType("tensorrt")
    sealed = strict(contract, faults.used)

    def enum(name: str) -> Any:
        return IntEnum(
            name, {member: number for number, member in enumerate(contract[name]["members"])}
        )

    tensor_mode, data_type = enum("TensorIOMode"), enum("DataType")

    @sealed
    class Logger:
        ERROR = 1
        WARNING = 2

        def __init__(self, min_severity: Any = None) -> None:
            pass

    @sealed
    class IOptimizationProfile:
        def __init__(self) -> None:
            self._shapes: dict[str, list[list[int]]] = {}

        def set_shape(self, input: str, min: Any, opt: Any, max: Any) -> None:
            assert len(min) == len(opt) == len(max) == 1
            assert 1 <= min[0] <= opt[0] <= max[0]
            self._shapes[input] = [list(min), list(opt), list(max)]

    @sealed
    class IBuilderConfig:
        def __init__(self) -> None:
            self._profiles: list[dict[str, list[list[int]]]] = []
            self._targets: dict[int, int] = {}

        def set_memory_pool_limit(self, pool: Any, pool_size: int) -> None:
            assert pool_size > 0

        def add_optimization_profile(self, profile: Any) -> int:
            self._profiles.append(profile._shapes)
            return len(self._profiles) - 1

        def set_compute_capability(self, compute_capability: Any, index: int) -> bool:
            self._targets[index] = int(compute_capability)
            return True

    @sealed
    class INetworkDefinition:
        def __init__(self) -> None:
            self._graph, self._folder = b"", ""
            self.name = ""

    @sealed
    class ParserError:
        def __init__(self, said: str) -> None:
            self._said = said

        def desc(self) -> str:
            return self._said

        def node_name(self) -> str:
            return "matmul_7"

    @sealed
    class OnnxParser:
        def __init__(self, network: Any, logger: Any) -> None:
            self._network = network

        def parse(self, model: bytes, path: str | None = None) -> bool:
            self._network._graph, self._network._folder = bytes(model), str(Path(path or "").parent)
            return not faults.parse_error

        @property
        def num_errors(self) -> int:
            return int(bool(faults.parse_error))

        def get_error(self, index: int) -> Any:
            return ParserError(faults.parse_error)

    @sealed
    class Builder:
        def __init__(self, logger: Any) -> None:
            pass

        def create_network(self, flags: int = 0) -> Any:
            assert flags == 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
            return INetworkDefinition()

        def create_builder_config(self) -> Any:
            return IBuilderConfig()

        def create_optimization_profile(self) -> Any:
            return IOptimizationProfile()

        def build_serialized_network(self, network: Any, config: Any) -> bytes | None:
            if faults.refuses_build:
                return None
            head = {"name": network.name, "folder": network._folder, "profiles": config._profiles}
            return b"".join([json.dumps(head).encode(), SEPARATOR, bytes(network._graph)])

    @sealed
    class ICudaEngine:
        def __init__(self, head: Mapping[str, Any], graph: bytes) -> None:
            self._head, self._session = head, _session(graph, head["folder"])
            given = [(node, tensor_mode.INPUT) for node in self._session.get_inputs()]
            made = [(node, tensor_mode.OUTPUT) for node in self._session.get_outputs()]
            self._tensors = {node.name: (node, mode) for node, mode in given + made}

        @property
        def name(self) -> str:
            return str(faults.deny.get("name", self._head["name"]))

        @property
        def num_io_tensors(self) -> int:
            return len(self._tensors)

        @property
        def num_optimization_profiles(self) -> int:
            return len(self._head["profiles"])

        def get_tensor_name(self, index: int) -> str:
            if index == 0 and "cache" in faults.deny:
                return str(faults.deny["cache"])
            return str(list(self._tensors)[index])

        def get_tensor_mode(self, name: str) -> Any:
            return tensor_mode.INPUT if name not in self._tensors else self._tensors[name][1]

        def get_tensor_shape(self, name: str) -> tuple[int, ...]:
            shape = self._tensors[name][0].shape
            return tuple(size if isinstance(size, int) else -1 for size in shape)

        def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
            shapes = self._head["profiles"][profile_index][name]
            low, best, high = (tuple(shape) for shape in shapes)
            return [low, best, faults.deny.get(f"max {name}", high)]

        def create_execution_context(self) -> Any:
            return None if faults.refuses_context else IExecutionContext(self)

    @sealed
    class IExecutionContext:
        def __init__(self, engine: Any) -> None:
            self._engine, self._profile = engine, -1
            self._shapes: dict[str, tuple[int, ...]] = {}
            self._addresses: dict[str, int] = {}

        def set_tensor_address(self, name: str, memory: int) -> bool:
            self._addresses[name] = int(memory)
            return name in self._engine._tensors

        def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
            card.queue(stream_handle, lambda: None)
            self._profile, self._shapes = profile_index, {}
            return bool(0 <= profile_index < self._engine.num_optimization_profiles)

        def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
            low, _, high = self._engine._head["profiles"][self._profile][name]
            self._shapes[name] = tuple(shape)
            return bool(low[0] <= shape[0] <= high[0])

        def infer_shapes(self) -> list[str]:
            inputs = (node.name for node in self._engine._session.get_inputs())
            return [name for name in inputs if name not in self._shapes]

        def execute_async_v3(self, stream_handle: int) -> bool:
            if faults.refuses_steps or set(self._addresses) != set(self._engine._tensors):
                return False
            session, shapes, places = (
                self._engine._session,
                dict(self._shapes),
                dict(self._addresses),
            )

            def run() -> None:
                feed = {
                    node.name: _read(card, places[node.name], shapes[node.name], node.type)
                    for node in session.get_inputs()
                }
                for node, values in zip(
                    session.get_outputs(), session.run(None, feed), strict=True
                ):
                    card.at(places[node.name], values.nbytes)[:] = values.reshape(-1).view(np.uint8)

            card.queue(stream_handle, run)
            return True

    @sealed
    class Runtime:
        def __init__(self, logger: Any) -> None:
            pass

        @property
        def engine_header_size(self) -> int:
            return 64

        def get_engine_validity(self, buffer: bytes) -> tuple[Any, int]:
            assert len(buffer) == 64
            bad = faults.deny.get("validity", 0)
            return (trt.EngineValidity.INVALID if bad else trt.EngineValidity.VALID), bad

        def deserialize_cuda_engine(self, serialized_engine: bytes) -> Any:
            head, _, graph = bytes(serialized_engine).partition(SEPARATOR)
            return None if faults.refuses_plan else ICudaEngine(json.loads(head), graph)

    for made in (Logger, Builder, OnnxParser, Runtime):
        setattr(trt, made.__name__, made)
    trt.__version__ = version  # type: ignore[attr-defined]
    trt.TensorIOMode, trt.DataType = tensor_mode, data_type  # type: ignore[attr-defined]
    for name in ("NetworkDefinitionCreationFlag", "MemoryPoolType"):
        setattr(trt, name, enum(name))
    for name in ("ComputeCapability", "EngineValidity"):
        if name in contract:
            setattr(trt, name, enum(name))
    if "EngineInvalidityDiagnostics" in contract:
        bits = {m: 1 << n for n, m in enumerate(contract["EngineInvalidityDiagnostics"]["members"])}
        trt.EngineInvalidityDiagnostics = IntEnum("EngineInvalidityDiagnostics", bits)  # type: ignore[attr-defined, misc]
    return trt


def _session(graph: bytes, folder: str) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    return onnxruntime.InferenceSession(graph, options)


def _read(card: HostCard, address: int, shape: tuple[int, ...], kind: str) -> Any:
    dtype = np.dtype(np.int64 if kind == "tensor(int64)" else np.float32)
    size = int(np.prod(shape)) * dtype.itemsize
    return card.at(address, size).view(dtype).reshape(shape).copy()


def facts_of(contracts: Mapping[str, Any], version: str) -> SimpleNamespace:
    """One version out of tests/contracts/tensorrt.json: runtime, version, classes."""
    chosen = contracts["versions"][version]
    return SimpleNamespace(
        runtime=chosen["runtime"], version=chosen["version"], classes=chosen["classes"]
    )
