"""Generation on CUDA through vLLM's offline engine, driven step by step.

Token ids go in and come out, no tokeniser is loaded. vLLM refills per finished request by itself; here each task
becomes a request under its own id, and its end is what vLLM reports: finish reason, tokens, and how many prompt
tokens its prefix cache already held. The manifest is compared with the installed package and the checkpoint's
config before a GPU is touched, and with vLLM's own configuration before the first lease.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from fabric_pipelines import models
from fabric_pipelines.clock import SYSTEM_CLOCK, Clock
from fabric_pipelines.errors import EngineFailed, ManifestRefused, MissingDependency, UsageError
from fabric_pipelines.models.facts import RANDOM
from fabric_pipelines.records.lease import Lease
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.settings import range_of
from fabric_pipelines.worker.engines.agreement import Told, require_agreement, require_served
from fabric_pipelines.worker.engines.by_request import ByRequest
from fabric_pipelines.worker.engines.checkpoint import read_config
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
    oversized,
    refused,
    tasks_of,
)
from fabric_pipelines.worker.engines.vllm_driver import Answer, Driver, Request

KEYS = SAMPLING_KEYS | {"ignore_eos"}
SHUTDOWN_S = 10.0
GROUPS = 32  # of a batch: its places stand empty for half a group on average, 1.6 %
WINDOW_STEPS = 8  # supply beside the engine, in full steps of tokens
GRAPH_SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 512, 32))
GRAPH_STEP = 64  # between sizes from 512 on: a step is padded to the next one
AHEAD = "fabric_pipelines.worker.engines.vllm_ahead"  # imported by vLLM's own process, never here
STEPS_AHEAD = "fabric_steps_ahead"  # as vllm_ahead reads it
STEPS_AHEAD_RANGE = range_of("steps_ahead")
GRAPHS_MOST = (
    1024  # tokens; a larger step runs so long on the card that its launches hide behind it
)
# vLLM's words for what a manifest says in its own.
WEIGHTS: Mapping[str | None, str] = MappingProxyType(
    {
        None: "none",
        "fp8": "fp8",
        "fp8_per_tensor": "fp8",
        "awq": "int4_awq",
        "auto_awq": "int4_awq",
        "awq_marlin": "int4_awq",
        "gptq": "int4_gptq",
        "auto_gptq": "int4_gptq",
        "gptq_marlin": "int4_gptq",
        "modelopt_fp4": "nvfp4",
        "modelopt_mixed": "mixed_precision",
    }
)
CACHE: Mapping[str, str] = MappingProxyType(
    {
        "auto": "none",
        "float16": "none",
        "bfloat16": "none",
        "fp8": "fp8",
        "fp8_e4m3": "fp8",
        "fp8_e5m2": "fp8",
        "nvfp4": "nvfp4",
    }
)
ENVIRONMENT = (
    ("VLLM_NO_USAGE_STATS", "1"),
    ("VLLM_LOGGING_STREAM", "ext://sys.stderr"),  # stdout is the worker's report
    ("VLLM_LOGGING_LEVEL", "WARNING"),
    ("VLLM_USE_FLASHINFER_SAMPLER", "0"),  # it compiles at first use, and gains nothing when greedy
    ("VLLM_ENABLE_V1_MULTIPROCESSING", "1"),  # its scheduler must not share our interpreter lock
    ("VLLM_WORKER_MULTIPROC_METHOD", "spawn"),  # we have threads, perhaps CUDA: no fork survives
    ("HF_HUB_OFFLINE", "1"),
)


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """What changes speed and memory, never meaning. kv_blocks: cap of the KV cache, None = what fits;
        eager: no compilation and no graphs (fast to open, slow to run); profiles: folder for traces of vLLM's torch
        profiler (`llm.start_profile`), None = it is not there; group: places that must be free before requests are added (see
        vllm_driver), None = a thirty-second of the batch; steps_ahead: how far its scheduler may run ahead of the card, 1 = as vLLM
    has it; whole_answers: tokens are told at a sequence's end instead of one by one (both: see vllm_ahead)."""

    gpu_memory_share: float = 0.9
    kv_blocks: int | None = None
    prefix_caching: bool = True
    eager: bool = False
    profiles: Path | None = None
    group: int | None = None
    steps_ahead: int = 2
    whole_answers: bool = True

    def __post_init__(self) -> None:
        if self.steps_ahead not in STEPS_AHEAD_RANGE:
            raise UsageError(
                f"steps_ahead of vLLM is {self.steps_ahead!r}; it must be {STEPS_AHEAD_RANGE}"
            )


def graph_sizes(sequences: int) -> list[int]:
    """Token counts of the steps that are captured as CUDA graphs: up to a full batch that only decodes. vLLM itself stops at
    512; a batch of 1,024 that only decodes (a run's beginning and end) then leaves the card waiting for launches."""
    most = min(sequences, GRAPHS_MOST)
    return sorted(
        {*(size for size in (*GRAPH_SIZES, *range(512, most, GRAPH_STEP)) if size < most), most}
    )


class VllmEngine(ByRequest[Driver]):
    """See the module. `llm` is vLLM's own object once open, for parity checks and baselines."""

    def __init__(
        self,
        name: str,
        folder: EngineFolder,
        options: VllmOptions | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        require_served(folder.manifest, name, runtime="vllm")
        self.name = name
        self.manifest = folder.manifest
        self.fingerprint = folder.fingerprint
        self.capabilities = Capabilities(
            frozenset({"generate"}),
            continuous=True,
            packed=True,
            device="cuda",
            vocab_size=folder.facts["vocab_size"],
        )
        self.profile = self._profile(kv_cache_tokens=folder.manifest.max_seq_len)
        self.llm: Any = None
        self._folder, self._options, self._clock = folder, options or VllmOptions(), clock
        self.stats = EngineStats()
        self.stats.extra["steps_ahead"] = float(self._options.steps_ahead)
        self._eos_ids: list[int] = list(folder.facts["eos_ids"])
        self._outbox = Outbox(name, self.fingerprint)
        self._driver: Driver | None = None
        self._runtime: Any = None

    def _profile(self, *, kv_cache_tokens: int) -> Profile:
        limits = self.manifest
        return Profile(
            max_batch_size=limits.max_batch_size,
            max_num_tokens=limits.max_num_tokens,
            kv_cache_tokens=kv_cache_tokens,
            window_tokens=WINDOW_STEPS * limits.max_num_tokens,
        )

    # ---- life

    def open(self) -> None:
        if self._driver is not None:
            return
        self._require_files()
        self._runtime = _import()
        try:
            self.llm = self._runtime.LLM(**self._arguments())
        except Exception as fault:
            raise EngineFailed(f"{self.name} cannot be loaded by vLLM: {told(fault)}") from fault
        try:
            require_agreement(self.manifest, self.name, self.introspect())
        except ManifestRefused:
            self._shut()
            raise
        cache = self.llm.llm_engine.vllm_config.cache_config
        blocks, size = cache.num_gpu_blocks, cache.block_size
        self.profile = self._profile(kv_cache_tokens=blocks * size)
        self.stats.extra["kv_cache_tokens"] = float(blocks * size)
        core = self.llm.llm_engine.engine_core
        self._driver = Driver(
            self.llm.llm_engine,
            self.name,
            prompt_of=self._runtime.inputs.tokens_input,
            is_dead=lambda: bool(core.resources.engine_dead),
            clock=self._clock,
            places=self.profile.max_batch_size,
            group=self._options.group or max(self.profile.max_batch_size // GROUPS, 1),
        )

    def _require_files(self) -> None:
        """All that can be compared without a GPU, vLLM itself included: only its metadata is read."""
        try:
            installed = version("vllm")
        except PackageNotFoundError:
            raise _missing() from None
        require(self.manifest, "version", f"vllm {installed}", "the installed package")
        config = read_config(self._folder.path)
        require(self.manifest, "architecture", config["architectures"][0], "config.json")
        models.require_whole(self._folder.path)  # the fingerprint speaks of these bytes

    def _arguments(self) -> dict[str, Any]:
        limits, options = self.manifest, self._options
        quantised_already = "quantization_config" in read_config(self._folder.path)
        extra: dict[str, Any] = {}
        if not options.eager:
            sizes = graph_sizes(limits.max_batch_size)
            extra["compilation_config"] = {"cudagraph_capture_sizes": sizes}
        if options.profiles is not None:
            extra["profiler_config"] = {
                "profiler": "torch",
                "torch_profiler_dir": str(options.profiles),
                "torch_profiler_with_stack": False,
                "ignore_frontend": True,
            }
        if options.steps_ahead > 1:
            extra["worker_extension_cls"] = f"{AHEAD}.Ahead"
            extra["additional_config"] = {STEPS_AHEAD: options.steps_ahead}
        if options.whole_answers:
            extra["scheduler_cls"] = f"{AHEAD}.WholeAnswers"
        return {
            "model": str(self._folder.path),
            "skip_tokenizer_init": True,
            "load_format": "dummy" if self._folder.facts["weights"] == RANDOM else "safetensors",
            # A checkpoint that is quantised says so itself; fp8 is made from bf16 weights at load.
            "quantization": None
            if quantised_already or limits.weight_quantisation == "none"
            else limits.weight_quantisation,
            "kv_cache_dtype": "auto"
            if limits.kv_quantisation == "none"
            else limits.kv_quantisation,
            "tensor_parallel_size": limits.world_size,
            "max_num_seqs": limits.max_batch_size,
            "max_num_batched_tokens": limits.max_num_tokens,
            "max_model_len": limits.max_seq_len,
            "gpu_memory_utilization": options.gpu_memory_share,
            "num_gpu_blocks_override": options.kv_blocks,
            "enable_prefix_caching": options.prefix_caching,
            "enforce_eager": options.eager,
            "disable_log_stats": True,
            "generation_config": "vllm",  # sampling comes from the task alone
            **extra,
        }

    def introspect(self) -> Mapping[str, Told]:
        found = self.llm.llm_engine.vllm_config
        weights = found.model_config.quantization
        cache = found.cache_config.cache_dtype
        longest = found.model_config.max_model_len
        exact: dict[str, Any] = {
            "version": f"vllm {self._runtime.__version__}",
            "architecture": found.model_config.architectures[0],
            "weight_quantisation": WEIGHTS.get(weights, weights),
            "kv_quantisation": CACHE.get(cache, cache),
            "world_size": found.parallel_config.world_size,
            "max_batch_size": found.scheduler_config.max_num_seqs,
            "max_num_tokens": found.scheduler_config.max_num_batched_tokens,
            "max_seq_len": longest,
        }
        return {
            **{name: Told(value, "vLLM") for name, value in exact.items()},
            # A prompt of max_model_len leaves no room for one token of output.
            "max_input_len": Told(longest - 1, "vLLM", at_most=True),
        }

    def close(self) -> None:
        if self._driver is not None:
            self._driver.close()
            self._driver = None
            self._shut()

    def _shut(self) -> None:
        self.llm.llm_engine.engine_core.shutdown(timeout=SHUTDOWN_S)
        self.llm = None

    # ---- work

    def submit(self, lease: Lease) -> None:
        driver = self._opened()
        requests: list[Request] = []
        for task in tasks_of(lease):
            self.stats.offered_tokens += task.length
            refusal = oversized(task, self.manifest, self.name)
            if refusal is None:
                try:
                    requests.append(Request(task, self._params(task)))
                    continue
                except ValueError as fault:
                    refusal = refused(task, "error", "UsageError", str(fault))
                except Exception as fault:  # noqa: BLE001 - whatever vLLM makes of a task's fields, it is this task's
                    refusal = refused(task, "error", "UsageError", told(fault))
            refusal.started_us = refusal.ended_us = self._clock.wall_us()
            self._outbox.outcomes.append(refusal)
        driver.add(requests)

    def _params(self, task: Task) -> Any:
        """vLLM's parameters of one task; ValueError when this engine or vLLM does not serve them."""
        sampling = task.sampling
        objection = generation_objection(task, self._folder.facts["vocab_size"], KEYS)
        if objection is not None:
            raise ValueError(objection)
        greedy = is_greedy(sampling)
        return self._runtime.SamplingParams(
            max_tokens=task.max_new_tokens,
            temperature=0.0 if greedy else sampling["temperature"],
            top_k=0 if greedy else sampling.get("top_k", 0),
            top_p=1.0 if greedy else sampling.get("top_p", 1.0),
            repetition_penalty=sampling.get("repetition_penalty", 1.0),
            seed=None if greedy else request_seed(task),
            # Without a tokeniser vLLM knows no end token, so the checkpoint's own are named here.
            ignore_eos=True,
            stop_token_ids=[] if sampling.get("ignore_eos", False) else self._eos_ids,
            detokenize=False,
            output_kind=self._runtime.sampling_params.RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # this object serves one request only
        )

    def poll(self, timeout_s: float) -> list[pa.RecordBatch]:
        batches = super().poll(timeout_s)
        self.stats.extra["steps"] = float(self._opened().steps)
        return batches

    def _judge(self, answer: Answer) -> Outcome:
        task = answer.request.task
        if answer.output is None:
            return refused(task, "error", "UsageError", answer.refusal)
        (completion,) = answer.output.outputs
        ids, reason = list(completion.token_ids), completion.finish_reason
        reused = answer.output.num_cached_tokens or 0
        self.stats.reused_tokens += reused
        self.stats.computed_tokens += task.length - reused
        self.stats.generated_tokens += len(ids)
        if reason == "stop" and ids and ids[-1] in self._eos_ids:
            ids.pop()
        elif reason != "length":
            return failed(task, "EngineFailed", f"vLLM ended the request with {reason!r}")
        return Outcome(task, "ok", reason, output=np.array(ids, np.uint32))

    @property
    def inside(self) -> int:
        """Requests that vLLM holds now, running or waiting."""
        return self._opened().inside

    @property
    def feeding(self) -> tuple[int, int]:
        """(requests that vLLM is given at once, how many of them must have ended before more are added)."""
        driver = self._opened()
        return driver.places, driver.group

    def feed_in_groups(self, places: int, group: int) -> None:
        """From now on; for measurements that compare."""
        driver = self._opened()
        driver.places, driver.group = places, group


def _missing() -> MissingDependency:
    return MissingDependency("vllm", "vllm", "generation on CUDA")


def _import() -> Any:
    for name, value in ENVIRONMENT:
        os.environ.setdefault(name, value)
    try:
        import vllm
        import vllm.inputs
        import vllm.sampling_params
    except ImportError:
        raise _missing() from None
    return vllm
