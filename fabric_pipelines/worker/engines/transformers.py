"""The reference engine: Hugging Face transformers on torch, on any device.

Slower than the others and closest to the source, so it is what the others are compared with. A checkpoint whose
manifest keeps a KV cache generates; one that is `single_pass` gives hidden states and embeddings, sequences end to end
in one row (varlen.py), pooled on the device, no block behind the deepest layer asked for. What the memory of the
device allows is looked up when it opens, and is the engine's own word on the four sizes.
"""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import psutil

from fabric_pipelines import models
from fabric_pipelines.device import calls
from fabric_pipelines.errors import DeviceRefused, ManifestRefused, MissingDependency
from fabric_pipelines.models.facts import RANDOM
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.worker.engines import varlen
from fabric_pipelines.worker.engines.agreement import Told, require_served
from fabric_pipelines.worker.engines.checkpoint import read_config
from fabric_pipelines.worker.engines.cuts import by_length, in_order
from fabric_pipelines.worker.engines.door import Capabilities
from fabric_pipelines.worker.engines.one_thread import OneThread
from fabric_pipelines.worker.engines.opening import EngineFolder, require
from fabric_pipelines.worker.engines.sampling import (
    SAMPLING_KEYS,
    generation_objection,
    is_greedy,
    pass_objection,
    step_seed,
)
from fabric_pipelines.worker.engines.staging import SLOTS, Slot, Staging
from fabric_pipelines.worker.engines.stepping import SteppingEngine
from fabric_pipelines.worker.engines.tasks import Outcome, Task, failed, with_vector

Float32 = npt.NDArray[np.float32]
# Model class -> its trunk. Others may work; these are compared with references.
TRUNKS: Mapping[str, str] = MappingProxyType(
    {
        "LlamaForCausalLM": "LlamaModel",
        "Qwen2ForCausalLM": "Qwen2Model",
        "Qwen3ForCausalLM": "Qwen3Model",
        "BertModel": "BertModel",
    }
)
GENERATE_KEYS = SAMPLING_KEYS | {"ignore_eos"}
# In an engine's name: its blocks go through torch.compile, some tens of seconds at first.
COMPILED = "compiled"
# Of what is free once the weights are there; the rest is for activations and others.
MEMORY_SHARE = 0.5
WINDOW_STEPS = 2
WARM_UP_LENGTH, WARM_UP_LAYERS = 32, 4
# Of pinned memory for results: a larger step brings them in pieces.
RESULT_BYTES_MAX = 64 << 20


def transformers_engine(
    name: str, folder: EngineFolder, threads: int, device: str
) -> TransformersEngine:
    """GenerateEngine or PassEngine, by what the manifest says of the KV cache."""
    single = folder.manifest.kv_quantisation == "single_pass"
    return (PassEngine if single else GenerateEngine)(name, folder, threads, device)


class TransformersEngine(SteppingEngine):
    """What both share: the model, and how it is compared with its manifest. device: "cpu" or "cuda"."""

    cache_word: ClassVar[str]  # of the KV cache, as manifests have it

    def __init__(
        self,
        name: str,
        folder: EngineFolder,
        threads: int,
        device: str,
        kinds: frozenset[str],
        kv_cache_tokens: int,
    ) -> None:
        manifest = folder.manifest
        require_served(manifest, name, runtime="transformers", architectures=TRUNKS)
        super().__init__(
            name,
            manifest,
            folder.fingerprint,
            Capabilities(
                kinds,
                continuous=False,
                packed=True,
                device=device,
                vocab_size=folder.facts["vocab_size"],
                dim=folder.facts.get(
                    "dim", 0
                ),  # not told by folders that were described before it was asked
            ),
            Profile(
                max_batch_size=manifest.max_batch_size,
                max_num_tokens=manifest.max_num_tokens,
                kv_cache_tokens=kv_cache_tokens,
                window_tokens=WINDOW_STEPS * manifest.max_num_tokens,
            ),
        )
        self._folder, self._threads, self._device = folder, threads, device
        self._memory_tokens = 0
        self._attention = varlen.Attention()
        self._model: Any = None
        self._staging: Staging | None = None
        self._torch: Any = None
        self._library: Any = None

    # ---- life

    def _load(self) -> None:
        self._require_files()
        self._torch, self._library = _import()
        if self._device == "cuda" and not self._torch.cuda.is_available():
            raise DeviceRefused(f"{self.name} was asked to run on cuda, and torch finds no device")
        if self._device == "cpu":
            self._torch.set_num_threads(self._threads)
        self._attention.register(self._library, self._torch)
        from safetensors import SafetensorError

        try:
            self._model = self._loaded().eval().requires_grad_(False)
        except (OSError, ValueError, SafetensorError) as fault:
            raise RuntimeError(str(fault)) from fault
        self._memory_tokens = int(MEMORY_SHARE * self._free_bytes()) // self._bytes_per_token()
        self._prepare()

    def _ready(self) -> None:
        """Sized from the profile."""
        limits = self.manifest
        inputs = self._input_bytes(self._step_tokens(), limits.max_batch_size)
        row = self._result_row_bytes()
        results = min(max(row * limits.max_batch_size, row), max(RESULT_BYTES_MAX, row))
        self._staging = Staging(self._torch, self._device, inputs, results)
        if self._device == "cuda":
            self._warm_up()
            self._staging.forget()
            self.stats.device_s, self.stats.device_gaps = 0.0, self._staging.gaps

    def _step_tokens(self) -> int:
        """A head longer than a step goes alone."""
        return max(self.manifest.max_num_tokens, self.manifest.max_input_len)

    @abstractmethod
    def _input_bytes(self, tokens: int, sequences: int) -> list[int]:
        """Most of each input of a step."""

    @abstractmethod
    def _result_row_bytes(self) -> int:
        """What may come back for one task."""

    @abstractmethod
    def _warm_up(self) -> None:
        """On a card, one step of the largest size, so that the library's own pools have grown before the first lease."""

    def _fetched(self, slot: Slot, made: Any) -> npt.NDArray[Any]:
        """`made` [n, width] on this machine; the step's time on the card goes to the counters."""
        assert self._staging is not None, f"{self.name} is not open"
        found = self._staging.fetch(slot, made)
        self.stats.device_s, self.stats.device_gaps = self._staging.device_s, self._staging.gaps
        return found

    def _launched(
        self, arrays: Sequence[npt.NDArray[Any]], work: Callable[[list[Any]], Any]
    ) -> tuple[Slot, Any]:
        """A step is queued: `work` makes its results [n, width] of the arrays on the device."""
        assert self._staging is not None, f"{self.name} is not open"
        with self._torch.inference_mode(), self._staging.stream():
            slot, there = self._staging.put(arrays)
            try:
                made = work(there)
                self._staging.launched(slot, made)
            except BaseException:
                self._staging.withdraw(slot)
                raise
        return slot, made

    def _require_files(self) -> None:
        """All that can be compared before torch is imported and a device is touched."""
        try:
            installed = version("transformers")
        except PackageNotFoundError:
            raise _missing("transformers") from None
        require(self.manifest, "version", f"transformers {installed}", "the installed package")
        config = read_config(self._folder.path)
        require(self.manifest, "architecture", config["architectures"][0], "config.json")
        models.require_whole(self._folder.path)

    @abstractmethod
    def _prepare(self) -> None:
        """What is set up once, on the loaded model."""

    @abstractmethod
    def _class(self) -> tuple[Any, dict[str, Any]]:
        """The library's class to load, and what its constructor must be told."""

    @abstractmethod
    def _bytes_per_token(self) -> int:
        """Memory that one token of a step needs."""

    def _loaded(self) -> Any:
        torch, path = self._torch, str(self._folder.path)
        config = self._library.AutoConfig.from_pretrained(path, local_files_only=True)
        attention = (
            "sdpa" if self.manifest.kv_quantisation != "single_pass" else self._attention.name
        )
        loader, more = self._class()
        if self._folder.facts["weights"] != RANDOM:
            model, found = loader.from_pretrained(
                path,
                config=config,
                dtype="auto",
                attn_implementation=attention,
                local_files_only=True,
                output_loading_info=True,
                **more,
            )
            if found["missing_keys"]:  # the library would draw them at random and go on
                lost = sorted(found["missing_keys"])
                raise RuntimeError(f"the weights lack {len(lost)} tensors, first {lost[0]}")
            return model.to(self._device)
        with torch.random.fork_rng(devices=self._devices()), torch.device(self._device):
            torch.manual_seed(0)
            dtype = config.dtype or torch.float32
            return loader.from_config(config, dtype=dtype, attn_implementation=attention, **more)

    def _devices(self) -> list[int]:
        return [self._torch.cuda.current_device()] if self._device == "cuda" else []

    def _free_bytes(self) -> int:
        if self._device == "cuda":
            free: int = self._torch.cuda.mem_get_info()[0]
            return free
        return int(psutil.virtual_memory().available)

    def _free(self) -> None:
        self._model = self._staging = None
        if self._device == "cuda" and self._torch is not None:
            self._torch.cuda.empty_cache()

    def introspect(self) -> Mapping[str, Told]:
        assert self._model is not None, f"{self.name} is not open"
        trunk = type(self._model.base_model).__name__
        kinds = {str(weight.dtype) for weight in self._model.parameters()}
        narrow = {"int8": "int8", "float8": "fp8"}
        context = self._model.config.max_position_embeddings
        memory = f"the memory of {self._device}"
        longest = min(context, self._memory_tokens)
        model = "the loaded model"
        by_trunk = {trunk: name for name, trunk in TRUNKS.items()}
        return {
            "version": Told(f"transformers {self._library.__version__}", "the library"),
            "architecture": Told(by_trunk.get(trunk, trunk), model),
            "weight_quantisation": Told(
                next(
                    (word for mark, word in narrow.items() if any(mark in k for k in kinds)), "none"
                ),
                model,
            ),
            "kv_quantisation": Told(self.cache_word, model),
            "world_size": Told(len({str(w.device) for w in self._model.parameters()}), model),
            "max_batch_size": Told(self._memory_tokens, memory, at_most=True),
            "max_num_tokens": Told(self._memory_tokens, memory, at_most=True),
            "max_input_len": Told(longest, "context and memory", at_most=True),
            "max_seq_len": Told(longest, "context and memory", at_most=True),
        }


class GenerateEngine(TransformersEngine):
    """`model.generate` on the neighbours in length of the oldest task, padded on the left; what was padded is
    counted. Each step ends with its longest output: there is no refill."""

    cache_word = "none"

    def __init__(self, name: str, folder: EngineFolder, threads: int, device: str) -> None:
        manifest = folder.manifest
        if manifest.architecture == "BertModel":
            raise ManifestRefused(
                f"engine manifest of {name} refused: kv_quantisation is {manifest.kv_quantisation!r}, but "
                "BertModel generates nothing: it must be 'single_pass'",
                ("kv_quantisation",),
            )
        room = manifest.max_batch_size * manifest.max_seq_len
        super().__init__(name, folder, threads, device, frozenset({"generate"}), room)
        self._eos_ids: list[int] = list(folder.facts["eos_ids"])

    def _class(self) -> tuple[Any, dict[str, Any]]:
        return self._library.AutoModelForCausalLM, {}

    def _prepare(self) -> None:
        # Sampling comes from the task alone: what the checkpoint proposes must not fill gaps.
        self._model.generation_config = self._library.GenerationConfig()

    def _bytes_per_token(self) -> int:
        config = self._model.config
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width = config.num_key_value_heads * head
        return int(2 * config.num_hidden_layers * width * self._model.dtype.itemsize)

    def _input_bytes(self, tokens: int, sequences: int) -> list[int]:
        return [8 * tokens, 8 * tokens]  # ids and mask

    def _result_row_bytes(self) -> int:
        return 8 * self.manifest.max_seq_len

    def _warm_up(self) -> None:
        """Nothing: what a generation takes depends on its outputs, which grow as they come."""

    def _objection(self, task: Task) -> str | None:
        return generation_objection(task, self._folder.facts["vocab_size"], GENERATE_KEYS)

    def _cut(self, pending: Sequence[Task]) -> list[Task]:
        oldest = pending[0]
        if oldest.sampling.get("repetition_penalty", 1.0) != 1.0:
            # The library penalises whatever stands in the row, pads too: only equal lengths go together.
            pending = [task for task in pending if task.length == oldest.length]
        return by_length(pending, self._fits)

    def _fits(self, longest: Task, count: int) -> bool:
        return (
            count <= self.profile.max_batch_size
            and count * longest.length <= self.profile.max_num_tokens
            and count * (longest.length + longest.max_new_tokens) <= self._memory_tokens
        )

    def _run(self, tasks: list[Task]) -> list[Outcome]:
        torch, width = self._torch, max(task.length for task in tasks)
        ids = np.zeros((len(tasks), width), np.int64)
        held = np.zeros((len(tasks), width), np.int64)
        for row, task in enumerate(tasks):
            ids[row, width - task.length :] = task.tokens
            held[row, width - task.length :] = 1

        def generate(there: list[Any]) -> Any:
            with calls.engine(), torch.random.fork_rng(devices=self._devices()):
                torch.manual_seed(step_seed(tasks))
                return self._model.generate(
                    there[0], attention_mask=there[1], generation_config=self._generation(tasks[0])
                )

        answers = self._fetched(*self._launched([ids, held], generate))
        computed = sum(task.length for task in tasks)
        self.stats.computed_tokens += computed
        self.stats.padded_tokens += len(tasks) * width - computed
        return [
            self._outcome(task, row[width:], width - task.length)
            for task, row in zip(tasks, answers, strict=True)
        ]

    def _generation(self, task: Task) -> Any:
        """The library's settings of a step; all tasks of a group and cap have the same."""
        sampling = task.sampling
        ends = [] if sampling.get("ignore_eos", False) else self._eos_ids
        chosen: dict[str, Any] = {
            "max_new_tokens": task.max_new_tokens,
            "eos_token_id": ends or None,
            "pad_token_id": ends[0] if ends else 0,
            "repetition_penalty": sampling.get("repetition_penalty", 1.0),
            "do_sample": not is_greedy(sampling),
        }
        if not is_greedy(sampling):
            chosen |= {
                "temperature": sampling["temperature"],
                "top_k": sampling.get("top_k", 0),
                "top_p": sampling.get("top_p", 1.0),
            }
        return self._library.GenerationConfig(**chosen)

    def _outcome(self, task: Task, row: npt.NDArray[np.int64], padded: int) -> Outcome:
        ends = [] if task.sampling.get("ignore_eos", False) else self._eos_ids
        stops = np.flatnonzero(np.isin(row, ends))
        if len(stops):
            output, reason = row[: stops[0]], "stop"
        elif len(row) == task.max_new_tokens:
            output, reason = row, "length"
        else:
            return failed(
                task,
                "EngineFailed",
                f"the library ended after {len(row)} of {task.max_new_tokens} tokens without an end token",
            )
        self.stats.generated_tokens += len(output) + len(stops[:1])
        return Outcome(task, "ok", reason, output=output.astype(np.uint32), padded_tokens=padded)


class PassEngine(TransformersEngine):
    """hidden: the residual stream of declared layers, pooled, layers concatenated; embed: the mean of the model's
    last states, to unit length unless told otherwise."""

    cache_word = "single_pass"

    def __init__(self, name: str, folder: EngineFolder, threads: int, device: str) -> None:
        super().__init__(name, folder, threads, device, frozenset({"hidden", "embed"}), 0)
        self._wide: Any = None
        self._fetcher: OneThread | None = None
        self._busy_until_s = 0.0
        self._compiled = COMPILED in name.partition("@")[2].split("-")

    def _class(self) -> tuple[Any, dict[str, Any]]:
        encoder = self.manifest.architecture == "BertModel"
        return self._library.AutoModel, {"add_pooling_layer": False} if encoder else {}

    def _prepare(self) -> None:
        encoder = getattr(self._model, "encoder", None)
        self._stack, self._stack_name = (encoder, "layer") if encoder else (self._model, "layers")
        self._blocks = getattr(self._stack, self._stack_name)
        self._embedding = self._model.embeddings if encoder else self._model.embed_tokens
        if self._compiled:
            for block in self._blocks:
                block.forward = self._torch.compile(block.forward, dynamic=True)

    def _bytes_per_token(self) -> int:
        """Residual, attention input and output, and the feed-forward's two halves of one block."""
        config = self._model.config
        width = 6 * config.hidden_size + 3 * config.intermediate_size
        return int(width * self._model.dtype.itemsize)

    def _input_bytes(self, tokens: int, sequences: int) -> list[int]:
        return [8 * tokens, 8 * tokens, 4 * (sequences + 1)]  # ids, positions, ends

    def _result_row_bytes(self) -> int:
        return 4 * int(self._model.config.hidden_size) * (len(self._blocks) + 1)

    def _warm_up(self) -> None:
        """As many sequences as the largest step can have, since results grow with those and all else with tokens; then
        one token and every layer, for the pool of small pieces."""
        tokens = self.manifest.max_num_tokens
        count = max(min(self.manifest.max_batch_size, tokens // WARM_UP_LENGTH), 1)
        kind = "embed" if self.manifest.architecture == "BertModel" else "hidden"
        every = list(range(len(self._blocks) + 1))
        for lengths, layers in (([tokens // count] * count, every[-WARM_UP_LAYERS:]), ([1], every)):
            self._vectors([np.zeros(length, np.uint32) for length in lengths],
                          {"kind": kind, "layers": layers, "pooling": "mean"})  # fmt: skip

    def _ready(self) -> None:
        width, config = self._step_tokens(), self._model.config
        if self._model.dtype != self._torch.float32:
            # Means are taken in float32; of all that a step needs of our own it is by far the largest.
            self._wide = self._torch.empty(
                width, config.hidden_size, dtype=self._torch.float32, device=self._device
            )
        super()._ready()
        if self._device == "cuda":
            self._launch_ahead()

    def _launch_ahead(self) -> None:
        self.steps_most = SLOTS
        self._fetcher = OneThread(f"{self.name}-results")

    def _free(self) -> None:
        if self._fetcher is not None:
            self._fetcher.shutdown()
            self._fetcher = None
        self._wide = None
        super()._free()

    def _objection(self, task: Task) -> str | None:
        layers = len(self._blocks)
        return pass_objection(
            task, self.capabilities.kinds, self._folder.facts["vocab_size"], layers
        )

    def _cut(self, pending: Sequence[Task]) -> list[Task]:
        return in_order(
            pending,
            tokens_max=self.profile.max_num_tokens,
            tasks_max=self.profile.max_batch_size,
        )

    def _begin(self, tasks: list[Task], thread: OneThread) -> Future[list[Outcome]]:
        """On a card: launched in the engine's thread while the step before still runs, fetched in another."""
        if self._fetcher is None:
            return super()._begin(tasks, thread)
        launched = thread.submit(self._launch, [task.tokens for task in tasks], tasks[0].sampling)
        return self._fetcher.submit(self._end, tasks, launched, time.perf_counter())

    def _end(
        self, tasks: list[Task], launched: Future[tuple[Slot, Any]], begun_s: float
    ) -> list[Outcome]:
        try:
            vectors = self._fetched(*launched.result())
        finally:
            now = time.perf_counter()  # two steps at once are busy once
            self.stats.busy_s += now - max(begun_s, self._busy_until_s)
            self._busy_until_s = now
        return self._outcomes(tasks, vectors)

    def _run(self, tasks: list[Task]) -> list[Outcome]:
        return self._outcomes(tasks, self.vectors(tasks))

    def _outcomes(self, tasks: Sequence[Task], vectors: Float32) -> list[Outcome]:
        self.stats.computed_tokens += sum(task.length for task in tasks)
        return [with_vector(task, row, 0) for task, row in zip(tasks, vectors, strict=True)]

    def vectors(self, tasks: Sequence[Task]) -> Float32:
        """float32 [tasks, layers x dim], or [tasks, dim] of an embedding; all tasks of one group."""
        return self._vectors([task.tokens for task in tasks], tasks[0].sampling)

    def _vectors(
        self, prompts: Sequence[npt.NDArray[np.uint32]], sampling: Mapping[str, Any]
    ) -> Float32:
        vectors: Float32 = self._fetched(*self._launch(prompts, sampling))
        return vectors

    def _launch(
        self, prompts: Sequence[npt.NDArray[np.uint32]], sampling: Mapping[str, Any]
    ) -> tuple[Slot, Any]:
        lengths = [len(prompt) for prompt in prompts]
        ids = np.concatenate(prompts).astype(np.int64)
        ends, positions = varlen.laid_out(lengths)

        def work(there: list[Any]) -> Any:
            row, positions_there, ends_there = there
            packing = varlen.Packing(tuple(lengths), ends_there, positions_there)
            return (self._hidden if sampling["kind"] == "hidden" else self._embed)(
                row, packing, sampling
            )

        return self._launched([ids[None], positions[None], ends], work)

    def _hidden(self, row: Any, packing: varlen.Packing, sampling: Mapping[str, Any]) -> Any:
        layers: list[int] = list(sampling["layers"])
        pooled: dict[int, Any] = {}
        hooks = [
            (self._blocks[layer - 1] if layer else self._embedding).register_forward_hook(
                self._pooling_into(pooled, layer, packing, sampling["pooling"])
            )
            for layer in set(layers)
        ]
        # Blocks behind the deepest layer are taken out for the pass: nothing asks for them.
        setattr(self._stack, self._stack_name, self._blocks[: max(layers)])
        try:
            self._pass(row, packing)
        finally:
            setattr(self._stack, self._stack_name, self._blocks)
            for hook in hooks:
                hook.remove()
        return self._torch.cat([pooled[layer] for layer in layers], dim=1)

    def _pooling_into(
        self, pooled: dict[int, Any], layer: int, packing: varlen.Packing, how: str
    ) -> Any:
        def keep(module: Any, given: Any, made: Any) -> None:
            states = made[0] if isinstance(made, tuple) else made
            with calls.ours():
                pooled[layer] = self._pool(states[0], packing, how)

        return keep

    def _embed(self, row: Any, packing: varlen.Packing, sampling: Mapping[str, Any]) -> Any:
        means = self._pool(self._pass(row, packing).last_hidden_state[0], packing, "mean")
        if sampling.get("normalise", True):
            means = self._torch.nn.functional.normalize(means, dim=1)
        return means

    def _pass(self, row: Any, packing: varlen.Packing) -> Any:
        """row: ids [1, T] on the device."""
        more = {} if self._stack is not self._model else {"use_cache": False}
        self._attention.packing = packing
        with calls.engine():
            return self._model(input_ids=row, position_ids=packing.positions, **more)

    def _pool(self, states: Any, packing: varlen.Packing, how: str) -> Any:
        """[T, D] -> float32 [n, D], on the device: what leaves it is a row a sequence, not a row a token."""
        ends = packing.ends[1:].long()
        if how == "last":
            return states.index_select(0, ends - 1).float()
        lengths = packing.ends.diff().long()
        wide = states if self._wide is None else self._wide[: len(states)].copy_(states)
        # Adding rows by index would be atomic, and hundreds of tokens meet in one row; unsafe: no check that waits.
        return self._torch.segment_reduce(wide, "mean", lengths=lengths, unsafe=True)


def _missing(package: str) -> MissingDependency:
    return MissingDependency(package, "transformers", "the reference engine")


def _import() -> tuple[Any, Any]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import torch
    except ImportError:
        raise _missing("torch") from None
    try:
        import transformers
    except ImportError:
        raise _missing("transformers") from None
    transformers.logging.disable_progress_bar()  # a worker's stderr is its log
    return torch, transformers
