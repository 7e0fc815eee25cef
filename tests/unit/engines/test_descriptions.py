"""An engine folder that describes itself wrongly is one sentence with the file and the remedy, whoever reads it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fabric_pipelines import cli, models
from fabric_pipelines.errors import DigestMismatch, ManifestRefused
from fabric_pipelines.worker.engines import registry
from fabric_pipelines.worker.engines.checkpoint import read_config
from fabric_pipelines.worker.engines.opening import read_folder
from tests.unit.engines.vllm_over_standin import VllmOverStandin

pytestmark = pytest.mark.usefixtures("tiny_known")
Described = dict[str, Any]


@pytest.fixture
def folder(tiny_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the engine "hidden", in a cache that a test may damage."""
    cache = Path(shutil.copytree(tiny_cache, tmp_path / "cache"))
    monkeypatch.setenv("FABRIC_MODELS", str(cache))
    monkeypatch.setenv("FABRIC_HOME", str(tmp_path / "home"))
    spec = registry.engine_spec("hidden")
    return models.part_folder(spec.model, spec.part, cache)


def cache_of(folder: Path) -> Path:
    return folder.parent.parent


def edited(**fields: Any) -> Callable[[bytes], bytes]:
    def edit(given: bytes) -> bytes:
        described = {**json.loads(given), **fields}
        return json.dumps({k: v for k, v in described.items() if v != "absent"}).encode()

    return edit


def fact(**fields: Any) -> Callable[[bytes], bytes]:
    def edit(given: bytes) -> bytes:
        described = json.loads(given)
        facts = {**described["facts"], **fields}
        described["facts"] = {k: v for k, v in facts.items() if v != "absent"}
        return json.dumps(described).encode()

    return edit


ENTRY = {"size": 1, "sha256": "0" * 64}
FAULTS: list[tuple[Callable[[bytes], bytes], str, str]] = [
    (lambda given: b"", "is no description of a folder", ""),
    (lambda given: given[: len(given) // 2], "is no description of a folder", ""),
    (lambda given: b"[1]", "it is not an object", ""),
    (lambda given: b"\xff" + given, "is no description of a folder", ""),
    (lambda given: b"[" * 100_000, "nested too deep", ""),
    (lambda given: given.replace(b"{", b'{"facts": {},', 1), "facts is there twice", ""),
    (edited(weights_sha256="absent"), "has no weights_sha256", "weights_sha256"),
    (edited(weights_sha256=5), "has no weights_sha256", "weights_sha256"),
    (edited(files="absent"), "has no object files", "files"),
    (edited(files=[1]), "has no object files", "files"),
    (edited(facts="absent"), "has no object facts", "facts"),
    (edited(facts=None), "has no object facts", "facts"),
    (edited(files={"trunk.onnx": 3}), "says of 'trunk.onnx' no size and sha256", "files"),
    (edited(files={"a": {"size": -1, "sha256": "0" * 64}}), "says of 'a' no size", "files"),
    (edited(files={"../a": ENTRY}), "it is no file beside it", "files"),
    (edited(files={"..": ENTRY}), "it is no file beside it", "files"),
    (fact(context="absent"), "says nothing of context", "context"),
    (fact(context="long"), "says 'long' of context", "context"),
    (fact(vocab_size=None), "says None of vocab_size", "vocab_size"),
    (fact(dim=True), "says True of dim", "dim"),
    (fact(dim="absent"), "says nothing of dim", "dim"),
    (fact(layers=[]), "says [] of layers", "layers"),
    (fact(layers="absent"), "says nothing of layers", "layers"),
    (fact(eos_ids=3), "says 3 of eos_ids", "eos_ids"),
]


@pytest.mark.parametrize(("edit", "says", "field"), FAULTS)
def test_a_description_at_fault_is_refused_with_its_file_and_the_remedy(
    folder: Path, edit: Callable[[bytes], bytes], says: str, field: str
) -> None:
    path = folder / "contents.json"
    path.write_bytes(edit(path.read_bytes()))
    with pytest.raises(ManifestRefused) as refusal:
        registry.construct_engine("hidden", cache=cache_of(folder), threads=1)
    told = str(refusal.value)
    assert says in told
    assert told.startswith(str(path))
    assert told.endswith(f"delete {folder} and run `fabric models pull tiny-llama` again")
    assert refusal.value.fields == ((field,) if field else ())


def test_a_description_that_is_gone_is_a_refusal_of_every_command(folder: Path) -> None:
    (folder / "contents.json").unlink()
    for command in ("inspect", "fingerprint", "probe"):
        done = CliRunner().invoke(cli.app, ["engine", command, "hidden"])
        assert done.exit_code == 4, (command, done.exception)
        assert "contents.json cannot be read (No such file or directory)" in done.stderr


@pytest.mark.parametrize("what", ["gone", "a folder"])
def test_a_weights_file_that_is_not_there_is_named_with_the_remedy(folder: Path, what: str) -> None:
    weights = folder / "trunk.weights"
    size = weights.stat().st_size
    weights.unlink()
    if what == "a folder":
        weights.mkdir()
    with pytest.raises((ManifestRefused, DigestMismatch), match=r"trunk\.weights") as refusal:
        registry.open_engine("hidden", cache=cache_of(folder), threads=1)
    assert "run `fabric models pull tiny-llama` again" in str(refusal.value)
    with pytest.raises(DigestMismatch, match=r"trunk\.weights cannot be read"):
        models.require_whole(folder)
    assert size > 0


def test_the_remedy_of_a_described_checkpoint_is_to_describe_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints").mkdir()
    made = VllmOverStandin(tmp_path / "checkpoints" / "tiny@vllm", monkeypatch)
    path = made.folder / "contents.json"
    path.write_bytes(fact(eos_ids="absent")(path.read_bytes()))
    with pytest.raises(ManifestRefused, match="says nothing of eos_ids") as refusal:
        made.build()
    assert "run `fabric engine build tiny@vllm` again" in str(refusal.value)


@pytest.mark.parametrize("named", ['"LlamaForCausalLM"', "[5]", '{"a": 1}'])
def test_a_checkpoint_s_config_of_wrong_types_is_refused(tmp_path: Path, named: str) -> None:
    (tmp_path / "config.json").write_text(
        f'{{"architectures": {named}, "max_position_embeddings": 8, "vocab_size": 9}}'
    )
    with pytest.raises(ManifestRefused, match="no list of names"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 9, "vocab_size": 10}')
    with pytest.raises(ManifestRefused, match="vocab_size is there twice"):
        read_config(tmp_path)


@pytest.mark.parametrize("field", ["max_batch_size", "version"])
def test_a_manifest_that_names_a_field_twice_is_refused_by_its_name(
    folder: Path, field: str
) -> None:
    path = folder / "manifest.json"
    value = json.dumps(json.loads(path.read_text())[field])
    path.write_text(path.read_text().replace("{", f'{{"{field}": {value},', 1))
    with pytest.raises(ManifestRefused, match=f"{field} is there twice") as refusal:
        read_folder(folder)
    assert refusal.value.fields == (field,)


@pytest.mark.parametrize("name", ["generate", "hidden", "embed"])
def test_inspect_refuses_a_device_that_the_engine_does_not_run_on(folder: Path, name: str) -> None:
    """It answered "cpu" to the question whether this runs on a card."""
    refused = CliRunner().invoke(cli.app, ["engine", "inspect", name, "--device", "cuda"])
    assert refused.exit_code == 4, refused.stdout
    assert f"engine {name} runs on cpu only, not on cuda" in refused.stderr
    unknown = CliRunner().invoke(cli.app, ["engine", "inspect", name, "--device", "gpu"])
    assert unknown.exit_code == 2
    assert "device 'gpu' is no kind of device; it is cpu or cuda" in unknown.stderr
    assert (
        CliRunner().invoke(cli.app, ["engine", "inspect", name, "--device", "cpu"]).exit_code == 0
    )
