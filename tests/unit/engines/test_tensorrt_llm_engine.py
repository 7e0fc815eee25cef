"""The TensorRT-LLM adapter against the API of its 1.2 line: what it asks, what it believes, what it refuses by name.

Proves our half: no TensorRT-LLM engine was run by this project, and no speed is claimed.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fabric_pipelines.clock import SYSTEM_CLOCK
from fabric_pipelines.errors import DigestMismatch, EngineFailed, ManifestRefused, MissingDependency
from fabric_pipelines.records.manifest import EngineManifest
from fabric_pipelines.worker.engines import registry, tensorrt_llm_driver
from fabric_pipelines.worker.engines.tasks import tasks_of
from fabric_pipelines.worker.engines.tensorrt_llm import TensorRtLlmEngine
from fabric_pipelines.worker.engines.tensorrt_llm_driver import Driver, Request
from fabric_pipelines.worker.engines.tensorrt_llm_folder import NINE, describe_built
from tests.engine_conformance import Conformance, Subject
from tests.support import eventually
from tests.tiny_models import drain, lease_of, polled_until_it_fails
from tests.unit.engines.tensorrt_llm_over_standin import (
    BUILT,
    EOS,
    FACTS,
    OTHER_EOS,
    VOCAB,
    TensorRtLlmOverStandin,
    expected,
)
from tests.unit.engines.test_conformance import GREEDY, PROMPTS

FIELDS = tuple(EngineManifest.__dataclass_fields__)
MANY = [[n, n + 1, n + 2] for n in range(10, 40)]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TensorRtLlmOverStandin:
    return TensorRtLlmOverStandin(tmp_path / "tiny", monkeypatch)


class TestTensorRtLlmOverStandin(Conformance):
    @pytest.fixture(params=[True, False], ids=["engine", "checkpoint"])
    def subject(
        self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Subject]:
        made = TensorRtLlmOverStandin(tmp_path / "tiny", monkeypatch, built=request.param)
        engine = made.open()

        def direct(prompts: Sequence[list[int]]) -> list[Any]:
            params = engine._api.SamplingParams(
                max_tokens=6, end_id=EOS, stop_token_ids=[OTHER_EOS], ignore_eos=False
            )
            answers = [engine.llm.answer(-1, prompt, params) for prompt in prompts]
            return [answer.outputs[0].token_ids for answer in answers]

        yield Subject(
            engine,
            GREEDY,
            PROMPTS,
            6,
            direct,
            breaks=lambda: setattr(made.faults, "broken", True),
            oversized=[5] * 101,
            bad_token=VOCAB,
        )
        engine.close()


# ---- the contract


def test_every_name_that_the_adapter_uses_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each parameter it passes is taken out of the contract in turn: the adapter must then be refused."""
    used: set[str] = set()
    for built in (True, False):
        whole = TensorRtLlmOverStandin(tmp_path / f"whole-{built}", monkeypatch, built=built)
        engine = whole.open()
        engine.submit(lease_of(PROMPTS, {"kind": "generate", "temperature": 0.7}, new=4))
        assert {row["status"] for row in drain(engine).values()} == {"ok"}
        engine.close()
        used |= {(built, name) for name in whole.faults.used}  # type: ignore[misc]
    survived = []
    for number, (built, name) in enumerate(sorted(used)):  # type: ignore[misc]
        owner, _, parameter = name.rpartition(".")
        if (owner, parameter) in (("generate_async", "inputs"),):
            continue
        thinned = TensorRtLlmOverStandin(tmp_path / str(number), monkeypatch, built=built)
        owner = "LLM.generate_async" if owner == "generate_async" else owner
        for part in ("positional", "keyword_only", "required"):
            names = thinned.facts["calls"].get(owner, {}).get(part, [])
            if parameter in names:
                names.remove(parameter)
        fields = thinned.facts["fields"].get(owner, {"names": []})["names"]
        if parameter in fields:
            fields.remove(parameter)
        if not _refused(thinned):
            survived.append(name)
    assert survived == []
    assert len(used) > 40


def _refused(thinned: TensorRtLlmOverStandin) -> bool:
    try:
        engine = thinned.open()
        engine.submit(lease_of(PROMPTS[:1], {"kind": "generate", "temperature": 0.7}, new=4))
        rows = drain(engine)
    except (EngineFailed, ValueError, TypeError):
        return True
    return {row["status"] for row in rows.values()} != {"ok"}


@pytest.mark.parametrize("kind", ["tensorrt_llm.LLM", "tensorrt_llm._tensorrt_engine.LLM"])
def test_the_stand_in_refuses_what_the_library_would(
    made: TensorRtLlmOverStandin, kind: str
) -> None:
    made.build()
    module = sys.modules[kind.rpartition(".")[0]]
    with pytest.raises(ValueError, match="invalid argument: gpu_memory_utilization"):
        module.LLM(model="x", gpu_memory_utilization=0.9)
    with pytest.raises(ValueError, match="extra inputs are not permitted: blocks"):
        sys.modules["tensorrt_llm.llmapi"].KvCacheConfig(blocks=4)  # type: ignore[attr-defined]


def test_the_contract_is_what_the_installed_library_offers() -> None:
    if importlib.util.find_spec("tensorrt_llm") is None:
        pytest.skip("tensorrt_llm is not installed; nothing to compare the contract with")
    library = importlib.import_module("tensorrt_llm")
    api = importlib.import_module("tensorrt_llm.llmapi")
    call = inspect.signature(library.LLM.generate_async).parameters
    wanted = FACTS["calls"]["LLM.generate_async"]
    assert {*wanted["positional"], *wanted["keyword_only"]} <= set(call)
    for name in ("KvCacheConfig", "SchedulerConfig"):
        assert set(FACTS["fields"][name]["names"]) <= set(getattr(api, name).model_fields)


# ---- truth about results


@pytest.mark.parametrize("keep_end", [False, True])
def test_tokens_and_finish_reasons_are_those_that_the_library_reports(
    made: TensorRtLlmOverStandin, keep_end: bool
) -> None:
    made.faults.keep_end = keep_end
    engine = made.open()
    engine.submit(lease_of(MANY, GREEDY, new=12))
    rows = drain(engine)
    found = [(rows[n]["output"], rows[n]["finish_reason"]) for n in range(len(MANY))]
    assert found == [expected(prompt, 12) for prompt in MANY]
    assert {reason for _, reason in found} == {"stop", "length"}
    engine.close()


def test_ignoring_the_end_tokens_fills_the_cap(made: TensorRtLlmOverStandin) -> None:
    engine = made.open()
    engine.submit(lease_of(MANY, {**GREEDY, "ignore_eos": True}, new=12))
    rows = drain(engine)
    assert {(row["finish_reason"], len(row["output"])) for row in rows.values()} == {("length", 12)}
    assert any(EOS in row["output"] for row in rows.values())
    engine.close()


@pytest.mark.parametrize("reason", ["timeout", "cancelled", "none"])
def test_an_end_that_is_no_end_is_a_failure_of_its_task(
    made: TensorRtLlmOverStandin, reason: str
) -> None:
    made.faults.wrong_end = reason
    engine = made.open()
    engine.submit(lease_of([[1, 2, 3]], GREEDY, new=2))
    row = drain(engine)[0]
    assert (row["status"], row["error_code"]) == ("failed", "EngineFailed")
    assert ("None" if reason == "none" else reason) in row["error_text"]
    engine.close()


def test_one_request_may_be_refused_and_one_may_break_alone(made: TensorRtLlmOverStandin) -> None:
    made.faults.refuses, made.faults.break_ids = frozenset({1}), frozenset({3})
    engine = made.open()
    engine.submit(lease_of(MANY[:6], GREEDY, new=3))
    rows = drain(engine)
    told = [rows[n]["status"] for n in range(6)]
    assert told == ["ok", "refused", "ok", "failed", "ok", "ok"]
    assert "should not exceed max_seq_len" in rows[1]["error_text"]
    assert "Executor worker returned error" in rows[3]["error_text"]
    engine.close()


def test_greedy_and_sampled_tasks_ask_for_different_things(made: TensorRtLlmOverStandin) -> None:
    engine = made.open()
    (greedy, sampled, other) = (
        engine._params(task)
        for task in _tasks(
            GREEDY, {"kind": "generate", "temperature": 0.7, "top_p": 0.9, "seed": 1}
        )
    )
    assert (greedy.top_k, greedy.end_id, greedy.stop_token_ids) == (1, EOS, [OTHER_EOS])
    assert not hasattr(greedy, "temperature")
    assert (sampled.temperature, sampled.top_p) == (0.7, 0.9)
    assert sampled.seed != other.seed, "another row draws other tokens"
    engine.close()


def _tasks(greedy: dict[str, Any], sampled: dict[str, Any]) -> list[Any]:
    first = tasks_of(lease_of([[7, 8]], greedy, new=4))
    return [*first, *tasks_of(lease_of([[7, 8], [7, 8]], sampled, new=4, first_id=1))]


# ---- life


def test_no_more_requests_than_two_batches_are_inside_and_the_rest_can_be_taken_back(
    made: TensorRtLlmOverStandin,
) -> None:
    made.faults.wedged = True
    engine = made.open()
    engine.submit(lease_of(MANY, GREEDY, new=4))
    inside = 2 * engine.manifest.max_batch_size
    driver = engine._driver
    assert driver is not None
    eventually(lambda: len(driver._inside) == inside, within_s=30, what="two batches are inside")
    assert engine.withdraw_unstarted() == list(range(inside, len(MANY)))
    assert engine.unfinished() == list(range(inside))
    engine.close()
    assert made.faults.shut == 1


def test_a_wedged_runtime_is_said_after_its_time(
    made: TensorRtLlmOverStandin, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.faults.wedged = True
    monkeypatch.setattr(tensorrt_llm_driver, "STALL_S", 0.05)
    engine = made.open()
    engine.submit(lease_of([[1]], GREEDY, new=20))
    with pytest.raises(EngineFailed, match="nothing ended for"):
        polled_until_it_fails(engine, {}, wait_s=0.1)
    assert engine.unfinished() == [0]
    engine.close()


class _Answers:
    """What `generate_async` gives: each request awaits, then ends as `ends` says of its task."""

    def __init__(self, request: Request, ends: dict[int, BaseException]) -> None:
        self._fault = ends.get(request.task.task_id)

    async def aresult(self) -> Any:
        await asyncio.sleep(0.01)
        if self._fault is not None:
            raise self._fault
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1], finish_reason="length")])


def _driven(ends: dict[int, BaseException], count: int) -> Driver:
    driver = Driver(
        lambda request: _Answers(request, ends), "trt", inside_max=4, clock=SYSTEM_CLOCK
    )
    driver.add([Request(SimpleNamespace(task_id=n), None) for n in range(count)])  # type: ignore[arg-type]
    return driver


def test_a_request_that_the_library_cancels_is_answered_and_held_by_nobody() -> None:
    """asyncio.CancelledError is no Exception."""
    driver = _driven({1: asyncio.CancelledError()}, 4)
    answers: list[Any] = []
    eventually(lambda: answers.extend(driver.take(0.1)) or len(answers) == 4, within_s=30, what="4 answers")  # fmt: skip
    assert {each.request.task.task_id: each.fault for each in answers} == {
        0: "", 1: "CancelledError", 2: "", 3: ""
    }  # fmt: skip
    assert driver.tasks() == []
    driver.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("end", [SystemExit(3), KeyboardInterrupt()])
def test_a_library_that_ends_its_thread_ends_its_engine(end: BaseException) -> None:
    driver = _driven({0: end}, 1)
    with pytest.raises(EngineFailed, match=f"trt failed: {type(end).__name__}"):
        eventually(lambda: driver.take(0.1), within_s=30, what="the end of the thread is told")
    assert [task.task_id for task in driver.tasks()] == [0], "its lease returns"
    driver.close()


# ---- fail closed


@pytest.mark.parametrize("field", FIELDS)
def test_a_built_engine_that_lacks_one_of_the_nine_is_not_described(
    made: TensorRtLlmOverStandin, field: str
) -> None:
    config = copy.deepcopy(BUILT)
    place: Any = config
    *parents, last = NINE[field].split(".")
    for name in parents:
        place = place[name]
    del place[last]
    made.write(config)
    with pytest.raises(ManifestRefused, match=f"{field} has no key {NINE[field]}") as refusal:
        describe_built(made.folder, eos_ids=[EOS])
    assert refusal.value.fields == (field,)


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("pretrained_config.quantization.quant_algo", "INT3", "weight_quantisation"),
        ("pretrained_config.quantization.kv_cache_quant_algo", "INT3", "kv_quantisation"),
        ("pretrained_config.mapping.world_size", None, "world_size"),
        ("build_config.max_batch_size", 0, "max_batch_size"),
        ("build_config.max_input_len", 500, "max_input_len"),
        ("build_config.kv_cache_type", "CONTINUOUS", "build_config.kv_cache_type"),
        ("build_config.max_beam_width", 4, "build_config.max_beam_width"),
    ],
)
def test_a_built_engine_with_another_word_is_refused_by_its_field(
    made: TensorRtLlmOverStandin, path: str, value: Any, field: str
) -> None:
    config = copy.deepcopy(BUILT)
    place: Any = config
    *parents, last = path.split(".")
    for name in parents:
        place = place[name]
    place[last] = value
    made.write(config)
    with pytest.raises(ManifestRefused) as refusal:
        describe_built(made.folder, eos_ids=[EOS])
    assert field in refusal.value.fields


UNKNOWN: dict[str, Any] = {
    "version": "abacus 1.0",
    "architecture": "two words",
    "weight_quantisation": "int3",
    "kv_quantisation": "int3",
    "world_size": "one",
    "max_batch_size": 0,
    "max_num_tokens": True,
    "max_input_len": 1.5,
    "max_seq_len": -1,
}
CONTRADICTS: dict[str, Any] = {
    "version": "tensorrt_llm 0.9",
    "architecture": "MistralForCausalLM",
    "weight_quantisation": "none",
    "kv_quantisation": "fp8",
    "world_size": 2,
    "max_batch_size": 3,
    "max_num_tokens": 32,
    "max_input_len": 90,
    "max_seq_len": 120,
}


def _edit(folder: Path, fields: dict[str, Any], *, without: str = "") -> None:
    path = folder / "manifest.json"
    manifest = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({k: v for k, v in manifest.items() if k != without}))


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("fault", ["missing", "unknown", "contradiction"])
def test_each_of_27_manifest_faults_is_refused_before_the_library_is_imported(
    made: TensorRtLlmOverStandin, monkeypatch: pytest.MonkeyPatch, fault: str, field: str
) -> None:
    """A built engine's own config.json is its word, so even a contradiction needs no GPU."""
    changes = {"unknown": {field: UNKNOWN[field]}, "contradiction": {field: CONTRADICTS[field]}}
    _edit(made.folder, changes.get(fault, {}), without=field if fault == "missing" else "")
    with pytest.raises(ManifestRefused, match=field) as refusal:
        _without_library(made, monkeypatch)
    assert field in refusal.value.fields


def _without_library(made: TensorRtLlmOverStandin, patch: pytest.MonkeyPatch) -> None:
    engine = made.build()
    for name in ("tensorrt_llm", "tensorrt_llm.llmapi", "tensorrt_llm._tensorrt_engine"):
        patch.setitem(sys.modules, name, None)
    engine.open()


@pytest.mark.parametrize(
    ("denied", "told", "field"),
    [
        ("max_batch_size", 2, "max_batch_size"),  # clamped, as the library does with a warning only
        ("max_num_tokens", 32, "max_num_tokens"),
        ("max_input_len", 64, "max_input_len"),
        ("max_seq_len", 64, "max_seq_len"),
        ("world_size", 2, "world_size"),
        ("kv dtype", "auto", "kv_quantisation"),
    ],
)
def test_what_the_opened_library_clamps_is_refused_by_its_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, denied: str, told: Any, field: str
) -> None:
    made = TensorRtLlmOverStandin(tmp_path / "tiny", monkeypatch, built=False)
    made.faults.deny[denied] = told
    engine = made.build()
    with pytest.raises(ManifestRefused, match=field) as refusal:
        engine.open()
    assert refusal.value.fields == (field,)
    assert (engine.llm, made.faults.shut) == (None, 1)


def test_an_opened_engine_speaks_of_all_nine_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for built in (True, False):
        made = TensorRtLlmOverStandin(tmp_path / str(built), monkeypatch, built=built)
        engine = made.open(kv_cache_tokens=4096)
        assert set(engine.introspect()) == set(FIELDS)
        assert engine.profile.kv_cache_tokens == 4096
        engine.close()


def test_a_changed_plan_is_refused_and_a_missing_package_is_one_sentence(
    made: TensorRtLlmOverStandin, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made.folder / "rank0.engine").write_bytes(b"another")
    with pytest.raises(ManifestRefused, match="has not the size"):
        made.open()
    (made.folder / "rank0.engine").write_bytes(b"englne")
    with pytest.raises(DigestMismatch, match=r"rank0\.engine changed"):
        made.open()
    (made.folder / "rank0.engine").write_bytes(b"engine")
    with pytest.raises(MissingDependency, match=r"fabric-pipelines\[tensorrt-llm\]"):
        _without_library(made, monkeypatch)


def test_a_described_folder_is_an_engine_of_the_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "tiny@tensorrt_llm-fp8"
    TensorRtLlmOverStandin(tmp_path / "checkpoints" / name, monkeypatch)
    engine = registry.construct_engine(name, cache=tmp_path, threads=1)
    assert isinstance(engine, TensorRtLlmEngine)
    assert engine.manifest.as_json() == {
        "version": "tensorrt_llm 1.2.1",
        "architecture": "LlamaForCausalLM",
        "weight_quantisation": "fp8",
        "kv_quantisation": "none",
        "world_size": 1,
        "max_batch_size": 4,
        "max_num_tokens": 64,
        "max_input_len": 100,
        "max_seq_len": 128,
    }
