"""The vLLM engine against its contract: what it asks of vLLM, what it believes, what it refuses by name."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fabric_pipelines.errors import EngineFailed, ManifestRefused, MissingDependency, ModelMissing
from fabric_pipelines.models.recipes import Limits
from fabric_pipelines.worker.engines import registry, vllm_driver
from fabric_pipelines.worker.engines import vllm as vllm_engine
from fabric_pipelines.worker.engines.checkpoint import QWEN_7B_SHAPE, describe
from fabric_pipelines.worker.engines.opening import read_folder
from fabric_pipelines.worker.engines.vllm import VllmEngine, graph_sizes
from tests.support import eventually
from tests.tiny_models import drain, lease_of, polled_until_it_fails
from tests.unit.engines.vllm_over_standin import EOS, FACTS, VllmOverStandin, expected

GREEDY = {"kind": "generate", "temperature": 0.0}
PROMPTS = [[n, n + 1, n + 2] for n in range(10, 40)]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VllmOverStandin:
    return VllmOverStandin(tmp_path / "tiny", monkeypatch)


def _edit(folder: Path, **fields: object) -> None:
    path = folder / "manifest.json"
    manifest = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({k: v for k, v in manifest.items() if v != "absent"}))


# ---- truth about results


def test_tokens_and_finish_reasons_are_those_that_vllm_reports(made: VllmOverStandin) -> None:
    engine = made.open()
    engine.submit(lease_of(PROMPTS, GREEDY, new=12))
    rows = drain(engine)
    found = [(rows[n]["output"], rows[n]["finish_reason"]) for n in range(len(PROMPTS))]
    assert found == [expected(prompt, 12) for prompt in PROMPTS]
    assert {reason for _, reason in found} == {"stop", "length"}
    engine.close()


def test_ignoring_the_end_token_fills_the_cap(made: VllmOverStandin) -> None:
    engine = made.open()
    engine.submit(lease_of(PROMPTS, {**GREEDY, "ignore_eos": True}, new=12))
    rows = drain(engine)
    assert {(row["finish_reason"], len(row["output"])) for row in rows.values()} == {("length", 12)}
    assert any(EOS in row["output"] for row in rows.values())
    engine.close()


@pytest.mark.parametrize("reason", ["abort", "error", "repetition", "stop"])
def test_an_end_that_was_not_asked_for_is_a_failure_of_its_task(
    made: VllmOverStandin, reason: str
) -> None:
    made.faults.wrong_end = reason
    engine = made.open()
    engine.submit(lease_of([[1, 2, 3]], {**GREEDY, "ignore_eos": True}, new=2))
    row = drain(engine)[0]
    assert (row["status"], row["error_code"]) == ("failed", "EngineFailed")
    assert repr(reason) in row["error_text"]
    engine.close()


def test_reused_tokens_are_what_the_prefix_cache_says(made: VllmOverStandin) -> None:
    engine = made.open()
    shared = list(range(100, 148))  # three blocks of 16
    engine.submit(lease_of([[*shared, n] for n in range(5)], GREEDY, new=2))
    drain(engine)
    stats = engine.stats
    assert stats.offered_tokens == 5 * 49
    assert stats.reused_tokens == 4 * 48
    assert stats.computed_tokens == 5 * 49 - 4 * 48
    engine.close()


def test_equal_sampled_prompts_get_seeds_of_their_own_rows(made: VllmOverStandin) -> None:
    engine = made.open()
    sampling = {"kind": "generate", "temperature": 0.7, "top_k": 5, "seed": 9}
    tasks = [
        vllm_engine.tasks_of(lease_of([[1, 2]], sampling, new=4, first_id=n))[0] for n in (0, 1)
    ]
    seeds = [engine._params(task).seed for task in [*tasks, tasks[0]]]
    assert seeds[0] == seeds[2] != seeds[1]
    engine.close()


@pytest.mark.parametrize(
    ("sampling", "new", "says"),
    [
        (GREEDY, 0, "needs at least 1"),
        ({"kind": "embed"}, 4, "kind 'embed' is not served"),
        ({**GREEDY, "temperature": 9.0}, 4, "temperature must be in [0, 2]"),
        ({**GREEDY, "ignore_eos": 1}, 4, "ignore_eos must be true or false"),
        ({**GREEDY, "top_k": -1}, 4, "top_k is -1"),
    ],
)
def test_a_sampling_beyond_the_engine_is_refused_per_task(
    made: VllmOverStandin, sampling: dict[str, Any], new: int, says: str
) -> None:
    engine = made.open()
    engine.submit(lease_of([[5]], sampling, new=new))
    row = drain(engine)[0]
    assert row["status"] == "refused"
    assert says in row["error_text"]
    engine.close()


def test_a_request_that_vllm_will_not_take_is_refused_and_the_rest_runs(
    made: VllmOverStandin, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = made.open()
    real = engine.llm.llm_engine.add_request

    def picky(request_id: str, prompt: Any, params: Any) -> str:
        if request_id == "1":
            raise ValueError("vLLM says no")
        return str(real(request_id, prompt, params))

    monkeypatch.setattr(engine.llm.llm_engine, "add_request", picky)
    engine.submit(lease_of(PROMPTS[:3], GREEDY, new=3))
    rows = drain(engine)
    assert [rows[n]["status"] for n in range(3)] == ["ok", "refused", "ok"]
    assert rows[1]["error_text"] == "vLLM says no"
    engine.close()


# ---- fail closed


def test_the_profile_is_vllms_own_introspection(made: VllmOverStandin) -> None:
    engine = made.build(kv_blocks=40)
    assert engine.profile.kv_cache_tokens == 128, "before it is open: one longest sequence"
    engine.open()
    profile = engine.profile
    assert (profile.max_batch_size, profile.max_num_tokens) == (4, 64)
    assert profile.kv_cache_tokens == 40 * 16
    engine.close()


@pytest.mark.parametrize(
    ("path", "told", "field"),
    [
        ("model_config.architectures", ["MistralForCausalLM"], "architecture"),
        ("model_config.quantization", None, "weight_quantisation"),
        ("model_config.quantization", "quark", "weight_quantisation"),
        ("cache_config.cache_dtype", "auto", "kv_quantisation"),
        ("parallel_config.world_size", 2, "world_size"),
        ("scheduler_config.max_num_seqs", 3, "max_batch_size"),
        ("scheduler_config.max_num_batched_tokens", 32, "max_num_tokens"),
        ("model_config.max_model_len", 100, "max_input_len"),
        ("model_config.max_model_len", 120, "max_seq_len"),
    ],
)
def test_a_contradiction_with_vllms_own_configuration_is_refused_by_field(
    made: VllmOverStandin, path: str, told: Any, field: str
) -> None:
    made.faults.deny[path] = told
    engine = made.build()
    with pytest.raises(ManifestRefused, match=field) as refusal:
        engine.open()
    assert field in refusal.value.fields
    assert engine.llm is None, "the runtime is shut again"


@pytest.mark.parametrize("name", [
    "version", "architecture", "weight_quantisation", "kv_quantisation", "world_size",
    "max_batch_size", "max_num_tokens", "max_input_len", "max_seq_len",
])  # fmt: skip
@pytest.mark.parametrize("wrong", ["absent", "nonsense"])
def test_a_missing_or_unknown_field_is_refused_before_vllm_is_imported(
    made: VllmOverStandin, monkeypatch: pytest.MonkeyPatch, name: str, wrong: str
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    _edit(made.folder, **{name: wrong})
    with pytest.raises(ManifestRefused, match=name) as refusal:
        made.open()
    assert name in refusal.value.fields


@pytest.mark.parametrize(
    ("fields", "at_fault"),
    [({"version": "vllm 0.24.0"}, "version"), ({"architecture": "Other"}, "architecture")],
)
def test_another_package_or_architecture_is_refused_before_vllm_is_imported(
    made: VllmOverStandin,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, str],
    at_fault: str,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    _edit(made.folder, **fields)
    with pytest.raises(ManifestRefused, match=at_fault) as refusal:
        made.open()
    assert refusal.value.fields == (at_fault,)


def test_without_vllm_one_sentence_says_what_to_install(
    made: VllmOverStandin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingDependency, match=r"fabric-pipelines\[vllm\]"):
        made.open()


# ---- life of the engine


def test_a_dead_scheduler_is_an_engine_failure_after_what_had_ended(made: VllmOverStandin) -> None:
    made.faults.die_at_step = 6
    engine = made.open()
    engine.submit(
        lease_of(PROMPTS[:8], {**GREEDY, "ignore_eos": True}, new=[2, 2, 2, 2, 9, 9, 9, 9])
    )
    rows: dict[int, Any] = {}
    with pytest.raises(EngineFailed, match="EngineDeadError"):
        polled_until_it_fails(engine, rows)
    assert sorted(rows) == [0, 1, 2, 3]
    assert engine.unfinished() == [4, 5, 6, 7]
    assert engine.withdraw_unstarted() == [], "whoever was inside may be to blame"
    engine.close()


def test_a_killed_scheduler_that_leaves_a_step_blocked_is_noticed(made: VllmOverStandin) -> None:
    engine = made.open()
    made.faults.killed.set()
    engine.submit(lease_of(PROMPTS[:8], GREEDY, new=9))
    with pytest.raises(EngineFailed, match="scheduler process has ended"):
        polled_until_it_fails(engine, {}, wait_s=0.02)
    assert engine.unfinished() == list(range(8))
    assert engine.withdraw_unstarted() == [4, 5, 6, 7]  # what vLLM never saw cannot be to blame
    assert engine.unfinished() == list(range(4))
    engine.close()


def test_what_runs_is_kept_when_the_rest_is_taken_back(made: VllmOverStandin) -> None:
    made.faults.step_s = 0.05  # five seconds in which this thread has to come by once
    engine = made.open()
    engine.submit(lease_of(PROMPTS[:10], {**GREEDY, "ignore_eos": True}, new=100))
    states = engine.llm.llm_engine.output_processor.request_states
    eventually(
        lambda: sum(not state.is_prefilling for state in list(states.values())) == 4,
        within_s=60,
        what="a batch of four runs",
    )
    assert engine.withdraw_unstarted() == list(range(4, 10))
    made.faults.step_s = 0.0
    assert sorted(drain(engine)) == [0, 1, 2, 3]
    engine.close()


def test_what_a_step_gives_back_too_late_is_run_and_owned_by_somebody(
    made: VllmOverStandin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_driver, "WITHDRAW_S", 0.02)
    made.faults.step_s = 0.3
    engine = made.open()
    engine.feed_in_groups(8, 1)
    engine.submit(lease_of([[5, 6, 7 + n] for n in range(8)], GREEDY, new=3))
    driver = engine._driver
    assert driver is not None
    eventually(lambda: driver.inside, within_s=30, what="a step has begun")
    back = engine.withdraw_unstarted()  # the step outlasts the wait
    made.faults.step_s = 0.0
    rows = drain(engine)
    assert sorted([*back, *rows]) == list(range(8)), "each task has one owner"
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert engine.unfinished() == []
    engine.close()


def test_requests_are_added_when_a_group_of_places_is_free(made: VllmOverStandin) -> None:
    engine = made.open(group=4)
    core, added = engine.llm.llm_engine, []
    add = core.add_request
    core.add_request = lambda *request: (added.append(core.steps), add(*request))[1]
    engine.submit(lease_of(PROMPTS[:8], {**GREEDY, "ignore_eos": True}, new=9))
    drain(engine)
    first, second = added[:4], added[4:]
    assert first == [0] * 4
    assert len(second) == 4, "the rest waits beside vLLM until the whole group has ended"
    assert len(set(second)) == 1
    assert second[0] >= 9


def test_graphs_reach_a_full_batch_and_no_further() -> None:
    assert graph_sizes(4) == [1, 2, 4]
    assert graph_sizes(1000)[-3:] == [896, 960, 1000]
    assert graph_sizes(4096)[-1] == 1024
    assert len(graph_sizes(1024)) < 51  # vLLM's own list up to 512


def test_a_wedged_runtime_is_said_after_its_time(
    made: VllmOverStandin, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.faults.step_s = 0.4
    monkeypatch.setattr(vllm_driver, "STALL_S", 0.05)
    engine = made.open()
    engine.submit(lease_of([[1]], GREEDY, new=20))
    with pytest.raises(EngineFailed, match="made no step for"):
        polled_until_it_fails(engine, {}, wait_s=0.1)
    engine.close()


def test_random_weights_are_asked_for_when_the_folder_has_none(made: VllmOverStandin) -> None:
    engine = made.build()
    assert engine._arguments()["load_format"] == "dummy"
    assert engine._arguments()["quantization"] == "fp8"
    (made.folder / "model.safetensors").write_bytes(b"weights")
    describe(made.folder, Limits(4, 64, 100, 128), version="vllm 0.25.1",
             weight_quantisation="fp8", kv_quantisation="fp8")  # fmt: skip
    with_weights = made.build()
    assert with_weights._arguments()["load_format"] == "safetensors"
    assert with_weights.fingerprint != engine.fingerprint


def test_a_described_checkpoint_is_an_engine_of_the_registry(tmp_path: Path) -> None:
    name = "qwen2.5-7b-shape-random-weights@vllm-fp8"
    with pytest.raises(ModelMissing, match="fabric engine build"):
        registry.construct_engine(name, cache=tmp_path, threads=1)
    folder = tmp_path / "checkpoints" / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(QWEN_7B_SHAPE)))
    describe(folder, Limits(1024, 16_384, 2048, 4096), version="vllm 0.25.1",
             weight_quantisation="fp8", kv_quantisation="fp8")  # fmt: skip
    engine = registry.construct_engine(name, cache=tmp_path, threads=1)
    assert isinstance(engine, VllmEngine)
    assert engine.manifest.architecture == "Qwen2ForCausalLM"
    assert read_folder(folder).facts["weights"] == "random"


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("SamplingParams", "stop_token_ids"),
        ("SamplingParams", "skip_clone"),
        ("EngineArgs", "num_gpu_blocks_override"),
        ("RequestState", "is_prefilling"),
        ("CacheConfig", "num_gpu_blocks"),
    ],
)
def test_a_contract_without_a_name_that_is_used_is_noticed(
    made: VllmOverStandin, monkeypatch: pytest.MonkeyPatch, where: str, name: str
) -> None:
    """The stand-in is strict: were vLLM to drop the name, these tests would say so."""
    facts = copy.deepcopy(FACTS)
    facts["fields"][where]["names"].remove(name)

    def run() -> None:
        engine = VllmOverStandin(made.folder, monkeypatch, facts=facts).open()
        engine.submit(lease_of([[1, 2, 3]], GREEDY, new=2))
        assert drain(engine)[0]["status"] == "ok"

    with pytest.raises((TypeError, AssertionError, EngineFailed)):
        run()
