"""Hidden states on CUDA through TensorRT or TensorRT-RTX, whose Python API is the same. Its speed is not measured by
this project: the libraries are not on the index, and TensorRT-RTX refuses the card that was at hand.

Two slots, each with a stream, an execution context, pinned inputs and outputs and device memory, all allocated when
the engine opens. While one slot computes, the other's inputs are written and copied; results are fetched once an event
behind them has come. No stream is ever waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fabric_pipelines import models
from fabric_pipelines.clock import SYSTEM_CLOCK, Clock
from fabric_pipelines.device import calls
from fabric_pipelines.errors import DeviceRefused, EngineFailed, ManifestRefused
from fabric_pipelines.records.lease import Lease
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.worker.engines.agreement import Told, require_agreement, require_served
from fabric_pipelines.worker.engines.cuts import in_order
from fabric_pipelines.worker.engines.door import Capabilities, EngineStats
from fabric_pipelines.worker.engines.faults import ends_engine, is_judgement, told
from fabric_pipelines.worker.engines.opening import EngineFolder, require
from fabric_pipelines.worker.engines.sampling import pass_objection
from fabric_pipelines.worker.engines.stepping import FAILED_STEPS_MAX
from fabric_pipelines.worker.engines.tasks import (
    Outbox,
    Outcome,
    Task,
    failed,
    refusal_of,
    tasks_of,
    with_vector,
)
from fabric_pipelines.worker.engines.tensorrt_plan import PLAN, ROWS, TOKEN_INPUTS, import_runtime
from fabric_pipelines.worker.engines.transfers import Bytes, CupyTransfers, Event, Stream, Transfers

Float32 = npt.NDArray[np.float32]
SLOTS = 2
POLL_S = 50e-6  # between two looks at an event
INPUT_TYPES: Mapping[str, type[np.generic]] = {
    "ids": np.int64, "seg": np.int64, "pos": np.int64, "weight": np.float32, "rows": np.int64,
}  # fmt: skip


@dataclass(slots=True, eq=False)
class _Slot:
    """inputs, outputs: pinned memory by tensor name; addresses: of the same tensors on the card; settling: a step
    was given up, and what it had queued may still read the inputs."""

    context: Any
    stream: Stream
    event: Event
    inputs: dict[str, Bytes]
    outputs: dict[str, Bytes]
    addresses: dict[str, int]
    profile: int = -1
    settling: bool = False
    tasks: list[Task] = field(default_factory=list)
    started_us: int = 0
    turn: int = 0


class TensorRtEngine:
    """See the module. transfers: what moves tensors; the default needs CuPy and a card."""

    def __init__(
        self,
        name: str,
        folder: EngineFolder,
        transfers: Callable[[], Transfers] = CupyTransfers,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        manifest = folder.manifest
        self.runtime = manifest.version.partition(" ")[0]
        required = "tensorrt_rtx" if self.runtime == "tensorrt_rtx" else "tensorrt"
        require_served(manifest, name, runtime=required, architectures={"LlamaForCausalLM"})
        self.name = name
        self.manifest = manifest
        self.fingerprint = folder.fingerprint
        self.capabilities = Capabilities(
            frozenset({"hidden"}),
            continuous=False,
            packed=True,
            device="cuda",
            dim=folder.facts.get("dim", 0),  # not told by plans that were built before it was asked
        )
        self.profile = Profile(
            max_batch_size=manifest.max_batch_size,
            max_num_tokens=manifest.max_num_tokens,
            kv_cache_tokens=0,
            window_tokens=2 * SLOTS * manifest.max_num_tokens,
        )
        self.stats = EngineStats()
        self._folder, self._transfers_of, self._clock = folder, transfers, clock
        self._layers: list[int] = list(folder.facts["layers"])
        self._ends: list[int] = list(folder.facts["profile_ends"])
        self._transfers: Transfers | None = None
        self._trt: Any = None
        self._engine: Any = None
        self._slots: list[_Slot] = []
        self._pending: list[Task] = []
        self._outbox = Outbox(name, self.fingerprint)
        self._failed_steps = 0
        self._turns = 0
        self._busy_since_s: float | None = None

    # ---- life

    def open(self) -> None:
        if self._engine is not None:
            return
        self._trt = import_runtime(self.runtime)
        found = f"{self.runtime} {self._trt.__version__}"
        require(self.manifest, "version", found, "the runtime")
        models.require_whole(self._folder.path)
        self._transfers = self._transfers_of()
        self._require_card(self._transfers.capability)
        self._engine = self._deserialised()
        try:
            require_agreement(self.manifest, self.name, self.introspect())
        except ManifestRefused:
            self.close()
            raise
        self._slots = [self._slot(self._transfers) for _ in range(SLOTS)]

    def _require_card(self, capability: tuple[int, int]) -> None:
        built: list[str] = self._folder.facts["compute_capabilities"]
        found = f"{capability[0]}.{capability[1]}"
        if found not in built:
            raise DeviceRefused(
                f"{self.name} was built for compute capability {', '.join(built)} and the card has {found}: "
                f"run `fabric engine build {self.name}` on this card"
            )

    def _deserialised(self) -> Any:
        trt = self._trt
        runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
        plan = (self._folder.path / PLAN).read_bytes()
        if hasattr(runtime, "get_engine_validity"):  # TensorRT-RTX says why; the header is enough
            validity, why = runtime.get_engine_validity(plan[: runtime.engine_header_size])
            if validity == trt.EngineValidity.INVALID:
                raise EngineFailed(
                    f"{self.name}: this card or driver cannot run the plan ({_diagnosis(trt, why)})"
                )
        engine = runtime.deserialize_cuda_engine(plan)
        if engine is None:  # no exception comes: the reason is in TensorRT's log
            raise EngineFailed(f"{self.name}: TensorRT could not load the plan; its log says why")
        return engine

    def introspect(self) -> Mapping[str, Told]:
        engine, plan = self._engine, "the plan"
        assert engine is not None, f"{self.name} is not open"
        architecture, _, weights = str(engine.name).partition(" weights=")
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        inputs = {n for n in names if engine.get_tensor_mode(n) == self._trt.TensorIOMode.INPUT}
        profiles = range(engine.num_optimization_profiles)
        most = {
            name: max(int(engine.get_tensor_profile_shape(name, index)[2][0]) for index in profiles)
            for name in ("ids", ROWS)
        }
        cached = inputs - set(INPUT_TYPES)
        return {
            "version": Told(f"{self.runtime} {self._trt.__version__}", "the runtime"),
            "architecture": Told(architecture, plan),
            "weight_quantisation": Told(weights, plan),
            "kv_quantisation": Told("none" if cached else "single_pass", plan),
            "world_size": Told(1, "a plan, which runs on one card,"),
            "max_batch_size": Told(most[ROWS], plan),
            "max_num_tokens": Told(most["ids"], plan),
            "max_input_len": Told(most["ids"], plan, at_most=True),
            "max_seq_len": Told(most["ids"], plan, at_most=True),
        }

    def _slot(self, transfers: Transfers) -> _Slot:
        limits, engine = self.manifest, self._engine
        context = engine.create_execution_context()
        if context is None:
            raise EngineFailed(f"{self.name}: the card has no room for an execution context")
        counts = dict.fromkeys(TOKEN_INPUTS, limits.max_num_tokens) | {ROWS: limits.max_batch_size}
        sizes = {name: counts[name] * np.dtype(INPUT_TYPES[name]).itemsize for name in INPUT_TYPES}
        outputs = {
            name: 4 * limits.max_batch_size * int(engine.get_tensor_shape(name)[1])
            for name in (f"pooled_{layer}" for layer in self._layers)
        }
        stream = transfers.stream()
        slot = _Slot(
            context,
            stream,
            stream.event(),
            {name: transfers.pinned(size) for name, size in sizes.items()},
            {name: transfers.pinned(size) for name, size in outputs.items()},
            {name: transfers.device(size) for name, size in (sizes | outputs).items()},
        )
        for name, address in slot.addresses.items():  # they never change, so they are said once
            if not context.set_tensor_address(name, address):
                raise EngineFailed(f"{self.name}: the plan has no tensor {name}")
        return slot

    def close(self) -> None:
        self._slots = []
        self._engine = None
        if self._transfers is not None:
            self._transfers.close()
            self._transfers = None

    # ---- work

    def submit(self, lease: Lease) -> None:
        assert self._slots, f"{self.name} is not open"
        for task in tasks_of(lease):
            self.stats.offered_tokens += task.length
            refusal = refusal_of(task, self.manifest, self.name, self._objection)
            if refusal is None:
                self._pending.append(task)
            else:
                refusal.started_us = refusal.ended_us = self._clock.wall_us()
                self._outbox.outcomes.append(refusal)

    def _objection(self, task: Task) -> str | None:
        vocab_size = self._folder.facts["vocab_size"]
        objection = pass_objection(task, {"hidden"}, vocab_size, max(self._layers))
        if objection is None:
            absent = [n for n in task.sampling["layers"] if n not in self._layers]
            if absent:
                has = ", ".join(str(layer) for layer in self._layers)
                objection = f"layers {absent} are not in this plan; it was built with {has}"
        return objection

    def poll(self, timeout_s: float) -> list[pa.RecordBatch]:
        assert self._slots, f"{self.name} is not open"
        end = time.monotonic() + timeout_s
        while True:
            self._turn()
            if self._outbox.outcomes or not self._waits() or time.monotonic() >= end:
                return self._outbox.take()
            time.sleep(POLL_S)

    def _waits(self) -> bool:
        return bool(self._pending) or any(slot.tasks for slot in self._slots)

    def _turn(self) -> None:
        """Fill what is free before fetching what is done: the card must not wait for our copies."""
        self._count_busy()
        for slot in self._slots:
            if slot.settling and slot.event.done():
                slot.settling = False
            if not slot.tasks and not slot.settling and self._pending:
                self._start(slot)
        for slot in self._busy():
            if slot.event.done():
                self._collect(slot)

    def _busy(self) -> list[_Slot]:
        """In order of start."""
        return sorted((slot for slot in self._slots if slot.tasks), key=lambda slot: slot.turn)

    def _count_busy(self) -> None:
        """Wall time with work on the card, as seen at the turns; two slots at once count once."""
        now = self._clock.monotonic_s()
        if self._busy_since_s is not None:
            self.stats.busy_s += now - self._busy_since_s
        self._busy_since_s = now if self._busy() else None

    def _start(self, slot: _Slot) -> None:
        tasks = in_order(
            self._pending,
            tokens_max=self.profile.max_num_tokens,
            tasks_max=self.profile.max_batch_size,
        )
        chosen = {id(task) for task in tasks}
        self._pending = [task for task in self._pending if id(task) not in chosen]
        self._turns += 1
        self.stats.add_step(len(tasks), sum(task.length for task in tasks), self.profile)
        slot.tasks, slot.turn, slot.started_us = tasks, self._turns, self._clock.wall_us()
        if self._busy_since_s is None:
            self._busy_since_s = self._clock.monotonic_s()
        try:
            self._enqueue(slot)
        except (
            AssertionError,
            AttributeError,
        ):  # a bug of ours, or a library without a name of its contract
            raise
        except Exception as fault:  # noqa: BLE001 - `faults` tells what it means
            if not ends_engine(fault):
                slot.event.record()
            slot.settling = True
            self._step_failed(slot, fault)

    def _enqueue(self, slot: _Slot) -> None:
        """Everything of a step, on the slot's stream. RuntimeError when TensorRT will not have it."""
        tokens = sum(task.length for task in slot.tasks)
        profile = next(index for index, end in enumerate(self._ends) if tokens <= end)
        context, stream = slot.context, slot.stream
        if profile != slot.profile:
            with calls.engine():
                taken = context.set_optimization_profile_async(profile, stream.handle)
            if not taken:
                raise RuntimeError(f"profile {profile} was refused")
            slot.profile = profile
        for name, values in packed_inputs(slot.tasks).items():
            held = slot.inputs[name][: values.nbytes]
            held.view(values.dtype)[:] = values
            stream.to_device(slot.addresses[name], held)
            if not context.set_input_shape(name, values.shape):
                raise RuntimeError(f"shape {values.shape} of {name} was refused")
        with calls.engine():
            missing = context.infer_shapes()
            if missing:
                raise RuntimeError(f"shapes of {', '.join(missing)} are not known")
            if not context.execute_async_v3(stream.handle):
                raise RuntimeError("the step was not taken")
        for name in self._asked(slot):
            stream.to_host(self._rows(slot, name), slot.addresses[name])
        slot.event.record()

    def _asked(self, slot: _Slot) -> list[str]:
        layers = slot.tasks[0].sampling["layers"]
        return [f"pooled_{layer}" for layer in dict.fromkeys(layers)]

    def _rows(self, slot: _Slot, name: str) -> Bytes:
        width = int(self._engine.get_tensor_shape(name)[1])
        return slot.outputs[name][: 4 * len(slot.tasks) * width]

    def _collect(self, slot: _Slot) -> None:
        tasks, layers = slot.tasks, slot.tasks[0].sampling["layers"]
        states: dict[str, Float32] = {
            name: self._rows(slot, name).view(np.float32).reshape(len(tasks), -1)
            for name in self._asked(slot)
        }
        vectors = np.concatenate([states[f"pooled_{layer}"] for layer in layers], axis=1)
        self._failed_steps = 0
        self.stats.computed_tokens += sum(task.length for task in tasks)
        self._end(
            slot, [with_vector(task, row, 0) for task, row in zip(tasks, vectors, strict=True)]
        )

    def _step_failed(self, slot: _Slot, fault: Exception) -> None:
        if not is_judgement(fault):
            self._failed_steps += 1
            if ends_engine(fault) or self._failed_steps >= FAILED_STEPS_MAX:
                raise EngineFailed(
                    f"{self.name} failed {self._failed_steps} steps in a row, last with: {told(fault)}"
                ) from fault
        self._end(slot, [failed(task, "EngineFailed", told(fault)) for task in slot.tasks])

    def _end(self, slot: _Slot, outcomes: Sequence[Outcome]) -> None:
        ended_us = self._clock.wall_us()
        for outcome in outcomes:
            outcome.started_us, outcome.ended_us = slot.started_us, max(ended_us, slot.started_us)
        self.stats.tasks += len(outcomes)
        self._outbox.outcomes.extend(outcomes)
        slot.tasks = []

    def unfinished(self) -> list[int]:
        running = [task for slot in self._busy() for task in slot.tasks]
        ended = [outcome.task for outcome in self._outbox.outcomes]
        return [task.task_id for task in (*ended, *running, *self._pending)]

    def withdraw_unstarted(self) -> list[int]:
        withdrawn, self._pending = self._pending, []
        return [task.task_id for task in withdrawn]


def packed_inputs(tasks: Sequence[Task]) -> dict[str, npt.NDArray[Any]]:
    """The five inputs of a step, sequences end to end; all tasks pool the same way."""
    lengths = np.array([task.length for task in tasks], np.int64)
    ends = np.cumsum(lengths)
    weight = np.repeat((1.0 / lengths).astype(np.float32), lengths)
    if tasks[0].sampling["pooling"] == "last":
        weight = np.zeros(int(ends[-1]), np.float32)
        weight[ends - 1] = 1.0
    return {
        "ids": np.concatenate([task.tokens for task in tasks]).astype(np.int64),
        "seg": np.repeat(np.arange(len(tasks), dtype=np.int64), lengths),
        "pos": np.arange(int(ends[-1]), dtype=np.int64) - np.repeat(ends - lengths, lengths),
        "weight": weight,
        "rows": np.arange(len(tasks), dtype=np.int64),
    }


def _diagnosis(trt: Any, bits: int) -> str:
    flags = trt.EngineInvalidityDiagnostics.__members__
    named = [name for name, flag in flags.items() if bits & int(flag)]
    return ", ".join(named) or "it gives no reason"
