"""Generation on CUDA through TensorRT-LLM. Its speed is not measured by this project, and no engine of it was run by
it: the package is not on the index.

Token ids in, token ids out; TensorRT-LLM batches in flight and refills per finished request by itself. A folder with a
built engine goes to its TensorRT backend, a Hugging Face checkpoint to its PyTorch backend. Finish reasons are the
library's words; an end without a reason is never counted as done.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any

import numpy as np

from fabric_pipelines import models
from fabric_pipelines.clock import SYSTEM_CLOCK, Clock
from fabric_pipelines.errors import EngineFailed, ManifestRefused, MissingDependency
from fabric_pipelines.records.lease import Lease
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.worker.engines.agreement import Told, require_agreement, require_served
from fabric_pipelines.worker.engines.by_request import ByRequest
from fabric_pipelines.worker.engines.door import Capabilities, EngineStats
from fabric_pipelines.worker.engines.faults import told
from fabric_pipelines.worker.engines.opening import EngineFolder, require
from fabric_pipelines.worker.engines.sampling import (
    SAMPLING_KEYS,
    generation_objection,
    is_greedy,
    request_seed,
)
from fabric_pipelines.worker.engines.tasks import (
    Outbox,
    Outcome,
    Task,
    failed,
    refusal_of,
    refused,
    tasks_of,
)
from fabric_pipelines.worker.engines.tensorrt_llm_driver import Answer, Driver, Request
from fabric_pipelines.worker.engines.tensorrt_llm_folder import (
    built_fields,
    checkpoint_fields,
    is_built,
)

KEYS = SAMPLING_KEYS | {"ignore_eos"}
SHUTDOWN_S = 30.0
WINDOW_STEPS = 8
INSIDE_BATCHES = 2  # requests inside, in full batches: its scheduler needs choice
KV_TYPES: Mapping[str, str] = MappingProxyType({"none": "auto", "fp8": "fp8", "nvfp4": "nvfp4"})
FROM_FOLDER = ("architecture", "weight_quantisation", "kv_quantisation")
SIZES = ("max_batch_size", "max_num_tokens", "max_input_len", "max_seq_len")


@dataclass(frozen=True, slots=True)
class TensorRtLlmOptions:
    """What changes speed and memory, never meaning. kv_cache_tokens: cap of the KV cache, None = what the share of
    free memory gives; policy: of its capacity scheduler, MAX_UTILIZATION when outputs are known to be short."""

    kv_memory_share: float = 0.9
    kv_cache_tokens: int | None = None
    block_reuse: bool = True
    policy: str = "GUARANTEED_NO_EVICT"


class TensorRtLlmEngine(ByRequest[Driver]):
    """See the module. `llm` is the library's own object once open."""

    def __init__(
        self,
        name: str,
        folder: EngineFolder,
        options: TensorRtLlmOptions | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        require_served(folder.manifest, name, runtime="tensorrt_llm")
        limits = folder.manifest
        self.name = name
        self.manifest = limits
        self.fingerprint = folder.fingerprint
        self.capabilities = Capabilities(
            frozenset({"generate"}),
            continuous=True,
            packed=True,
            device="cuda",
            vocab_size=folder.facts["vocab_size"],
        )
        self._folder, self._options, self._clock = folder, options or TensorRtLlmOptions(), clock
        self.profile = Profile(
            max_batch_size=limits.max_batch_size,
            max_num_tokens=limits.max_num_tokens,
            # What a full batch can need at most; a smaller cache is the library's to manage.
            kv_cache_tokens=self._options.kv_cache_tokens
            or limits.max_batch_size * limits.max_seq_len,
            window_tokens=WINDOW_STEPS * limits.max_num_tokens,
        )
        self.stats = EngineStats()
        self.llm: Any = None
        self._eos_ids: list[int] = list(folder.facts["eos_ids"])
        self._outbox = Outbox(name, self.fingerprint)
        self._driver: Driver | None = None
        self._library: Any = None
        self._api: Any = None
        self._said: dict[str, Any] = {}

    # ---- life

    def open(self) -> None:
        if self._driver is not None:
            return
        self._require_files()
        self._library, self._api, backend = _import(built=is_built(self._folder.path))
        try:
            self.llm = backend.LLM(**self._arguments())
        except Exception as fault:
            raise EngineFailed(
                f"{self.name} cannot be loaded by TensorRT-LLM: {told(fault)}"
            ) from fault
        try:
            require_agreement(self.manifest, self.name, self.introspect())
        except ManifestRefused:
            self._shut()
            raise
        self._driver = Driver(
            self._generate,
            self.name,
            inside_max=INSIDE_BATCHES * self.manifest.max_batch_size,
            clock=self._clock,
        )

    def _require_files(self) -> None:
        """All that can be compared before the library is imported: importing it starts MPI and touches a GPU."""
        try:
            installed = version("tensorrt_llm")
        except PackageNotFoundError:
            raise _missing() from None
        require(self.manifest, "version", f"tensorrt_llm {installed}", "the installed package")
        path = self._folder.path
        self._said = built_fields(path) if is_built(path) else checkpoint_fields(path)
        for field, value in self._said.items():
            require(self.manifest, field, value, "the engine's config.json")
        models.require_whole(path)

    def _arguments(self) -> dict[str, Any]:
        limits, options, api = self.manifest, self._options, self._api
        cache: dict[str, Any] = {
            "enable_block_reuse": options.block_reuse,
            "free_gpu_memory_fraction": options.kv_memory_share,
            "max_tokens": options.kv_cache_tokens,
        }
        if not is_built(self._folder.path):  # a built engine has its own, and refuses another
            cache["dtype"] = KV_TYPES.get(limits.kv_quantisation, limits.kv_quantisation)
        policy = getattr(api.CapacitySchedulerPolicy, options.policy)
        return {
            "model": str(self._folder.path),
            "skip_tokenizer_init": True,
            "tensor_parallel_size": limits.world_size,
            "max_beam_width": 1,
            # Without it a prompt beyond max_num_tokens would be refused.
            "enable_chunked_prefill": True,
            "kv_cache_config": api.KvCacheConfig(**cache),
            "scheduler_config": api.SchedulerConfig(capacity_scheduler_policy=policy),
            **{name: getattr(limits, name) for name in SIZES},
        }

    def introspect(self) -> Mapping[str, Told]:
        args, library = self.llm.args, "TensorRT-LLM"
        from_files = {
            name: Told(self._said[name], "config.json")
            for name in FROM_FOLDER
            if name in self._said
        }
        sizes = {name: Told(getattr(args, name), library) for name in SIZES}
        kv = next(
            (word for word, kind in KV_TYPES.items() if kind == args.kv_cache_config.dtype), ""
        )
        return {
            "version": Told(f"tensorrt_llm {self._library.__version__}", "the package"),
            "kv_quantisation": Told(kv, library),
            **from_files,
            "world_size": Told(args.parallel_config.world_size, library),
            **sizes,
        }

    def close(self) -> None:
        if self._driver is not None:
            self._driver.close()
            self._driver = None
            self._shut()

    def _shut(self) -> None:
        """The library's shutdown can hang when a worker of it has died: it gets a thread and a time."""
        ending = threading.Thread(target=self.llm.shutdown, daemon=True)
        ending.start()
        ending.join(SHUTDOWN_S)
        self.llm = None

    # ---- work

    def _generate(self, request: Request) -> Any:
        """In the driver's loop: the library's future-like RequestOutput."""
        return self.llm.generate_async(
            {"prompt_token_ids": request.task.tokens.tolist()},
            sampling_params=request.params,
            streaming=False,
        )

    def submit(self, lease: Lease) -> None:
        driver = self._opened()
        requests: list[Request] = []
        for task in tasks_of(lease):
            self.stats.offered_tokens += task.length
            refusal = refusal_of(task, self.manifest, self.name, self._objection)
            if refusal is None:
                try:
                    requests.append(Request(task, self._params(task)))
                    continue
                except Exception as fault:  # noqa: BLE001 - whatever its fields make of SamplingParams, it is this task's
                    refusal = refused(task, "error", "UsageError", told(fault))
            refusal.started_us = refusal.ended_us = self._clock.wall_us()
            self._outbox.outcomes.append(refusal)
        driver.add(requests)

    def _objection(self, task: Task) -> str | None:
        return generation_objection(task, self._folder.facts["vocab_size"], KEYS)

    def _params(self, task: Task) -> Any:
        sampling, greedy = task.sampling, is_greedy(task.sampling)
        # Without a tokeniser the library knows no end token and insists on one; where none may end it, ignore_eos.
        end = self._eos_ids[0] if self._eos_ids else 0
        chosen: dict[str, Any] = {
            "max_tokens": task.max_new_tokens,
            "end_id": end,
            "pad_id": end,
            "stop_token_ids": self._eos_ids[1:] or None,
            "ignore_eos": bool(sampling.get("ignore_eos", False)) or not self._eos_ids,
            "detokenize": False,
            "repetition_penalty": sampling.get("repetition_penalty"),
        }
        if chosen["ignore_eos"]:
            chosen["stop_token_ids"] = None
        if greedy:
            chosen["top_k"] = 1
        else:
            chosen |= {
                "temperature": sampling["temperature"],
                "top_k": sampling.get("top_k"),
                "top_p": sampling.get("top_p"),
                "seed": request_seed(task),
            }
        return self._api.SamplingParams(**chosen)

    def _judge(self, answer: Answer) -> Outcome:
        task = answer.request.task
        if answer.output is None and answer.refusal:
            return refused(task, "error", "UsageError", answer.refusal)
        if answer.output is None:
            return failed(task, "EngineFailed", answer.fault)
        (completion,) = answer.output.outputs
        ids, reason = list(completion.token_ids), completion.finish_reason
        self.stats.computed_tokens += task.length
        self.stats.generated_tokens += len(ids)
        if reason not in ("stop", "length"):  # timeout, cancelled, or no reason at all
            return failed(task, "EngineFailed", f"TensorRT-LLM ended the request with {reason!r}")
        if reason == "stop" and ids and ids[-1] in self._eos_ids:
            ids.pop()
        return Outcome(task, "ok", reason, output=np.array(ids, np.uint32))


def _missing() -> MissingDependency:
    return MissingDependency("tensorrt_llm", "tensorrt-llm", "generation through TensorRT-LLM")


def _import(*, built: bool) -> tuple[Any, Any, Any]:
    """The package, its llmapi, and the module whose LLM is the backend for this kind of folder."""
    try:
        library = import_module("tensorrt_llm")
        api = import_module("tensorrt_llm.llmapi")
        backend = import_module("tensorrt_llm._tensorrt_engine") if built else library
    except ImportError:
        raise _missing() from None
    return library, api, backend
