"""Pulled once, converted once, then opened offline; whatever goes wrong, the cache stays whole."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fabric_pipelines import models
from fabric_pipelines.cli import app
from fabric_pipelines.errors import (
    DigestMismatch,
    MissingDependency,
    ModelMissing,
    SourceUnreachable,
    StorageFailed,
    UsageError,
)
from fabric_pipelines.models import cache as cache_module
from fabric_pipelines.models import catalogue, recipes
from fabric_pipelines.models.cache import lock_if_free
from fabric_pipelines.models.catalogue import ModelSpec
from fabric_pipelines.supervise import doctor
from fabric_pipelines.telemetry import ProgressBoard

pytestmark = pytest.mark.usefixtures("known")
NAME = "tiny-llama"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def _visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_a_pulled_model_has_every_part_and_its_sources(cache: Path, tiny_folder: Path) -> None:
    files = models.pull(NAME, cache, source=str(tiny_folder))
    assert set(files.parts) == {"tokeniser", "ctranslate2-int8", "onnxruntime-fp32"}
    assert {"manifest.json", "contents.json", "trunk.onnx", "trunk.weights"} == set(
        _visible(files.parts["onnxruntime-fp32"])
    )
    assert files.size == sum(row.size for row in models.installed(cache))
    assert models.verify(NAME, cache).differences == ()


def test_a_second_pull_touches_nothing_and_needs_no_source(cache: Path, tiny_folder: Path) -> None:
    first = models.pull(NAME, cache, source=str(tiny_folder))
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    assert models.pull(NAME, cache, source="/no/such/place") == first
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before


def test_a_lost_conversion_is_made_again_from_the_kept_sources(
    cache: Path, tiny_folder: Path
) -> None:
    files = models.pull(NAME, cache, source=str(tiny_folder))
    digests = models.contents(files.parts["ctranslate2-int8"])["files"]
    shutil.rmtree(files.parts["ctranslate2-int8"])
    with pytest.raises(ModelMissing, match="fabric models pull tiny-llama"):
        models.located(NAME, cache)
    models.pull(NAME, cache, source="/no/such/place")
    assert models.contents(files.parts["ctranslate2-int8"])["files"] == digests


def test_kept_sources_are_hashed_again_before_use(cache: Path, tiny_folder: Path) -> None:
    files = models.pull(NAME, cache, source=str(tiny_folder))
    shutil.rmtree(files.parts["tokeniser"])
    weights = files.sources / "tiny.gguf"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    damaged = weights.read_bytes()
    with pytest.raises(
        SourceUnreachable, match=r"tiny\.gguf changed: .*, and it cannot be had again"
    ):
        models.pull(NAME, cache, source="/no/such/place")
    assert weights.read_bytes() == damaged
    assert not files.parts["tokeniser"].exists()
    models.pull(NAME, cache, source=str(tiny_folder))
    assert models.verify(NAME, cache).ok


def _damages(files: models.ModelFiles) -> dict[str, Path]:
    """A file of every kind that a model has in the cache."""
    engine = files.parts["onnxruntime-fp32"]
    return {
        "source": files.sources / files.spec.weights.name,
        "tokeniser": files.parts["tokeniser"] / "tokenizer.json",
        "weights": engine / "trunk.weights",
        "graph": engine / "trunk.onnx",
        "contents": engine / recipes.CONTENTS,
        "manifest": engine / recipes.MANIFEST,
    }


@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
@pytest.mark.parametrize(
    "what", ["source", "tokeniser", "weights", "graph", "contents", "manifest"]
)
def test_whatever_is_damaged_is_named_by_verify_and_doctor_and_made_again_by_pull(
    cache: Path, tiny_folder: Path, what: str, how: str
) -> None:
    files = models.pull("tiny-bert", cache, source=str(tiny_folder))
    path = _damages(files)[what]
    content = path.read_bytes()
    # of text so that it stays text: a digit of a digest or of a limit
    at = max(content.rfind(b"1"), 0) if what in ("contents", "manifest") else len(content) // 2
    bad = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(bad if how == "flipped" else content[:-9])
    found = models.verify("tiny-bert", cache)
    assert not found.ok
    assert found.missing == ()
    folder = str(path.parent)
    assert found.differences
    assert all(line.startswith(folder) for line in found.differences), found.differences
    finding = doctor.check_model("tiny-bert", cache)
    assert (finding.status, finding.found) == ("fail", "; ".join(found.differences))
    assert "`fabric models pull tiny-bert`" in finding.fix
    models.pull("tiny-bert", cache, source=str(tiny_folder))
    assert models.verify("tiny-bert", cache).ok
    assert doctor.check_model("tiny-bert", cache).status == "ok"
    assert path.read_bytes() == content


def test_a_missing_part_hides_no_damage_and_both_are_told_by_kind(
    cache: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = models.pull("tiny-bert", cache, source=str(tiny_folder))
    monkeypatch.setenv("FABRIC_MODELS", str(cache))
    shutil.rmtree(files.parts["onnxruntime-fp32"])
    for arguments in (["verify"], ["verify", "tiny-bert"]):
        done = CliRunner().invoke(app, ["models", *arguments, "--json"])
        assert done.exit_code == 2
        answer = json.loads(done.stdout)
        assert (answer["ok"], answer["error"]["kind"]) == (False, "ModelMissing")
        [row] = answer["models"]
        assert (row["differences"], row["ok"]) == ([], False)
        assert row["missing"] == [f"{files.parts['onnxruntime-fp32']} is missing"]
    assert doctor.check_model("tiny-bert", cache).status == "warn"
    source = files.sources / files.spec.weights.name
    source.write_bytes(source.read_bytes()[:-1])
    done = CliRunner().invoke(app, ["models", "verify"])
    assert done.exit_code == 3
    assert "1 DIFFER, 1 MISSING" in done.stdout
    assert str(source) in done.stdout
    assert str(files.parts["onnxruntime-fp32"]) in done.stdout
    assert "run `fabric models pull tiny-bert`" in done.stderr
    assert doctor.check_model("tiny-bert", cache).status == "fail"


def test_a_part_whose_runtime_is_not_installed_is_looked_at_and_not_missed(
    cache: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = models.pull("tiny-bert", cache, source=str(tiny_folder))
    whole = models.verify("tiny-bert", cache)

    def absent(name: str) -> str:
        raise recipes.PackageNotFoundError(name)

    monkeypatch.setattr(recipes, "version", absent)
    assert models.verify("tiny-bert", cache) == whole
    weights = files.parts["onnxruntime-fp32"] / "trunk.weights"
    weights.write_bytes(weights.read_bytes() + b"?")
    assert models.verify("tiny-bert", cache).differences == (
        f"{weights} changed: its sha256 is another one",
    )


def test_wrong_bytes_leave_nothing_behind(cache: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    (wrong / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(DigestMismatch, match=r"wrong/tiny\.gguf is not the pinned"):
        models.pull(NAME, cache, source=str(wrong))
    assert _visible(cache / NAME) == []


def test_an_interrupted_conversion_is_not_taken_for_a_whole_one(
    cache: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "write_part", interrupted)
        with pytest.raises(KeyboardInterrupt):
            models.pull(NAME, cache, source=str(tiny_folder))
    assert [name.partition("-")[0] for name in _visible(cache / NAME)] == ["sources"]


def test_what_a_killed_pull_left_is_cleared_by_the_next(cache: Path, tiny_folder: Path) -> None:
    dead = cache / NAME / ".building-dead"
    dead.mkdir(parents=True)
    (dead / "half").write_bytes(b"half")
    models.pull(NAME, cache, source=str(tiny_folder))
    assert not dead.exists()


def test_a_full_or_readonly_disk_is_one_sentence(cache: Path, tiny_folder: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(StorageFailed, match=r"model cache .* cannot be written"):
        models.pull(NAME, cache, source=str(tiny_folder))


def _pull_in_child(cache: Path, source: str, spec: ModelSpec, answers: object) -> None:
    catalogue.MODELS = {spec.name: spec}
    models.pull(spec.name, cache, source=source)
    answers.put(sorted(path.name for path in (cache / spec.name).iterdir()))  # type: ignore[attr-defined]


def test_two_processes_pulling_at_once_convert_once(
    cache: Path, tiny_folder: Path, tiny_llama: ModelSpec
) -> None:
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    children = [
        spawn.Process(target=_pull_in_child, args=(cache, str(tiny_folder), tiny_llama, answers))
        for _ in range(2)
    ]
    for child in children:
        child.start()
    found = [answers.get(timeout=60) for _ in children]
    for child in children:
        child.join(timeout=60)
    assert [child.exitcode for child in children] == [0, 0]
    assert found[0] == found[1]
    assert len(found[0]) == 5  # the lock, the sources, three parts


def test_a_missing_converter_names_the_package_and_the_command(
    cache: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> str:
        raise recipes.PackageNotFoundError(name)

    monkeypatch.setattr(recipes, "version", absent)
    with pytest.raises(MissingDependency, match=r'pip install "fabric-pipelines\[embedded\]"'):
        models.pull(NAME, cache, source=str(tiny_folder))


def test_a_new_runtime_gets_its_own_conversion_and_the_old_one_can_be_pruned(
    cache: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.pull("tiny-bert", cache, source=str(tiny_folder))
    before = models.located("tiny-bert", cache).parts
    monkeypatch.setattr(recipes, "version", lambda name: "99.0")
    after = models.pull("tiny-bert", cache).parts
    assert set(before.values()).isdisjoint(after.values())
    old = sum(row.size for row in models.installed(cache) if not row.current)
    assert models.prune(models.outdated(cache)) == old > 0
    assert {row.folder for row in models.installed(cache) if row.part != "sources"} == set(
        after.values()
    )


def test_a_changed_file_is_found_by_verify(cache: Path, tiny_folder: Path) -> None:
    files = models.pull("tiny-bert", cache, source=str(tiny_folder))
    weights = files.parts["onnxruntime-fp32"] / "trunk.weights"
    content = bytearray(weights.read_bytes())
    content[0] ^= 1
    weights.write_bytes(content)
    assert models.verify("tiny-bert", cache).differences == (
        f"{weights} changed: its sha256 is another one",
    )


def test_a_changed_source_a_missing_file_and_lost_contents_are_found_by_verify(
    cache: Path, tiny_folder: Path
) -> None:
    files = models.pull("tiny-bert", cache, source=str(tiny_folder))
    whole = models.verify("tiny-bert", cache)
    assert whole.differences == ()
    source = files.sources / files.spec.weights.name
    source.write_bytes(source.read_bytes()[:-1])
    tokeniser = files.parts["tokeniser"] / "tokenizer.json"
    tokeniser.unlink()
    described = files.parts["onnxruntime-fp32"] / recipes.CONTENTS
    described.write_text("{")
    found = models.verify("tiny-bert", cache)
    assert set(found.differences) == {
        f"{described} cannot be read",
        f"{source} changed: its sha256 is another one",
        f"{tokeniser} is missing",
    }
    assert found.files < whole.files


def test_what_a_killed_pull_left_is_pruned_unless_somebody_pulls(
    cache: Path, tiny_folder: Path
) -> None:
    models.pull("tiny-bert", cache, source=str(tiny_folder))
    left = cache / "tiny-bert" / ".building-x"
    left.mkdir()
    (left / "half").write_bytes(b"x" * 10)
    with lock_if_free(cache / "tiny-bert") as free:
        assert free
        assert models.outdated(cache) == []
    assert [(row.part, row.folder, row.size) for row in models.outdated(cache)] == [
        ("unfinished", left, 10)
    ]
    assert models.prune(models.outdated(cache)) == 10
    assert not left.exists()
    assert models.verify("tiny-bert", cache).differences == ()


def test_an_unknown_model_is_refused_with_those_that_exist(cache: Path) -> None:
    with pytest.raises(UsageError, match="known are tiny-llama, tiny-bert"):
        models.pull("gpt-9", cache)


def test_a_pull_says_what_it_does(
    cache: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models.pull("tiny-bert", cache, source=str(tiny_folder), progress=ProgressBoard())
    said = capsys.readouterr().err
    assert f"tiny-bert: getting 0 MB from {tiny_folder}" in said
    assert "tiny-bert: onnxruntime-fp32 ready in" in said
