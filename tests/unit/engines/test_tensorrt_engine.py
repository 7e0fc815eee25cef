"""The TensorRT adapter against the API of TensorRT 10, 11 and RTX: every name and parameter it uses exists there.

Proves our half: buffers, shapes, profiles, order and refusals. What TensorRT makes of the graph is asked of its real
builder in tests/services/engines; nobody ran a plan here, and no speed is claimed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric_pipelines.errors import (
    DeviceRefused,
    EngineFailed,
    FabricError,
    ManifestRefused,
    MissingDependency,
    ModelMissing,
    UsageError,
)
from fabric_pipelines.records.manifest import EngineManifest
from fabric_pipelines.worker.engines import registry
from fabric_pipelines.worker.engines.plans import folder_name, plan_folder
from fabric_pipelines.worker.engines.tensorrt_plan import Step, profile_ends
from tests.engine_conformance import Conformance, Subject
from tests.reference_models import ReferenceLlama, relative_error
from tests.tiny_models import drain, lease_of, polled_until_it_fails
from tests.unit.engines.tensorrt_over_standin import (
    CONTRACTS,
    LAYERS,
    VERSIONS,
    TensorRtOverStandin,
    direct_states,
    write_trunk,
)
from tests.unit.engines.test_conformance import FP16, PROMPTS

FIELDS = tuple(EngineManifest.__dataclass_fields__)
LAST = {"kind": "hidden", "layers": [2], "pooling": "last"}
ALL = {"kind": "hidden", "layers": list(LAYERS), "pooling": "mean"}


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trunk(tmp_path_factory.mktemp("trunk"))


@pytest.fixture(params=VERSIONS)
def made(
    request: pytest.FixtureRequest, trunk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> TensorRtOverStandin:
    return TensorRtOverStandin(trunk, tmp_path / "plan", monkeypatch, version=request.param)


@pytest.fixture
def one(trunk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TensorRtOverStandin:
    return TensorRtOverStandin(trunk, tmp_path / "plan", monkeypatch)


class TestTensorRtOverStandin(Conformance):
    @pytest.fixture
    def subject(self, made: TensorRtOverStandin, trunk: Path) -> Iterator[Subject]:
        engine = made.plan().open()
        yield Subject(
            engine,
            LAST,
            PROMPTS,
            0,
            direct_states(trunk, 2),
            breaks=lambda: setattr(made.faults, "refuses_steps", True),
            oversized=[5] * 49,
            bad_token=9_999,
            tolerance=FP16 * 10,
        )
        engine.close()


# ---- the contract


def test_what_the_adapter_uses_is_looked_up_in_the_contract(made: TensorRtOverStandin) -> None:
    engine = made.plan().open()
    engine.submit(lease_of(PROMPTS, ALL))
    drain(engine)
    engine.close()
    used = made.faults.used
    assert {
        ("IExecutionContext", "execute_async_v3"),
        ("IExecutionContext", "set_tensor_address"),
        ("IExecutionContext", "set_optimization_profile_async"),
        ("ICudaEngine", "get_tensor_profile_shape"),
        ("OnnxParser", "parse"),
        ("IOptimizationProfile", "set_shape"),
        ("Builder", "build_serialized_network"),
        ("INetworkDefinition", "name"),
    } <= used
    classes = CONTRACTS["versions"][made.version]["classes"]
    assert not [(cls, name) for cls, name in used if name not in classes[cls]]


def _used_names(trunk: Path, tmp_path: Path, patch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    found = TensorRtOverStandin(trunk, tmp_path / "found", patch)
    engine = found.plan().open()
    engine.submit(lease_of(PROMPTS, ALL))
    drain(engine)
    engine.close()
    return sorted(found.faults.used)


def test_without_any_one_of_the_names_it_uses_the_adapter_fails(
    trunk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = _used_names(trunk, tmp_path, monkeypatch)
    survived = []
    for number, (cls, name) in enumerate(names):
        thinned = TensorRtOverStandin(trunk, tmp_path / str(number), monkeypatch)
        del thinned.contract[cls][name]
        try:
            engine = thinned.plan().open()
            engine.submit(lease_of(PROMPTS[:2], ALL))
            drain(engine)
        except AttributeError as fault:
            survived += [] if repr(name) in str(fault) else [f"{cls}.{name}: {fault}"]
        else:
            survived.append(f"{cls}.{name}")
    assert survived == []
    assert len(names) > 20


def test_a_parameter_of_another_name_is_refused_by_the_stand_in(one: TensorRtOverStandin) -> None:
    trt = one.module()
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    profile = builder.create_optimization_profile()
    with pytest.raises(TypeError, match="missing a required argument: 'opt'"):
        profile.set_shape("ids", min=(1,), best=(2,), max=(3,))
    with pytest.raises(AttributeError, match="no attribute 'max_workspace_size'"):
        builder.create_builder_config().max_workspace_size = 1


# ---- results


def test_pooled_layers_equal_the_float64_reference_in_the_order_asked(
    made: TensorRtOverStandin, trunk: Path
) -> None:
    reference = ReferenceLlama(trunk.parent / "tiny.gguf")
    engine = made.plan().open()
    for pooling in ("mean", "last"):
        engine.submit(lease_of(PROMPTS, {"kind": "hidden", "layers": [3, 0], "pooling": pooling}))
        rows = drain(engine)
        for task, prompt in enumerate(PROMPTS):
            states = reference.hidden(prompt)[[3, 0]]
            truth = states.mean(1) if pooling == "mean" else states[:, -1]
            found = np.array(rows[task]["vector"], np.float64).reshape(truth.shape)
            assert relative_error(found, truth) < FP16
            assert rows[task]["padded_tokens"] == 0
    engine.close()


def test_steps_of_every_size_and_both_slots_give_what_a_sequence_gives_alone(
    one: TensorRtOverStandin, trunk: Path
) -> None:
    """Buffers are filled again while the other slot's work is still queued: nothing may be overwritten early."""
    draw = np.random.default_rng(3)
    prompts = [draw.integers(0, 264, int(n)).tolist() for n in draw.integers(1, 49, 60)]
    one.card.patience = 5
    engine = one.plan().open()
    allocated = len(one.card.allocations)
    for start in range(0, 60, 20):
        engine.submit(lease_of(prompts[start : start + 20], LAST, first_id=start))
    rows = drain(engine)
    for task, truth in enumerate(direct_states(trunk, 2)(prompts)):
        np.testing.assert_allclose(rows[task]["vector"], truth, rtol=0, atol=FP16 * 10)
    assert len(one.card.streams) == 2
    assert len(one.card.allocations) == allocated, "all memory is there before the first step"
    assert engine.stats.computed_tokens == sum(len(prompt) for prompt in prompts)
    engine.close()
    assert one.card.closed


def test_a_step_that_is_refused_fails_its_tasks_and_the_next_one_runs(
    one: TensorRtOverStandin,
) -> None:
    engine = one.plan().open()
    one.faults.refuses_steps = True
    engine.submit(lease_of(PROMPTS[:2], LAST))
    row = drain(engine)[0]
    assert (row["status"], row["error_text"]) == ("failed", "the step was not taken")
    one.faults.refuses_steps = False
    engine.submit(lease_of(PROMPTS[:2], LAST, first_id=10))
    assert {row["status"] for row in drain(engine).values()} == {"ok"}
    engine.close()


def test_a_judgement_of_the_library_fails_its_step_however_often_it_comes(
    one: TensorRtOverStandin, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = one.plan().open()

    def judged(slot: Any) -> None:
        raise IndexError("no such place")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_enqueue", judged)
        for _ in range(5):
            engine.submit(lease_of(PROMPTS[:1], LAST))
            row = drain(engine)[0]
            assert (row["status"], row["error_text"]) == ("failed", "IndexError: no such place")
    engine.submit(lease_of(PROMPTS[:1], LAST))
    assert drain(engine)[0]["status"] == "ok"
    engine.close()


def test_a_lost_card_is_an_engine_failure_that_keeps_every_task(one: TensorRtOverStandin) -> None:
    engine = one.plan().open()
    engine.submit(lease_of(PROMPTS * 5, LAST))
    engine.poll(0.0)
    one.card.lost = True
    rows: dict[int, Any] = {}
    with pytest.raises(EngineFailed, match="unspecified launch failure"):
        polled_until_it_fails(engine, rows)
    assert sorted([*rows, *engine.unfinished()]) == list(range(len(PROMPTS) * 5))
    engine.close()


def test_a_layer_that_was_not_built_is_refused_with_those_that_were(
    one: TensorRtOverStandin,
) -> None:
    engine = one.plan().open()
    engine.submit(lease_of(PROMPTS[:1], {**LAST, "layers": [1, 2]}))
    (row,) = drain(engine).values()
    assert row["status"] == "refused"
    assert "layers [1] are not in this plan; it was built with 0, 2, 3" in row["error_text"]
    engine.close()


# ---- building


@pytest.mark.parametrize(
    ("lanes", "tokens", "ends"),
    [
        ([2048], 2048, [2048]),
        ([8], 64, [8, 16, 32, 64]),
        ([48, 40], 128, [64, 96, 128]),  # 120 is within a sixteenth of 128; 32 is below any lane
        ([16, 24, 700], 1024, [16, 32, 64, 128, 256, 512, 700, 1024]),
        ([1], 1 << 14, [128, 256, 512, 1024, 2048, 4096, 8192, 16384]),
    ],
)
def test_profiles_end_at_the_full_steps_of_the_lanes(
    lanes: list[int], tokens: int, ends: list[int]
) -> None:
    assert profile_ends(lanes, tokens) == ends


@pytest.mark.parametrize("lanes", [[], [0], [65]])
def test_impossible_lanes_are_refused(lanes: list[int]) -> None:
    with pytest.raises(UsageError, match="lanes must be lengths from 1 to 64"):
        profile_ends(lanes, 64)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layers": [9]}, r"layers \[9\] are not in trunk.onnx; it has 0, 1, 2, 3"),
        ({"layers": []}, "are not in"),
        ({"step": Step(5000, 4)}, "at most 4096 tokens"),
        ({"step": Step(8, 9)}, "no more sequences than tokens"),
        ({"capabilities": [(9, 0), (12, 0)]}, "TensorRT builds for one card"),
    ],
)
def test_an_impossible_build_writes_nothing(
    one: TensorRtOverStandin, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        one.plan(**changes)
    assert not one.folder.exists()


def test_a_graph_that_is_not_parsed_or_not_built_is_said(one: TensorRtOverStandin) -> None:
    one.faults.parse_error = "no importer registered for op: Turn"
    with pytest.raises(EngineFailed, match=r"op: Turn \(node matmul_7\)"):
        one.plan()
    one.faults.parse_error = ""
    one.faults.refuses_build = True
    with pytest.raises(EngineFailed, match="could not build trunk"):
        one.plan()
    assert not one.folder.exists()


def test_rtx_is_told_its_cards_and_refuses_one_it_does_not_know(
    trunk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = TensorRtOverStandin(trunk, tmp_path / "plan", monkeypatch, version="rtx")
    made.plan()
    facts = json.loads((made.folder / "contents.json").read_text())["facts"]
    assert facts["compute_capabilities"] == ["8.9", "12.0"]
    with pytest.raises(DeviceRefused, match=r"does not build for compute capability 9\.0"):
        made.plan(capabilities=[(9, 0)])


# ---- opening


CONTRADICTS: dict[str, dict[str, Any]] = {
    "architecture": {"name": "MistralForCausalLM weights=none"},
    "weight_quantisation": {"name": "LlamaForCausalLM weights=fp8"},
    "kv_quantisation": {"cache": "past_key_0"},
    "max_batch_size": {"max rows": (4,)},
    "max_num_tokens": {"max ids": (40,)},
    "max_input_len": {"max ids": (40,)},
    "max_seq_len": {"max ids": (40,)},
}
UNKNOWN: dict[str, Any] = {
    "version": "abacus 1.0",
    "architecture": "AbacusForCausalLM",
    "weight_quantisation": "int3",
    "kv_quantisation": "int3",
    "world_size": "one",
    "max_batch_size": 0,
    "max_num_tokens": True,
    "max_input_len": 1.5,
    "max_seq_len": -1,
}


def _edit(folder: Path, fields: dict[str, Any], *, without: str = "") -> None:
    path = folder / "manifest.json"
    manifest = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({k: v for k, v in manifest.items() if k != without}))


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("fault", ["missing", "unknown", "contradiction"])
def test_each_of_27_manifest_faults_is_refused_by_its_field(
    one: TensorRtOverStandin, monkeypatch: pytest.MonkeyPatch, fault: str, field: str
) -> None:
    one.plan()
    if fault == "missing":
        _edit(one.folder, {}, without=field)
    elif fault == "unknown":
        _edit(one.folder, {field: UNKNOWN[field]})
    elif field in ("version", "world_size"):
        _edit(one.folder, {"version": "tensorrt 9.0"} if field == "version" else {"world_size": 2})
    one.faults.deny |= CONTRADICTS.get(field, {}) if fault == "contradiction" else {}
    act = one.open
    if fault != "contradiction":
        monkeypatch.setitem(sys.modules, "tensorrt", None)
        act = one.build
    with pytest.raises(ManifestRefused, match=field) as refusal:
        act()
    assert field in refusal.value.fields
    assert one.card.streams == [], "refused before anything was queued"


def test_the_wrong_card_is_refused_before_the_plan_is_loaded(one: TensorRtOverStandin) -> None:
    one.plan()
    one.card.capability = (12, 0)
    with pytest.raises(DeviceRefused, match=r"built for compute capability 9\.0 .* has 12\.0"):
        one.open()
    assert ("Runtime", "deserialize_cuda_engine") not in one.faults.used


@pytest.mark.parametrize(
    ("version", "faults", "says"),
    [
        ("10", {"refuses_plan": True}, "could not load the plan"),
        ("11", {"refuses_context": True}, "no room for an execution context"),
        ("rtx", {"deny": {"validity": 32}}, "cannot run the plan .UNSUPPORTED_CC"),
    ],
)
def test_a_plan_that_does_not_load_is_one_sentence(
    trunk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    faults: dict[str, Any],
    says: str,
) -> None:
    made = TensorRtOverStandin(trunk, tmp_path / "plan", monkeypatch, version=version)
    made.plan()
    for name, value in faults.items():
        setattr(made.faults, name, value)
    with pytest.raises(EngineFailed, match=says):
        made.open()


@pytest.mark.parametrize(
    ("name", "extra"), [("tensorrt", "tensorrt"), ("tensorrt_rtx", "tensorrt-rtx")]
)
def test_a_missing_runtime_is_one_sentence_with_the_command(
    one: TensorRtOverStandin, monkeypatch: pytest.MonkeyPatch, name: str, extra: str
) -> None:
    from fabric_pipelines.worker.engines.tensorrt_plan import import_runtime

    for module in ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependency, match=rf"fabric-pipelines\[{extra}\]"):
        import_runtime(name)


def test_of_several_plans_the_cards_own_is_opened(one: TensorRtOverStandin, tmp_path: Path) -> None:
    cache, name = tmp_path / "models", "tiny@tensorrt"
    with pytest.raises(ModelMissing, match="fabric engine build tiny@tensorrt"):
        plan_folder(name, cache)
    for capability in ((9, 0), (12, 0)):
        one.folder = cache / "plans" / name / folder_name([capability])
        one.plan(capabilities=[capability])
    assert plan_folder(name, cache, lambda: (12, 0)).name == "sm_120"
    assert plan_folder(name, cache, lambda: (9, 0)).name == "sm_90"
    with pytest.raises(DeviceRefused, match=r"built for sm_120, sm_90, and the card has 8\.9"):
        plan_folder(name, cache, lambda: (8, 9))
    (cache / "plans" / name / "sm_120" / "manifest.json").unlink()
    engine = registry.construct_engine(name, cache=cache, threads=1)
    assert isinstance(engine, FabricError) is False
    assert engine.manifest.max_num_tokens == 48
