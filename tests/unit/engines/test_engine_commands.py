"""`fabric engine inspect | build | fingerprint`: one JSON object, refusals by field, no defaults."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fabric_pipelines import cli
from fabric_pipelines.cli_engine import lane_lengths
from fabric_pipelines.records.manifest import EngineManifest
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.worker.engines import building, registry
from fabric_pipelines.worker.profile_probe import kept_profile
from tests.unit.engines.tensorrt_llm_over_standin import TensorRtLlmOverStandin
from tests.unit.engines.tensorrt_over_standin import TensorRtOverStandin
from tests.unit.engines.vllm_over_standin import CONFIG

pytestmark = pytest.mark.usefixtures("tiny_known")
FIELDS = tuple(EngineManifest.__dataclass_fields__)
CHECKPOINT = "tiny@vllm-fp8"
SAID = (
    "--weight-quantisation", "fp8", "--kv-quantisation", "none", "--max-batch-size", "4",
    "--max-num-tokens", "64", "--max-input-len", "100", "--max-seq-len", "128",
)  # fmt: skip


@pytest.fixture
def cache(tiny_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that a command may change, with one checkpoint folder that nobody has described."""
    cache = Path(shutil.copytree(tiny_cache, tmp_path / "models"))
    (cache / "checkpoints" / CHECKPOINT).mkdir(parents=True)
    (cache / "checkpoints" / CHECKPOINT / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setenv("FABRIC_MODELS", str(cache))
    monkeypatch.setenv("FABRIC_HOME", str(tmp_path / "home"))
    return cache


def fabric(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["engine", *arguments])


def answer(*arguments: str) -> dict[str, Any]:
    done = fabric(*arguments, "--json")
    assert done.exit_code == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return dict(json.loads(line))


@pytest.mark.parametrize("name", ["generate", "hidden", "embed"])
def test_inspect_reads_files_and_open_adds_the_engines_own_word(cache: Path, name: str) -> None:
    read = answer("inspect", name)
    assert read["told"] == {}
    opened = answer("inspect", name, "--open")
    assert tuple(opened["told"]) == FIELDS == tuple(opened["manifest"])
    assert opened["told"]["version"]["value"] == opened["manifest"]["version"]
    same = ("engine", "fingerprint", "manifest", "kinds", "device")
    assert [read[key] for key in same] == [opened[key] for key in same]
    assert set(read["profile"]) == {
        "max_batch_size",
        "max_num_tokens",
        "kv_cache_tokens",
        "window_tokens",
    }


def test_a_person_sees_field_manifest_and_engine_side_by_side(cache: Path) -> None:
    shown = fabric("inspect", "generate", "--open").stdout
    for field in FIELDS:
        assert field in shown
    assert "model.bin" in shown
    assert "<= 8192" in shown


def test_the_fingerprint_is_that_of_completions_and_follows_the_bytes(cache: Path) -> None:
    told = answer("fingerprint", "hidden")
    engine = registry.construct_engine("hidden", cache=cache, threads=1)
    assert told["fingerprint"] == engine.fingerprint
    assert told["files"] == 2
    weights = next(cache.glob("tiny-llama/onnxruntime-fp32-*/trunk.weights"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    refused = fabric("fingerprint", "hidden")
    assert refused.exit_code == 4
    assert "trunk.weights changed" in refused.stderr


def test_inspect_refuses_by_field_with_exit_code_4(cache: Path) -> None:
    path = next(cache.glob("tiny-llama/ctranslate2-int8-*/manifest.json"))
    fields = json.loads(path.read_text())
    del fields["max_seq_len"]
    path.write_text(json.dumps(fields))
    refused = fabric("inspect", "generate", "--json")
    assert refused.exit_code == 4
    assert json.loads(refused.stdout)["error"]["kind"] == "ManifestRefused"
    assert "max_seq_len is missing" in refused.stderr


def test_building_a_shipped_engine_converts_its_model_and_takes_no_sizes(cache: Path) -> None:
    built = answer("build", "generate")
    assert built["manifest"] == answer("inspect", "generate")["manifest"]
    refused = fabric("build", "generate", "--max-batch-size", "4", "--eos", "2")
    assert refused.exit_code == 2
    assert "--max-batch-size, --eos cannot be chosen" in refused.stderr


def test_building_a_checkpoint_needs_every_size_said(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "version", lambda package: "0.25.1")
    monkeypatch.setitem(sys.modules, "vllm", None)  # describing one imports no runtime
    for left in range(0, len(SAID), 2):
        refused = fabric("build", CHECKPOINT, *SAID[:left], *SAID[left + 2 :])
        assert refused.exit_code == 2
        assert f"needs {SAID[left]}: a manifest has no defaults" in refused.stderr
    unbuilt = fabric("inspect", CHECKPOINT)
    assert unbuilt.exit_code == 2
    assert f"run `fabric engine build {CHECKPOINT}`" in unbuilt.stderr
    built = answer("build", CHECKPOINT, *SAID, "--eos", "3")
    assert built["manifest"]["version"] == "vllm 0.25.1"
    assert built["manifest"]["max_seq_len"] == 128
    assert answer("fingerprint", CHECKPOINT)["fingerprint"] == built["fingerprint"]
    (cache / "checkpoints" / CHECKPOINT / "config.json").write_text(
        json.dumps({**CONFIG, "vocab_size": 513})
    )
    changed = fabric("fingerprint", CHECKPOINT)
    assert changed.exit_code == 4
    assert "config.json" in changed.stderr


def test_a_checkpoint_with_a_wrong_size_is_refused_by_field_and_nothing_is_written(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "version", lambda package: "0.25.1")
    refused = fabric("build", CHECKPOINT, *SAID[:4], "--max-batch-size", "0", *SAID[6:])
    assert refused.exit_code == 4
    assert "max_batch_size must be a positive integer" in refused.stderr
    assert not (cache / "checkpoints" / CHECKPOINT / "manifest.json").exists()


def test_a_built_tensorrt_llm_engine_says_its_sizes_itself(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "tiny@tensorrt_llm"
    made = TensorRtLlmOverStandin(cache / "checkpoints" / name, monkeypatch)
    (made.folder / "manifest.json").unlink()
    refused = fabric("build", name, "--max-batch-size", "4")
    assert refused.exit_code == 2
    assert "the engine's own config.json says it" in refused.stderr
    built = answer("build", name, "--eos", "3")
    assert built["manifest"]["max_batch_size"] == 4
    assert answer("fingerprint", name)["fingerprint"] == built["fingerprint"]


def test_building_a_plan_takes_the_models_trunk_layers_lanes_and_a_step(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "tiny-llama@tensorrt-fp32"
    TensorRtOverStandin(tmp_path, tmp_path, monkeypatch).module()
    step = ("--max-num-tokens", "64", "--max-batch-size", "4")
    chosen = ("--layer", "2", "--layer", "0", "--compute-capability", "9.0")
    for arguments, says in (
        ((*chosen, *step, "--lane", "8", "--eos", "2"), "--eos cannot be chosen"),
        ((*chosen, *step, "--lane", "8", "--max-seq-len", "9"), "--max-seq-len cannot be chosen"),
        ((*chosen, "--lane", "8"), "needs --max-batch-size, --max-num-tokens"),
        ((*step, "--lane", "8"), "needs --layer"),
        ((*chosen, *step), "or start the broker whose lanes are meant"),
        ((*step, "--compute-capability", "9"), "takes a number as 9.0, not '9'"),
    ):
        refused = fabric("build", name, *arguments)
        assert refused.exit_code == 2
        assert says in refused.stderr
    built = answer("build", name, *chosen, *step, "--lane", "8")
    assert built["manifest"]["version"] == "tensorrt 11.4.0.106"
    assert Path(built["folder"]).name == "sm_90"
    read = answer("inspect", name)
    assert (read["fingerprint"], read["kinds"]) == (built["fingerprint"], ["hidden"])
    assert answer("fingerprint", name)["files"] == 1


def test_the_lanes_in_use_are_the_lengths_of_the_models_single_passes() -> None:
    lanes = [
        "own/tiny-llama@onnxruntime-fp32/0123456789abcdef/len64",
        "own/tiny-llama@tensorrt/0123456789abcdef/len8!0",
        "own/tiny-llama@ctranslate2-int8/0123456789abcdef/out32",
        "own/other@onnxruntime-fp32/0123456789abcdef/len128",
        "own/tiny-llama@onnxruntime-fp32/0123456789abcdef/len*",
    ]
    assert lane_lengths(lanes, "tiny-llama") == (8, 64)


def test_probe_measures_keeps_and_declares_the_four_numbers(cache: Path) -> None:
    found = answer("probe", "embed")
    assert found["rows"][0]["max_num_tokens"] == 32
    assert all(row["tokens_per_s"] > 0 for row in found["rows"])
    assert 32 <= found["profile"]["max_num_tokens"] <= 4096
    assert json.loads(Path(found["kept"]).read_text())["profile"] == found["profile"]
    engine = registry.construct_engine("embed", cache=cache, threads=1)
    assert kept_profile(engine, cache, "cpu:0") == Profile(**found["profile"])


def test_an_engine_or_a_folder_that_is_not_there_is_one_sentence(cache: Path) -> None:
    for arguments, says in (
        (("inspect", "tiny@abacus"), "is unknown; known are"),
        (("build", "other@vllm", *SAID), "there is no folder"),
    ):
        refused = fabric(*arguments)
        assert refused.exit_code == 2
        assert says in refused.stderr
        assert len(refused.stderr.strip().splitlines()) == 1
