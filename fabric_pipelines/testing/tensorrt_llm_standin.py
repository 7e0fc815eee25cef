"""A stand-in for TensorRT-LLM: its Python API as a contract states it, strictly, over answers that can be predicted.

Every call is bound to the contract's names, an unknown keyword is refused as the real one refuses it, every object has the
contract's fields and no others. Results can be awaited only when the request was made inside a running loop, as there.
It computes nothing and says nothing about speed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import ModuleType, SimpleNamespace
from typing import Any

from fabric_pipelines.testing.contract import Contract
from fabric_pipelines.testing.vllm_standin import next_token


@dataclass
class Faults:
    """deny: field of `args` -> what it says instead; broken: every request breaks; break_ids: request numbers that
    break alone; wrong_end: finish reason given instead of the true one ("none" for no reason); refuses: numbers that are
    refused with a ValueError; keep_end: the end token stays in the output; wedged: nothing ever ends; turns: how often a
    request yields before it ends; shut: how often it was shut down."""

    deny: dict[str, Any] = field(default_factory=dict)
    broken: bool = False
    break_ids: frozenset[int] = frozenset()
    wrong_end: str | None = None
    refuses: frozenset[int] = frozenset()
    keep_end: bool = False
    wedged: bool = False
    turns: int = 3
    shut: int = 0
    used: set[str] = field(default_factory=set)


def standin(facts: Mapping[str, Any], *, vocab_size: int, faults: Faults) -> dict[str, ModuleType]:
    """Modules for sys.modules: tensorrt_llm, tensorrt_llm.llmapi, tensorrt_llm._tensorrt_engine."""
    contract = Contract(facts)
    names = ("tensorrt_llm", "tensorrt_llm.llmapi", "tensorrt_llm._tensorrt_engine")
    library, api, engine = (ModuleType(name) for name in names)

    def backend(name: str) -> Any:
        def llm(*args: Any, **kwargs: Any) -> _Llm:
            unknown = set(kwargs) - set(contract.keywords(name))
            if unknown:
                raise ValueError(f"LLM got invalid argument: {unknown.pop()}")
            given = contract.bind(name, args, kwargs)
            faults.used |= {f"{name}.{key}" for key in given}
            return _Llm(contract, vocab_size, faults, given)

        return llm

    def model(name: str) -> Any:
        def make(**kwargs: Any) -> SimpleNamespace:
            unknown = set(kwargs) - set(contract.names(name))
            if unknown:
                raise ValueError(f"{name}: extra inputs are not permitted: {unknown.pop()}")
            faults.used |= {f"{name}.{key}" for key in kwargs}
            return contract.value(name, **kwargs)

        return make

    for module, name in (
        (library, "tensorrt_llm.LLM"),
        (engine, "tensorrt_llm._tensorrt_engine.LLM"),
    ):
        module.LLM = backend(name)  # type: ignore[attr-defined]
    library.__version__ = contract.version  # type: ignore[attr-defined]
    for name in ("SamplingParams", "KvCacheConfig", "SchedulerConfig"):
        setattr(api, name, model(name))
    policies = {name: name for name in facts["enums"]["CapacitySchedulerPolicy"]}
    api.CapacitySchedulerPolicy = StrEnum("CapacitySchedulerPolicy", policies)  # type: ignore[attr-defined, misc]
    return dict(zip(names, (library, api, engine), strict=True))


class _Llm:
    def __init__(
        self, contract: Contract, vocab_size: int, faults: Faults, given: Mapping[str, Any]
    ) -> None:
        self._contract, self._vocab_size, self._faults = contract, vocab_size, faults
        self._count, self._open = 0, True
        told = {
            name: given[name]
            for name in ("max_batch_size", "max_num_tokens", "max_input_len", "max_seq_len")
        }
        world = faults.deny.get("world_size", given["tensor_parallel_size"])
        cache = given["kv_cache_config"]
        cache.dtype = faults.deny.get("kv dtype", getattr(cache, "dtype", "auto"))
        told |= {name: value for name, value in faults.deny.items() if name in told}
        self.args = contract.value(
            "LlmArgs",
            **told,
            kv_cache_config=cache,
            parallel_config=contract.value("ParallelConfig", world_size=world),
        )
        contract.value("LLM", args=self.args)

    def generate_async(self, *args: Any, **kwargs: Any) -> _Future:
        given = self._contract.bind("LLM.generate_async", args, kwargs)
        self._faults.used |= {f"generate_async.{key}" for key in given}
        number, self._count = self._count, self._count + 1
        params = given["sampling_params"]
        if not self._open:
            raise RuntimeError("LLM is shutting down")
        if getattr(params, "end_id", None) is None:
            raise ValueError("The end_id must be set when the tokenizer is skipped")
        tokens = given["inputs"]["prompt_token_ids"]
        assert type(tokens) is list, "prompt_token_ids is a list of int"
        if number in self._faults.refuses:
            raise ValueError(
                "The sum of prompt length and max_tokens should not exceed max_seq_len"
            )
        return _Future(self, number, tokens, params)

    def shutdown(self) -> None:
        self._faults.shut += 1
        self._open = False

    def answer(self, number: int, tokens: list[int], params: Any) -> SimpleNamespace:
        ends = [] if params.ignore_eos else [params.end_id, *(params.stop_token_ids or ())]
        output: list[int] = []
        reason = "length"
        while len(output) < params.max_tokens:
            output.append(next_token([*tokens, *output], self._vocab_size))
            if output[-1] in ends:
                reason = "stop"
                if not self._faults.keep_end:
                    output.pop()
                break
        wrong = self._faults.wrong_end
        completion = self._contract.value(
            "CompletionOutput",
            index=0,
            text="",
            token_ids=output,
            finish_reason=(None if wrong == "none" else wrong) if wrong else reason,
        )
        return self._contract.value(
            "RequestOutput",
            request_id=number,
            prompt=None,
            prompt_token_ids=tokens,
            outputs=[completion],
            finished=True,
        )


class _Future:
    """What generate_async gives: awaited through `aresult`, which needs the loop that was there when it was made."""

    def __init__(self, llm: _Llm, number: int, tokens: list[int], params: Any) -> None:
        self._llm, self._number, self._tokens, self._params = llm, number, tokens, params
        try:
            self._loop: Any = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None

    async def aresult(self) -> SimpleNamespace:
        assert self._loop is asyncio.get_running_loop(), (
            "no event loop was present when it was made"
        )
        faults = self._llm._faults
        for _ in range(faults.turns):
            await asyncio.sleep(0)
        if faults.wedged:
            await asyncio.Event().wait()
        if faults.broken or self._number in faults.break_ids:
            raise RuntimeError("Executor worker returned error")
        return self._llm.answer(self._number, self._tokens, self._params)
