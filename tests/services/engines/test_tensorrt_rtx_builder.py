"""TensorRT's own builder on our graphs: TensorRT-RTX parses and builds plans without a card. Nothing runs them here.

Where its wheels are not installed these tests skip with that reason; in CI they fail.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fabric_pipelines.errors import DeviceRefused, EngineFailed, MissingDependency
from fabric_pipelines.testing.host_card import HostCard
from fabric_pipelines.testing.tensorrt_standin import facts_of
from fabric_pipelines.worker.engines.opening import read_folder
from fabric_pipelines.worker.engines.tensorrt import TensorRtEngine
from fabric_pipelines.worker.engines.tensorrt_plan import Step, build_plan, import_runtime
from tests.support import skip_or_fail
from tests.tiny_models import TOKENS
from tests.unit.engines.tensorrt_over_standin import CONTRACTS, write_trunk

CARDS = [(8, 9), (12, 0)]


@pytest.fixture(scope="module")
def trt() -> Any:
    try:
        return import_runtime("tensorrt_rtx")
    except MissingDependency as fault:
        skip_or_fail(str(fault))


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trunk(tmp_path_factory.mktemp("trunk"))


def _plan(trt: Any, trunk: Path, folder: Path, **changes: Any) -> Any:
    chosen: dict[str, Any] = {
        "layers": (1, 3),
        "lanes": (8, 48),
        "step": Step(tokens=256, sequences=16),
        "capabilities": CARDS,
    }
    return build_plan(
        trt,
        trunk,
        folder,
        runtime="tensorrt_rtx",
        vocab_size=len(TOKENS),
        **{**chosen, **changes},
    )


def test_a_plan_is_built_for_named_cards_and_described(
    trt: Any, trunk: Path, tmp_path: Path
) -> None:
    manifest = _plan(trt, trunk, tmp_path / "plan")
    assert manifest.version == f"tensorrt_rtx {trt.__version__}"
    facts = json.loads((tmp_path / "plan" / "contents.json").read_text())["facts"]
    assert facts["compute_capabilities"] == ["8.9", "12.0"]
    assert facts["profile_ends"] == [8, 16, 32, 64, 128, 256]
    plan = (tmp_path / "plan" / "plan.engine").read_bytes()
    weights = trunk.with_suffix(".weights").stat().st_size
    assert len(plan) > 0.5 * weights, "the weights of three blocks are in it"
    again = read_folder(tmp_path / "plan")
    assert again.manifest == manifest


def test_a_graph_that_it_cannot_parse_is_said_in_its_own_words(
    trt: Any, trunk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fabric_pipelines.worker.engines import tensorrt_plan

    monkeypatch.setattr(tensorrt_plan, "pooled", lambda path, layers: b"no graph at all")
    with pytest.raises(EngineFailed, match=r"TensorRT cannot parse trunk\.onnx: .+"):
        _plan(trt, trunk, tmp_path / "plan")
    assert not (tmp_path / "plan").exists()


def test_a_card_that_it_does_not_build_for_is_refused(
    trt: Any, trunk: Path, tmp_path: Path
) -> None:
    with pytest.raises(DeviceRefused, match=r"does not build for compute capability 9\.0"):
        _plan(trt, trunk, tmp_path / "plan", capabilities=[(9, 0)])


def test_without_a_driver_a_plan_is_refused_in_a_sentence(
    trt: Any, trunk: Path, tmp_path: Path
) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a driver")
    _plan(trt, trunk, tmp_path / "plan")
    engine = TensorRtEngine(
        "tiny@tensorrt_rtx", read_folder(tmp_path / "plan"), lambda: HostCard(capability=(12, 0))
    )
    with pytest.raises(EngineFailed, match="this card or driver cannot run the plan"):
        engine.open()


def test_the_contract_is_what_the_installed_builder_offers(trt: Any) -> None:
    facts = facts_of(CONTRACTS, "rtx")
    if trt.__version__ != facts.version:
        pytest.skip(f"the contract is of {facts.version}, installed is {trt.__version__}")
    missing = [
        f"{cls}.{name}"
        for cls, names in facts.classes.items()
        for name in names.get("members", names)
        if not hasattr(getattr(trt, cls), name)
    ]
    assert missing == []
    assert len(facts.classes) >= 17
