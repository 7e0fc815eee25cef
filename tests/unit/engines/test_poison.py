"""What a library says of one submission costs that submission alone: the worker and the work beside it go on."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fabric_pipelines.records.lease import Lease
from fabric_pipelines.testing.scripted_broker import ScriptedBroker, ScriptedTask
from fabric_pipelines.worker.engines import ctranslate2
from fabric_pipelines.worker.engines.door import Engine
from fabric_pipelines.worker.engines.faults import ends_engine, is_judgement, told
from fabric_pipelines.worker.engines.sampling import REAL, WHOLE, sampling_objection
from fabric_pipelines.worker.engines.tasks import Task
from fabric_pipelines.worker.loop import Pace, WorkerLoop
from tests.tiny_models import drain, lease_of
from tests.unit.engines.tensorrt_llm_over_standin import TensorRtLlmOverStandin
from tests.unit.engines.vllm_over_standin import VllmOverStandin

GREEDY: dict[str, object] = {"kind": "generate", "temperature": 0.0}
TOP_K: dict[str, object] = {"kind": "generate", "temperature": 1.0, "top_k": 100_000}


class TwoLanes(ScriptedBroker):
    """Thirty tasks of a sampling that is no good, and twenty good ones behind them."""

    def __init__(self, poison: dict[str, object]) -> None:
        lanes = ["poison"] * 30 + ["good"] * 20
        super().__init__([ScriptedTask(n, (5, 6, 7 + n), 4, lane) for n, lane in enumerate(lanes)])
        self.poison = poison

    def lease(self, *, sequences: int, tokens: int, kv_tokens: int | None) -> Lease | None:
        lease = super().lease(sequences=min(sequences, 4), tokens=tokens, kv_tokens=kv_tokens)
        if lease is None:
            return None
        return replace(lease, sampling=self.poison if lease.lane == "poison" else GREEDY)


def _ran(engine: Engine, poison: dict[str, object]) -> list[str]:
    """The status of each task, once a worker has run everything."""
    broker = TwoLanes(poison)
    WorkerLoop(engine, broker, device="cpu:0", wait=time.sleep, pace=Pace(until_idle=True)).run()
    assert not broker.leased
    assert not broker.nacks
    return [str(broker.computed_rows[n]["status"]) for n in range(50)]


def test_a_sampling_that_ctranslate2_throws_out_fails_its_tasks_and_no_worker(
    generate: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judgement before it is taken away: what reaches the library is then whatever nobody thought of."""
    monkeypatch.setattr(ctranslate2, "sampling_objection", lambda sampling: None)
    monkeypatch.setattr(generate, "_objection", lambda task: None)
    assert _ran(generate, TOP_K) == ["failed"] * 30 + ["ok"] * 20


def test_more_candidates_than_words_are_refused_by_ctranslate2_task_by_task(
    generate: Engine,
) -> None:
    assert _ran(generate, TOP_K) == ["refused"] * 30 + ["ok"] * 20
    generate.submit(lease_of([[5]], {**TOP_K, "temperature": 0.0}, new=2))
    assert drain(generate)[0]["status"] == "ok", "a greedy task draws from no candidates"


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("repetition_penalty", (0, 0.0, -1.0, float("nan"), float("inf"), 1e300, "a", None, True)),
        ("top_p", (0.0, 0, -0.1, 1.1, 2.0, float("nan"), "1", None, True, 1e-300)),
        ("top_k", (-1, 1.5, 1.0, 1 << 31, 10**12, "1", None, True)),
        ("temperature", (-1.0, float("nan"), float("inf"), 1e-45, 1e300, None, True, [0])),
        ("seed", (-1, 0.5, 1 << 80, "1", None, True)),
    ],
)
def test_what_no_engine_takes_is_refused_by_its_name(name: str, wrong: tuple[Any, ...]) -> None:
    said = [sampling_objection({"kind": "generate", name: value}) for value in wrong]
    assert all(text and f"sampling field {name} is " in text for text in said), said
    ends = [REAL[name][1]] if name in REAL else list(WHOLE[name])
    assert [sampling_objection({"kind": "generate", name: end}) for end in ends] == [None] * len(
        ends
    )


def test_a_fault_that_says_nothing_of_itself_is_told_by_its_name() -> None:
    assert told(MemoryError()) == "MemoryError"
    assert told(KeyError("x")) == "KeyError: 'x'"
    assert (told(RuntimeError("why")), told(RuntimeError())) == ("why", "RuntimeError")


@pytest.mark.parametrize("fault", [ValueError("x"), TypeError("x"), IndexError("x"), KeyError("x")])
def test_a_librarys_judgement_is_no_end_of_its_engine(fault: Exception) -> None:
    assert is_judgement(fault)
    assert not ends_engine(fault)


@pytest.mark.parametrize(
    ("said", "ends"),
    [
        ("CUDA error: an illegal memory access was encountered", True),
        ("cudaErrorLaunchFailure: unspecified launch failure", True),
        ("CUDA failure 700: an illegal memory access", True),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("cudaErrorMemoryAllocation: out of memory", False),
        ("Executor worker returned error", False),
    ],
)
def test_a_lost_card_ends_its_engine_and_a_full_one_does_not(said: str, ends: bool) -> None:
    assert ends_engine(RuntimeError(said)) is ends
    assert not is_judgement(RuntimeError(said))


def test_whatever_vllm_raises_for_a_request_is_that_request_s_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = VllmOverStandin(tmp_path / "tiny", monkeypatch).open()
    real_add, real_params = engine.llm.llm_engine.add_request, engine._params

    def add(request_id: str, prompt: Any, params: Any) -> str:
        if request_id == "1":
            raise TypeError("no such kind")
        return str(real_add(request_id, prompt, params))

    def params(task: Task) -> Any:
        if task.task_id == 3:
            raise IndexError("no such place")
        return real_params(task)

    monkeypatch.setattr(engine.llm.llm_engine, "add_request", add)
    monkeypatch.setattr(engine, "_params", params)
    engine.submit(lease_of([[1, 2, n + 1] for n in range(5)], GREEDY, new=3))
    rows = drain(engine)
    assert [rows[n]["status"] for n in range(5)] == ["ok", "refused", "ok", "refused", "ok"]
    assert "TypeError: no such kind" in rows[1]["error_text"]
    assert "IndexError: no such place" in rows[3]["error_text"]
    engine.close()


def test_whatever_tensorrt_llm_raises_for_a_request_is_that_request_s_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TensorRtLlmOverStandin(tmp_path / "tiny", monkeypatch).open()
    real_params = engine._params

    def params(task: Task) -> Any:
        if task.task_id % 2:
            raise TypeError("no such kind")
        return real_params(task)

    monkeypatch.setattr(engine, "_params", params)
    engine.submit(lease_of([[1, 2, n + 1] for n in range(10)], GREEDY, new=3))
    rows = drain(engine)
    assert [rows[n]["status"] for n in range(10)] == ["ok", "refused"] * 5
    assert "TypeError: no such kind" in rows[1]["error_text"]
    engine.close()
