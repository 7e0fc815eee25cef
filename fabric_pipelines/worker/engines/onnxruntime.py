"""Hidden states and embeddings on CPU through ONNX Runtime, over the trunks that `models` builds.

A hidden-state step packs sequences end to end up to the token budget: nothing is padded. An embedding step
takes rows of like length, one sequence a row, since 12 heads over one long packed row would cost more than
the few pads of a shape-pure lane. Vectors are pooled here and leave as fp16.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.errors import MissingDependency
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.worker.engines.door import Capabilities
from fabric_pipelines.worker.engines.opening import EngineFolder, require
from fabric_pipelines.worker.engines.stepping import SteppingEngine
from fabric_pipelines.worker.engines.tasks import Outcome, Task, with_vector

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
STEP_TOKENS = (
    512  # attention over a packed step is O(T^2): beyond 512 it costs more than it saves on CPU
)


class OnnxRuntimeEngine(SteppingEngine):
    """What hidden and embed share: session, budget, and the cut."""

    kind: str

    def __init__(self, name: str, folder: EngineFolder, threads: int) -> None:
        manifest = folder.manifest
        super().__init__(
            name,
            manifest,
            folder.fingerprint,
            Capabilities(frozenset({self.kind}), continuous=False, packed=True, device="cpu"),
            Profile(
                max_batch_size=manifest.max_batch_size,
                max_num_tokens=min(STEP_TOKENS, manifest.max_num_tokens),
                kv_cache_tokens=0,
                window_tokens=4 * STEP_TOKENS,
            ),
        )
        self._folder, self._threads = folder, threads
        self._session: Any = None

    def _load(self) -> None:
        self._runtime = _import()
        require(self.manifest, "version", f"onnxruntime {self._runtime.__version__}", "the runtime")
        self._session = _open_session(self._runtime, self._folder, self._threads)

    def _free(self) -> None:
        self._session = None

    def _objection(self, task: Task) -> str | None:
        if task.max_new_tokens:
            return f"max_new_tokens is {task.max_new_tokens}; a single pass generates nothing"
        if int(task.tokens.max()) >= self._folder.facts["vocab_size"]:
            return f"token id {int(task.tokens.max())} is beyond the vocabulary"
        if task.sampling.get("kind") != self.kind:
            return f"kind {task.sampling.get('kind')!r} is not served here, only {self.kind!r}"
        return self._sampling_objection(task.sampling)

    @abstractmethod
    def _sampling_objection(self, sampling: Mapping[str, Any]) -> str | None:
        """Why the fields besides `kind` cannot be served, or None."""

    def _cut(self, pending: Sequence[Task]) -> list[Task]:
        """Oldest first, within the budget; the head goes even when it alone is above it."""
        head = pending[0]
        taken, tokens = [head], head.length
        for task in pending[1:]:
            if task.group != head.group:
                continue
            tokens += task.length
            if tokens > self.profile.max_num_tokens or len(taken) == self.profile.max_batch_size:
                break
            taken.append(task)
        return taken


class HiddenEngine(OnnxRuntimeEngine):
    """Residual stream of declared layers, pooled per sequence, layers concatenated."""

    kind = "hidden"

    def _sampling_objection(self, sampling: Mapping[str, Any]) -> str | None:
        layers = sampling.get("layers")
        last = self._folder.facts["layers"]
        if not isinstance(layers, list | tuple) or not layers:
            return "sampling field layers must be a list of layer numbers"
        wrong = [
            n for n in layers if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= last
        ]
        if wrong:
            return f"layers {wrong} do not exist; they go from 0 to {last}"
        if sampling.get("pooling") not in ("last", "mean"):
            return f"pooling {sampling.get('pooling')!r} is neither 'last' nor 'mean'"
        return None

    def _run(self, tasks: list[Task]) -> list[Outcome]:
        lengths = np.array([task.length for task in tasks], np.int64)
        sampling = tasks[0].sampling
        names = [f"hidden_{layer}" for layer in sampling["layers"]]
        distinct = list(dict.fromkeys(names))
        states = dict(
            zip(distinct, self._session.run(distinct, packed(tasks, lengths)), strict=True)
        )
        pool = {"last": pool_last, "mean": pool_mean}[sampling["pooling"]]
        pooled = {name: pool(state, lengths) for name, state in states.items()}
        vectors = np.concatenate([pooled[name] for name in names], axis=1)
        self.stats.computed_tokens += int(lengths.sum())
        return [with_vector(task, row, 0) for task, row in zip(tasks, vectors, strict=True)]


class EmbedEngine(OnnxRuntimeEngine):
    """Mean over a sequence's last hidden states, divided by its length (L2)."""

    kind = "embed"

    def _sampling_objection(self, sampling: Mapping[str, Any]) -> str | None:
        if sampling.get("pooling", "mean") != "mean":
            return (
                f"pooling {sampling['pooling']!r} is not this model's; it was trained with 'mean'"
            )
        if not isinstance(sampling.get("normalise", True), bool):
            return "sampling field normalise must be true or false"
        return None

    def _run(self, tasks: list[Task]) -> list[Outcome]:
        lengths = np.array([task.length for task in tasks], np.int64)
        width = int(lengths.max())
        (states,) = self._session.run(["tokens"], rows(tasks, lengths, width))
        held = np.arange(width) < lengths[:, None]
        vectors = (states * held[:, :, None]).sum(axis=1) / lengths[:, None].astype(np.float32)
        if tasks[0].sampling.get("normalise", True):
            vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        self.stats.computed_tokens += int(lengths.sum())
        self.stats.padded_tokens += int((width - lengths).sum())
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


def _open_session(runtime: Any, folder: EngineFolder, threads: int) -> Any:
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Idle threads must not spin: broker, Postgres and another engine share the machine.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return runtime.InferenceSession(
        str(folder.path / "trunk.onnx"), options, providers=["CPUExecutionProvider"]
    )


def _import() -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise MissingDependency("onnxruntime", "embedded", "single-pass work on CPU") from None
    return onnxruntime
