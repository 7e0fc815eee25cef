"""Hidden states and embeddings on CPU through ONNX Runtime, over the trunks that `models` builds.

A hidden-state step packs sequences end to end up to the token budget: nothing is padded. An embedding step
takes rows of like length, one sequence a row: 12 heads over one packed row of 512 tokens halve the speed
(1,378 against 3,098 tokens per CPU-second at length 32), while a shape-pure lane hardly pads. Vectors are
pooled here and leave as fp16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fabric_pipelines import models
from fabric_pipelines.errors import MissingDependency
from fabric_pipelines.models.onnx_graph import GraphFacts, graph_facts, truncated
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.worker.engines.agreement import Told, require_served
from fabric_pipelines.worker.engines.cuts import by_length, in_order
from fabric_pipelines.worker.engines.door import Capabilities
from fabric_pipelines.worker.engines.opening import EngineFolder, require
from fabric_pipelines.worker.engines.sampling import pass_objection
from fabric_pipelines.worker.engines.stepping import SteppingEngine
from fabric_pipelines.worker.engines.tasks import Outcome, Task, with_vector

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
GRAPH = "trunk.onnx"
INPUTS = frozenset({"ids", "seg", "pos"})  # more than these would be a cache


class OnnxRuntimeEngine(SteppingEngine):
    """What hidden and embed share: the session, and what they ask of a task."""

    kind: ClassVar[str]
    packs: ClassVar[bool]
    step_tokens: ClassVar[int]
    step_tokens_max: ClassVar[int]
    architecture: ClassVar[str]

    def __init__(self, name: str, folder: EngineFolder, threads: int) -> None:
        manifest = folder.manifest
        require_served(
            manifest, name, runtime="onnxruntime", architectures=frozenset({self.architecture})
        )
        super().__init__(
            name,
            manifest,
            folder.fingerprint,
            Capabilities(
                frozenset({self.kind}),
                continuous=False,
                packed=self.packs,
                device="cpu",
                dim=folder.facts["dim"],
            ),
            Profile(
                max_batch_size=min(self.step_tokens, manifest.max_batch_size),
                max_num_tokens=min(self.step_tokens, manifest.max_num_tokens),
                kv_cache_tokens=0,
                window_tokens=4 * self.step_tokens,
            ),
        )
        self._folder, self._threads = folder, threads
        self._vocab_size: int = folder.facts["vocab_size"]
        self._last_layer: int = folder.facts["layers"]
        self._runtime: Any = None
        self._session: Any = None
        self._graph: GraphFacts | None = None

    def _load(self) -> None:
        self._runtime = _import()
        require(self.manifest, "version", f"onnxruntime {self._runtime.__version__}", "the runtime")
        models.require_whole(self._folder.path)
        self._session = self._open_session(str(self._folder.path / GRAPH))
        self._graph = graph_facts(self._folder.path / GRAPH)
        models.require_facts(self._folder.path, models.contents(self._folder.path), graph=True)

    def introspect(self) -> Mapping[str, Told]:
        graph = self._graph
        assert graph is not None, f"{self.name} is not open"
        cached = sorted({node.name for node in self._session.get_inputs()} - INPUTS)
        memory = "the memory of attention over a step"
        longest = min(graph.context, self.step_tokens_max)
        return {
            "version": Told(f"onnxruntime {self._runtime.__version__}", "the runtime"),
            "architecture": Told(graph.architecture, "the graph"),
            "weight_quantisation": Told(graph.weight_quantisation, "the graph"),
            "kv_quantisation": Told("none" if cached else "single_pass", "the loaded graph"),
            "world_size": Told(len(self._session.get_providers()), "the session"),
            "max_batch_size": Told(self.step_tokens_max, memory, at_most=True),
            "max_num_tokens": Told(self.step_tokens_max, memory, at_most=True),
            "max_input_len": Told(longest, "the graph", at_most=True),
            "max_seq_len": Told(longest, "the graph", at_most=True),
        }

    def _open_session(self, graph: str | bytes) -> Any:
        options = self._runtime.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        for key, value in (
            # Idle threads must not spin: broker, Postgres and another engine share the machine.
            ("session.intra_op.allow_spinning", "0"),
            # A graph given as bytes has no folder of its own to find its weights in.
            ("session.model_external_initializers_file_folder_path", str(self._folder.path)),
        ):
            options.add_session_config_entry(key, value)
        with _faults_as_runtime_errors():
            return self._runtime.InferenceSession(
                graph, options, providers=["CPUExecutionProvider"]
            )

    def _infer(self, outputs: list[str], feed: dict[str, Int64]) -> list[Float32]:
        """One run. A step beyond the budget (one long task) gives its memory back afterwards: attention over
        2,048 tokens takes 0.8 GB more than the usual step, which the arena would keep."""
        options = None
        if feed["ids"].size > self.profile.max_num_tokens:
            options = self._runtime.RunOptions()
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        with _faults_as_runtime_errors():
            states: list[Float32] = self._session.run(outputs, feed, options)
        return states

    def _free(self) -> None:
        self._session = self._graph = None

    def _objection(self, task: Task) -> str | None:
        return pass_objection(task, {self.kind}, self._vocab_size, self._last_layer)


class HiddenEngine(OnnxRuntimeEngine):
    """Residual stream of declared layers, pooled per sequence, layers concatenated. The session ends at the
    deepest layer that the step asks for; another depth opens another session (0.5 s)."""

    kind = "hidden"
    packs = True
    architecture = "LlamaForCausalLM"
    step_tokens_max = 2048  # 9 heads x 2,048^2 floats are 151 MB
    step_tokens = 256  # tokens/cpu-s by step: 128: 430, 256: 411, 512: 318, 1,024: 218, 2,048: 108

    def _load(self) -> None:
        super()._load()
        self._depth: int = self._last_layer

    def _cut(self, pending: Sequence[Task]) -> list[Task]:
        return in_order(
            pending,
            tokens_max=self.profile.max_num_tokens,
            tasks_max=self.profile.max_batch_size,
        )

    def vectors(self, tasks: Sequence[Task]) -> Float32:
        """float32 [tasks, layers x dim]; all tasks of one group."""
        lengths = np.array([task.length for task in tasks], np.int64)
        sampling = tasks[0].sampling
        self._reach(max(sampling["layers"]))
        names = [f"hidden_{layer}" for layer in sampling["layers"]]
        distinct = list(dict.fromkeys(names))
        states = dict(zip(distinct, self._infer(distinct, packed(tasks, lengths)), strict=True))
        pool = {"last": pool_last, "mean": pool_mean}[sampling["pooling"]]
        pooled = {name: pool(state, lengths) for name, state in states.items()}
        return np.concatenate([pooled[name] for name in names], axis=1)

    def _run(self, tasks: list[Task]) -> list[Outcome]:
        vectors = self.vectors(tasks)
        self.stats.computed_tokens += sum(task.length for task in tasks)
        return [with_vector(task, row, 0) for task, row in zip(tasks, vectors, strict=True)]

    def _reach(self, depth: int) -> None:
        """Hold exactly the session that ends at `depth`: blocks behind it are neither loaded nor run."""
        if depth == self._depth:
            return
        self._session = None  # let go first: two sessions at once are 0.9 GB
        graph = truncated(self._folder.path / GRAPH, f"hidden_{depth}")
        self._session = self._open_session(graph)
        self._depth = depth


class EmbedEngine(OnnxRuntimeEngine):
    """Mean over a sequence's last hidden states, divided by its length (L2)."""

    kind = "embed"
    packs = False
    architecture = "BertModel"
    step_tokens_max = 4096  # 8 rows of 512: 12 heads x 8 x 512^2 floats are 101 MB
    step_tokens = 512

    def _cut(self, pending: Sequence[Task]) -> list[Task]:
        return by_length(pending, self._fits)

    def _fits(self, longest: Task, count: int) -> bool:
        return (
            count <= self.profile.max_batch_size
            and count * longest.length <= self.profile.max_num_tokens
        )

    def vectors(self, tasks: Sequence[Task]) -> Float32:
        """float32 [tasks, dim]; all tasks of one group."""
        lengths = np.array([task.length for task in tasks], np.int64)
        width = int(lengths.max())
        (states,) = self._infer(["tokens"], rows(tasks, lengths, width))
        held = np.arange(width) < lengths[:, None]
        sums = (states * held[:, :, None]).sum(axis=1)
        vectors: Float32 = np.divide(sums, lengths[:, None], dtype=np.float32)
        if tasks[0].sampling.get("normalise", True):
            vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors

    def _run(self, tasks: list[Task]) -> list[Outcome]:
        vectors = self.vectors(tasks)
        width = max(task.length for task in tasks)
        self.stats.computed_tokens += sum(task.length for task in tasks)
        self.stats.padded_tokens += sum(width - task.length for task in tasks)
        return [
            with_vector(task, row, width - task.length)
            for task, row in zip(tasks, vectors, strict=True)
        ]


def packed(tasks: Sequence[Task], lengths: Int64) -> dict[str, Int64]:
    """ids[T], seg[T], pos[T] of sequences end to end."""
    starts = np.cumsum(lengths) - lengths
    return {
        "ids": np.concatenate([task.tokens for task in tasks]).astype(np.int64),
        "seg": np.repeat(np.arange(len(tasks), dtype=np.int64), lengths),
        "pos": np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(starts, lengths),
    }


def rows(tasks: Sequence[Task], lengths: Int64, width: int) -> dict[str, Int64]:
    """ids[B, L], seg[B, L], pos[B, L], one sequence a row; pads are a segment of their own (1)."""
    ids = np.zeros((len(tasks), width), np.int64)
    for row, task in zip(ids, tasks, strict=True):
        row[: task.length] = task.tokens
    place = np.broadcast_to(np.arange(width, dtype=np.int64), ids.shape)
    pad = place >= lengths[:, None]
    return {"ids": ids, "seg": pad.astype(np.int64), "pos": np.where(pad, 0, place)}


def pool_last(states: Float32, lengths: Int64) -> Float32:
    """State of each sequence's last token: [T, D] -> [n, D]."""
    return states[np.cumsum(lengths) - 1]


def pool_mean(states: Float32, lengths: Int64) -> Float32:
    """Mean over each sequence: [T, D] -> [n, D]."""
    sums = np.add.reduceat(states, np.cumsum(lengths) - lengths, axis=0)
    return np.divide(sums, lengths[:, None], dtype=np.float32)


@contextmanager
def _faults_as_runtime_errors() -> Iterator[None]:
    """The runtime's exception classes share no base but Exception, and are no RuntimeError."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    try:
        yield
    except state.InvalidArgument as fault:
        raise ValueError(f"{type(fault).__name__}: {fault}") from fault
    except (
        state.Fail,
        state.InvalidGraph,
        state.InvalidProtobuf,
        state.NoSuchFile,
        state.NotImplemented,
        state.RuntimeException,
    ) as fault:
        raise RuntimeError(f"{type(fault).__name__}: {fault}") from fault


def _import() -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise MissingDependency("onnxruntime", "embedded", "single-pass work on CPU") from None
    return onnxruntime
