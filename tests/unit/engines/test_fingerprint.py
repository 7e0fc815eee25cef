"""A fingerprint pins all by which an engine answers, and a build that is refused leaves the engine that was there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fabric_pipelines import cli, models
from fabric_pipelines.errors import DigestMismatch, ManifestRefused
from fabric_pipelines.ids import digest
from fabric_pipelines.models.facts import roots
from fabric_pipelines.worker.engines import building, registry, tensorrt_plan
from fabric_pipelines.worker.engines.opening import read_folder
from fabric_pipelines.worker.engines.plans import plan_folder
from tests.unit.engines.tensorrt_llm_over_standin import TensorRtLlmOverStandin
from tests.unit.engines.tensorrt_over_standin import TensorRtOverStandin

pytestmark = pytest.mark.usefixtures("tiny_known")
VLLM, REFERENCE = "tiny@vllm-a", "tiny@transformers-a"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 512,
    "vocab_size": 256,
    "num_hidden_layers": 2,
    "hidden_size": 64,
}
SIZES = {
    "--weight-quantisation": "none", "--kv-quantisation": "none", "--max-batch-size": "8",
    "--max-num-tokens": "256", "--max-input-len": "128", "--max-seq-len": "256",
}  # fmt: skip


@pytest.fixture
def cache(tiny_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = Path(shutil.copytree(tiny_cache, tmp_path / "models"))
    for name in (VLLM, REFERENCE):
        (cache / "checkpoints" / name).mkdir(parents=True)
        (cache / "checkpoints" / name / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setenv("FABRIC_MODELS", str(cache))
    monkeypatch.setenv("FABRIC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(building, "version", lambda package: "5.24.0")
    return cache


def fabric(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["engine", *arguments])


def build(name: str, *more: str, **changed: str) -> Result:
    sizes = {**SIZES, **{f"--{key.replace('_', '-')}": value for key, value in changed.items()}}
    return fabric("build", name, *(word for pair in sizes.items() for word in pair), *more)


def fingerprint(name: str) -> str:
    done = fabric("fingerprint", name, "--json")
    assert done.exit_code == 0, done.stderr
    return str(json.loads(done.stdout)["fingerprint"])


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "contents.json"
    described = json.loads(path.read_text())
    change(described)
    path.write_text(json.dumps(described))


def part(name: str, cache: Path) -> Path:
    spec = registry.engine_spec(name)
    return models.part_folder(spec.model, spec.part, cache)


def test_other_end_tokens_are_another_engine(cache: Path) -> None:
    """All of these had one fingerprint, and stopped at 10 tokens or at 30."""
    seen = []
    for ends in ((), ("7",), ("9", "11"), ("11", "9", "9")):
        assert build(VLLM, *(word for end in ends for word in ("--eos", end))).exit_code == 0
        seen.append(fingerprint(VLLM))
    assert len(set(seen)) == 3
    assert seen[2] == seen[3], "order and repetition say nothing"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--eos", "999999"), "eos_ids 999999 (--eos) beyond the vocabulary of 256"),
        (("--eos", "256"), "eos_ids 256 (--eos) beyond"),
        (("--eos", "-1"), "eos_ids -1 (--eos) beyond"),
        (("--max-seq-len", "600"), "max_seq_len above the model's context of 512"),
        (("--max-batch-size", "0"), "max_batch_size must be a positive integer"),
    ],
)
@pytest.mark.parametrize("name", [VLLM, REFERENCE])
def test_a_refused_build_leaves_the_engine_that_was_there(
    cache: Path, name: str, given: tuple[str, str], says: str
) -> None:
    """It wrote before it checked: the engine that was there was gone."""
    folder = cache / "checkpoints" / name
    assert build(name, "--eos", "7").exit_code == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    refused = build(name, *given)
    assert refused.exit_code == 4
    assert says in refused.stderr
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert fabric("inspect", name).exit_code == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("vocab_size", "256"), ("vocab_size", -5), ("max_position_embeddings", 512.5),
     ("hidden_size", [64]), ("architectures", ["BertModel"])],
)  # fmt: skip
def test_a_config_that_the_engine_would_not_open_changes_nothing(
    cache: Path, field: str, value: object
) -> None:
    folder = cache / "checkpoints" / REFERENCE
    assert build(REFERENCE).exit_code == 0
    before = [(folder / name).read_bytes() for name in ("manifest.json", "contents.json")]
    (folder / "config.json").write_text(json.dumps({**CONFIG, field: value}))
    refused = build(REFERENCE)
    assert refused.exit_code == 4, refused.stdout
    assert len(refused.stderr.strip().splitlines()) == 1
    assert [(folder / name).read_bytes() for name in ("manifest.json", "contents.json")] == before


def test_a_built_tensorrt_llm_engine_is_described_by_its_ends_or_left(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = TensorRtLlmOverStandin(cache / "checkpoints" / "tiny@tensorrt_llm", monkeypatch)
    first = read_folder(made.folder).fingerprint
    refused = fabric("build", "tiny@tensorrt_llm", "--eos", "100000")
    assert (refused.exit_code, read_folder(made.folder).fingerprint) == (4, first)
    assert "eos_ids 100000 (--eos) beyond the vocabulary" in refused.stderr
    assert fabric("build", "tiny@tensorrt_llm", "--eos", "5").exit_code == 0
    assert read_folder(made.folder).fingerprint != first


@pytest.mark.parametrize("name", ["generate", "hidden", "embed", VLLM])
def test_a_root_that_is_not_that_of_the_files_is_refused_by_name(cache: Path, name: str) -> None:
    """`fingerprint`, "the weights hashed again", gave another one for the same bytes, and the engine opened."""
    folder = cache / "checkpoints" / name
    if name == VLLM:
        assert build(name).exit_code == 0
    else:
        folder = part(name, cache)
    edit(folder, lambda described: described.update(weights_sha256="0" * 64))
    for command in (("inspect", name), ("inspect", name, "--open"), ("fingerprint", name)):
        refused = fabric(*command)
        assert refused.exit_code == 4, command
        assert "has a weights_sha256 that is not the digest of its files" in refused.stderr


@pytest.mark.parametrize(
    ("name", "fact", "value", "says"),
    [
        ("generate", "eos_id", 28, "eos_id says 28, but the end token '<|im_end|>' of config.json is 2"),
        ("generate", "eos_id", 10**6, "beyond the vocabulary"),
        ("generate", "vocab_size", 9, "but vocabulary.json says"),
        ("hidden", "layers", 2, "layers says 2, but trunk.onnx says 3"),
        ("hidden", "dim", 65, "dim says 65, but trunk.onnx says 64"),
        ("embed", "context", 600, "context says 600, but trunk.onnx says 512"),
        (VLLM, "context", 1024, "context says 1024, but config.json says 512"),
        (VLLM, "vocab_size", 300, "vocab_size says 300, but config.json says 256"),
        (VLLM, "weights", "files", "weights"),
        (VLLM, "eos_ids", [300], "eos_ids says 300, beyond the vocabulary of 256"),
    ],
)  # fmt: skip
def test_a_fact_that_the_files_deny_is_refused_by_name(
    cache: Path, name: str, fact: str, value: object, says: str
) -> None:
    folder = cache / "checkpoints" / name
    if name == VLLM:
        assert build(name, "--eos", "7").exit_code == 0
    else:
        folder = part(name, cache)
    edit(folder, lambda described: described["facts"].update({fact: value}))
    refused = fabric("inspect", name, "--open")
    assert refused.exit_code == 4, refused.stdout
    assert says in refused.stderr
    if name != VLLM:
        (said,) = models.verify(folder.parent.name, cache).differences
        assert f"contents.json changed: {fact}" in said
        models.pull(folder.parent.name, cache)
        assert models.verify(folder.parent.name, cache).ok
        assert fabric("inspect", name).exit_code == 0


def test_a_fact_that_no_file_tells_is_pinned_by_the_fingerprint(cache: Path) -> None:
    first = fingerprint("generate")
    edit(part("generate", cache), lambda described: described["facts"].update(rope_base=1.0))
    assert fingerprint("generate") != first
    edit(part("generate", cache), lambda described: described["facts"].update(eps=float("nan")))
    refused = fabric("inspect", "generate")
    assert refused.exit_code == 4
    assert "has facts that are no JSON" in refused.stderr


def test_what_came_into_a_checkpoint_s_folder_later_is_no_part_of_the_engine(cache: Path) -> None:
    """transformers takes `model.safetensors` before the shards of an index, and adapters where it finds them."""
    folder = cache / "checkpoints" / VLLM
    assert build(VLLM).exit_code == 0
    (folder / "notes.txt").write_text("no runtime reads this")
    models.require_whole(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(DigestMismatch, match=r"adapter_config\.json in .* came after"):
        models.require_whole(folder)
    assert fabric("fingerprint", VLLM).exit_code == 4


def test_an_old_fingerprint_can_be_told_and_old_folders_open(cache: Path) -> None:
    """Nothing on disk changed its form; `earlier_fingerprint` stands on completions and receipts of before."""
    folder = part("generate", cache)
    manifest = json.loads((folder / "manifest.json").read_text())
    root = json.loads((folder / "contents.json").read_text())["weights_sha256"]
    told = json.loads(fabric("fingerprint", "generate", "--json").stdout)
    assert told["earlier_fingerprint"] == digest({"manifest": manifest, "weights_sha256": root})
    assert told["fingerprint"] != told["earlier_fingerprint"]


def test_a_description_s_root_is_one_of_those_that_are_written(cache: Path) -> None:
    assert build(VLLM).exit_code == 0
    for folder in (cache / "checkpoints" / VLLM, part("hidden", cache)):
        described = json.loads((folder / "contents.json").read_text())
        assert described["weights_sha256"] in roots(described)


def test_a_plan_that_is_refused_or_killed_leaves_the_plan_that_was_there(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = cache / "plans" / "tiny@tensorrt"
    made = TensorRtOverStandin(part("hidden", cache) / "trunk.onnx", home / "sm_90", monkeypatch)
    made.plan()
    before = {path.name: path.read_bytes() for path in made.folder.iterdir()}

    def refuses(*given: object, **more: object) -> None:
        raise ManifestRefused("at the last moment")

    with monkeypatch.context() as patch:
        patch.setattr(tensorrt_plan, "publish", refuses)
        with pytest.raises(ManifestRefused, match="at the last moment"):
            made.plan(layers=[0])
    assert {path.name: path.read_bytes() for path in made.folder.iterdir()} == before
    assert [path.name for path in home.iterdir()] == ["sm_90"]
    shutil.copytree(made.folder, home / ".building-killed")
    assert plan_folder("tiny@tensorrt", cache) == made.folder
    made.plan(layers=[0])
    assert read_folder(made.folder).facts["layers"] == [0]


def test_a_checkpoint_s_remedy_deletes_nothing(cache: Path) -> None:
    """It said: delete its folder and pull again, which were its owner's only weights, of a model that no pull knows."""
    folder = cache / "checkpoints" / REFERENCE
    assert build(REFERENCE).exit_code == 0
    engine = registry.construct_engine(REFERENCE, cache=cache, threads=1)

    def fails() -> None:
        raise RuntimeError("header too large")

    engine._load = fails  # type: ignore[attr-defined]
    with pytest.raises(Exception, match="header too large") as refusal:
        engine.open()
    told = str(refusal.value)
    assert f"put good ones into {folder} and run `fabric engine build {REFERENCE}` again" in told
    assert "delete" not in told
    assert "models pull" not in told
