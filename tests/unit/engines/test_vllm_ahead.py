"""What vLLM's scheduler is made to tell, over stand-ins of the three classes it is made of; the true ones need vLLM (tests/gpu)."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fabric_pipelines.errors import UsageError
from fabric_pipelines.settings import Settings
from fabric_pipelines.worker.engines import registry
from fabric_pipelines.worker.engines import vllm as vllm_engine
from fabric_pipelines.worker.throughput import Throughput
from tests.unit.engines.vllm_over_standin import VllmOverStandin

FINAL, EACH = "final", "cumulative"


@dataclass
class Config:
    depth: int
    additional_config: dict[str, Any] = field(default_factory=dict)

    @property
    def max_concurrent_batches(self) -> int:
        return self.depth


class Scheduler:
    """Answers what a step gives: {request: (tokens, reason or None)}."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = [
            SimpleNamespace(request_id=name, new_token_ids=tokens, finish_reason=reason)
            for name, (tokens, reason) in model_runner_output.items()
        ]
        for name, (_, reason) in model_runner_output.items():
            if reason is not None:
                del self.requests[name]
        return {0: SimpleNamespace(outputs=outputs)}

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        return [(name, 0) for name in request_ids if self.requests.pop(name, None)]


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, told in {
        "vllm.config.vllm": {"VllmConfig": type("VllmConfig", (Config,), {})},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY=FINAL)},
        "vllm.v1.core.sched.async_scheduler": {"AsyncScheduler": Scheduler},
    }.items():
        module = ModuleType(name)
        vars(module).update(told)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, vllm_engine.AHEAD, raising=False)
    yield importlib.import_module(vllm_engine.AHEAD)
    sys.modules.pop(vllm_engine.AHEAD, None)


def request(kind: str = FINAL, **more: Any) -> SimpleNamespace:
    params = {"output_kind": kind, "stop": [], "logprobs": None, "prompt_logprobs": None, **more}
    return SimpleNamespace(sampling_params=SimpleNamespace(**params), resumable=False)


def step(scheduler: Any, given: dict[str, Any]) -> dict[str, list[int]]:
    (message,) = scheduler.update_from_output(None, given).values()
    return {output.request_id: output.new_token_ids for output in message.outputs}


def test_the_first_token_is_told_and_all_others_with_the_end(ahead: Any) -> None:
    scheduler = ahead.WholeAnswers()
    scheduler.requests |= {"a": request(), "b": request()}
    assert step(scheduler, {"a": ([1], None)}) == {"a": [1]}
    assert step(scheduler, {"a": ([2], None), "b": ([7], "length")}) == {"b": [7]}
    assert step(scheduler, {"a": ([3], None)}) == {}
    assert step(scheduler, {"a": ([4], "stop")}) == {"a": [2, 3, 4]}
    assert scheduler._held == {}


@pytest.mark.parametrize(
    "plain",
    [request(EACH), request(stop=["."]), request(logprobs=0), request(prompt_logprobs=1)],
    ids=["each token", "stop string", "logprobs", "prompt logprobs"],
)
def test_who_needs_single_tokens_gets_them(ahead: Any, plain: SimpleNamespace) -> None:
    scheduler = ahead.WholeAnswers()
    scheduler.requests["a"] = plain
    assert [step(scheduler, {"a": ([n], None)}) for n in (1, 2)] == [{"a": [1]}, {"a": [2]}]


def test_an_aborted_request_leaves_nothing_held(ahead: Any) -> None:
    scheduler = ahead.WholeAnswers()
    scheduler.requests["a"] = request()
    step(scheduler, {"a": ([1], None)})
    assert scheduler.finish_requests(["a"], "aborted") == [("a", 0)]
    assert scheduler._held == {}


def test_what_was_held_goes_out_when_holding_ends(ahead: Any) -> None:
    scheduler = ahead.WholeAnswers()
    scheduler.requests["a"] = request()
    step(scheduler, {"a": ([1], None)})
    step(scheduler, {"a": ([2], None)})
    scheduler.holding = False
    assert step(scheduler, {"a": ([3], None)}) == {"a": [2, 3]}
    assert step(scheduler, {"a": ([4], "length")}) == {"a": [4]}


@pytest.mark.parametrize(
    ("depth", "asked", "found"), [(2, {}, 2), (2, {"fabric_steps_ahead": 3}, 4), (1, {"fabric_steps_ahead": 3}, 1)]
)  # fmt: skip
def test_as_many_steps_ahead_as_asked_for_where_vllm_runs_ahead_at_all(
    ahead: Any, depth: int, asked: dict[str, int], found: int
) -> None:
    assert ahead.STEPS_AHEAD == vllm_engine.STEPS_AHEAD
    assert ahead.VllmConfig(depth, asked).max_concurrent_batches == found


def test_vllm_is_asked_for_nothing_of_it_with_its_own_scheduler(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = VllmOverStandin(tmp_path / "tiny", monkeypatch)
    names = {"scheduler_cls", "worker_extension_cls", "additional_config"}
    assert not names & set(made.build(steps_ahead=1, whole_answers=False)._arguments())
    assert made.build()._arguments()["additional_config"] == {vllm_engine.STEPS_AHEAD: 2}
    assert names <= set(made.build()._arguments())


@pytest.mark.parametrize("value", [0, -1, 9, 2.0, True, "3"])
def test_steps_ahead_that_nobody_runs_are_refused_by_name(value: Any) -> None:
    with pytest.raises(UsageError, match=r"steps_ahead of vLLM is .*; it must be a whole number from 1 to 8"):  # fmt: skip
        vllm_engine.VllmOptions(steps_ahead=value)


def test_a_worker_s_steps_ahead_reach_vllm_and_its_counters_and_change_no_fingerprint(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints").mkdir()
    made = VllmOverStandin(tmp_path / "checkpoints" / "tiny@vllm", monkeypatch)
    two, three = (
        registry.construct_engine("tiny@vllm", cache=tmp_path, threads=1, steps_ahead=steps)
        for steps in (None, 3)
    )
    assert isinstance(three, vllm_engine.VllmEngine)
    assert three._arguments()["additional_config"] == {vllm_engine.STEPS_AHEAD: 3}
    assert Throughput().as_json(three.stats, {})["steps_ahead"] == 3
    assert Throughput().as_json(two.stats, {})["steps_ahead"] == 2 == Settings().steps_ahead
    assert two.fingerprint == three.fingerprint == made.build().fingerprint
