"""A stand-in for vLLM: its Python API as a contract states it, strictly, over a scheduler that can be predicted.

Every call is bound to the signature in the contract, every unknown keyword refused as the real one refuses it, every
object has the contract's fields and no others. Tokens follow from the context alone (`next_token`), so results can
be compared; prompts share blocks as in vLLM's prefix cache. It computes nothing and says nothing about speed.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

from fabric_pipelines.testing.contract import Contract

BLOCK = 16


def next_token(context: Sequence[int], vocab_size: int) -> int:
    """Few different ones, so that an end token comes up now and then."""
    return (31 * sum(context) + 7 * len(context)) % 37 % vocab_size


@dataclass
class Faults:
    """`deny`: dotted path in vllm_config -> what it says instead; `die_at_step`: EngineDeadError from that step
    on; `killed`: the process is gone and `step` never returns; `wrong_end`: finish reason given instead of the true
    one; `step_s`: wall seconds of a step."""

    deny: dict[str, Any] = field(default_factory=dict)
    die_at_step: int | None = None
    killed: threading.Event = field(default_factory=threading.Event)
    wrong_end: str | None = None
    step_s: float = 0.0


class EngineDeadError(Exception):
    pass


@dataclass
class _State:
    """vLLM's RequestState, as far as the contract's fields that are used go, and the stand-in's own sequence."""

    external_req_id: str
    is_prefilling: bool
    prompt: list[int]
    params: Any
    output: list[int] = field(default_factory=list)
    cached: int = 0


def standin(facts: Mapping[str, Any], *, vocab_size: int, faults: Faults) -> dict[str, ModuleType]:
    """Modules for sys.modules: vllm, vllm.inputs, vllm.sampling_params."""
    contract = Contract(facts)
    vllm, inputs, sampling = (
        ModuleType(name) for name in ("vllm", "vllm.inputs", "vllm.sampling_params")
    )
    kinds = Enum("RequestOutputKind", facts["enums"]["RequestOutputKind"])  # type: ignore[misc]

    def llm(*args: Any, **kwargs: Any) -> _Llm:
        return _Llm(contract, vocab_size, faults, contract.bind("vllm.LLM", args, kwargs))

    def tokens_input(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"type": "token", **contract.bind("vllm.inputs.tokens_input", args, kwargs)}

    def sampling_params(**fields: Any) -> SimpleNamespace:
        unknown = set(fields) - set(contract.names("SamplingParams"))
        if unknown:
            raise TypeError(f"Unexpected keyword argument '{unknown.pop()}'")
        if not 0.0 <= fields.get("temperature", 1.0) <= 2.0:
            raise ValueError(f"temperature must be in [0, 2], got {fields['temperature']}.")
        return contract.value(
            "SamplingParams", **{"max_tokens": 16, "stop_token_ids": None, **fields}
        )

    sampling.RequestOutputKind = kinds  # type: ignore[attr-defined]
    inputs.tokens_input = tokens_input  # type: ignore[attr-defined]
    vllm.__version__ = contract.version  # type: ignore[attr-defined]
    vllm.LLM, vllm.SamplingParams = llm, sampling_params  # type: ignore[attr-defined]
    vllm.inputs, vllm.sampling_params = inputs, sampling  # type: ignore[attr-defined]
    return {module.__name__: module for module in (vllm, inputs, sampling)}


class _Llm:
    """vllm.LLM. Keywords beyond its own go to EngineArgs, which knows no others."""

    def __init__(
        self, contract: Contract, vocab_size: int, faults: Faults, given: dict[str, Any]
    ) -> None:
        known = {*contract.names("EngineArgs"), *contract.keywords("vllm.LLM")}
        if unknown := set(given) - known:
            raise TypeError(f"EngineArgs.__init__() got an unexpected keyword '{unknown.pop()}'")
        self.llm_engine = _LlmEngine(contract, vocab_size, faults, given)
        self._contract, self._numbers = contract, itertools.count()

    def generate(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The blocking way: everything in, everything out, in order."""
        given = self._contract.bind("vllm.LLM.generate", args, kwargs)
        numbers = []
        for prompt, params in zip(given["prompts"], given["sampling_params"], strict=True):
            numbers.append(str(next(self._numbers)))
            wrapped = {"type": "token", **prompt}
            self.llm_engine.add_request(numbers[-1], wrapped, params)
        outputs: dict[str, Any] = {}
        while self.llm_engine.has_unfinished_requests():
            outputs.update((output.request_id, output) for output in self.llm_engine.step())
        return [outputs[number] for number in numbers]

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        self._contract.bind("vllm.LLM.reset_prefix_cache", args, kwargs)
        self.llm_engine.prefixes.clear()
        return True


class _LlmEngine:
    def __init__(
        self, contract: Contract, vocab_size: int, faults: Faults, given: Mapping[str, Any]
    ) -> None:
        self._contract, self._vocab_size, self._faults = contract, vocab_size, faults
        self._seqs: int = given["max_num_seqs"]
        self._running: list[str] = []
        self._waiting: list[str] = []
        self.prefixes: set[tuple[int, ...]] = set()
        self._marks = itertools.count()
        self.steps = 0
        self.resources = contract.value("BackgroundResources", engine_dead=False)
        contract.value("RequestState", external_req_id="", is_prefilling=True)
        states: dict[str, _State] = {}
        self.output_processor = contract.value("OutputProcessor", request_states=states)
        self._states = states
        self.engine_core = SimpleNamespace(shutdown=self._shutdown, resources=self.resources)
        self.vllm_config = self._config(given)

    def _config(self, given: Mapping[str, Any]) -> SimpleNamespace:
        value = self._contract.value
        kv_blocks = given.get("num_gpu_blocks_override") or 4096
        config = SimpleNamespace(
            model_config=value(
                "ModelConfig",
                quantization=given["quantization"],
                max_model_len=given["max_model_len"],
                architectures=["LlamaForCausalLM"],
            ),
            cache_config=value(
                "CacheConfig",
                cache_dtype=given["kv_cache_dtype"],
                num_gpu_blocks=kv_blocks,
                block_size=BLOCK,
            ),
            scheduler_config=value(
                "SchedulerConfig",
                max_num_seqs=given["max_num_seqs"],
                max_num_batched_tokens=given["max_num_batched_tokens"],
            ),
            parallel_config=value("ParallelConfig", world_size=given["tensor_parallel_size"]),
        )
        for path, told in self._faults.deny.items():
            part, name = path.split(".")
            assert hasattr(getattr(config, part), name), f"vllm_config has no {path}"
            setattr(getattr(config, part), name, told)
        return config

    def add_request(self, *args: Any, **kwargs: Any) -> str:
        given = self._contract.bind("LLMEngine.add_request", args, kwargs)
        request_id, prompt, params = given["request_id"], given["prompt"], given["params"]
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, got {type(request_id)}")
        assert prompt["type"] == "token", "raw prompts are deprecated in vLLM"
        tokens = prompt["prompt_token_ids"]
        assert type(tokens) is list, "prompt_token_ids is a list of int"
        if len(tokens) >= self.vllm_config.model_config.max_model_len:
            raise ValueError(f"The decoder prompt (length {len(tokens)}) is longer than allowed")
        self._require_alive()
        internal = f"{request_id}-{next(self._marks):08x}"
        self._states[internal] = _State(request_id, True, tokens, params)
        self._waiting.append(internal)
        return internal

    def step(self) -> list[Any]:
        assert self._states, "step would block for ever: nothing is unfinished"
        if self._faults.step_s:
            time.sleep(self._faults.step_s)
        self.steps += 1
        if self._faults.killed.is_set():
            self.resources.engine_dead = True
            threading.Event().wait()  # as the real one: it waits for an answer that never comes
        if self._faults.die_at_step is not None and self.steps >= self._faults.die_at_step:
            self.resources.engine_dead = True
        self._require_alive()
        while self._waiting and len(self._running) < self._seqs:
            self._running.append(self._waiting.pop(0))
            self._prefill(self._states[self._running[-1]])
        return [output for name in list(self._running) if (output := self._advance(name))]

    def _prefill(self, state: _State) -> None:
        ends = range(BLOCK, len(state.prompt), BLOCK)
        blocks = [tuple(state.prompt[:end]) for end in ends]
        held = itertools.takewhile(lambda block: block in self.prefixes, blocks)
        state.cached = BLOCK * sum(1 for _ in held)
        self.prefixes.update(blocks)

    def _advance(self, name: str) -> Any:
        state = self._states[name]
        state.is_prefilling = False
        state.output.append(next_token([*state.prompt, *state.output], self._vocab_size))
        if state.output[-1] in (state.params.stop_token_ids or ()):
            return self._end(name, "stop", state.output[-1])
        if len(state.output) >= state.params.max_tokens:
            return self._end(name, "length", None)
        return None

    def _end(self, name: str, reason: str, stop: int | None) -> SimpleNamespace:
        self._running.remove(name)
        state = self._states.pop(name)
        completion = self._contract.value(
            "CompletionOutput",
            index=0,
            text="",
            token_ids=state.output,
            finish_reason=self._faults.wrong_end or reason,
            stop_reason=stop,
        )
        return self._contract.value(
            "RequestOutput",
            request_id=state.external_req_id,
            prompt_token_ids=state.prompt,
            outputs=[completion],
            finished=True,
            num_cached_tokens=state.cached,
        )

    def abort_request(self, *args: Any, **kwargs: Any) -> None:
        given = self._contract.bind("LLMEngine.abort_request", args, kwargs)
        asked = set(given["request_ids"])
        for name in [n for n, state in self._states.items() if state.external_req_id in asked]:
            del self._states[name]
            for queue in (self._running, self._waiting):
                if name in queue:
                    queue.remove(name)

    def has_unfinished_requests(self) -> bool:
        return bool(self._states)

    def get_num_unfinished_requests(self) -> int:
        return len(self._states)

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        self._contract.bind("EngineCoreClient.shutdown", args, kwargs)
        self.resources.engine_dead = True

    def _require_alive(self) -> None:
        if self.resources.engine_dead:
            raise EngineDeadError("EngineCore encountered an issue.")
