"""The error tree is the contract between processes: names, exit codes and retry class are pinned."""

from __future__ import annotations

import errno
import os

import pytest

from fabric_pipelines import errors


def _all_errors(
    root: type[errors.FabricError] = errors.FabricError,
) -> set[type[errors.FabricError]]:
    return {root}.union(*(_all_errors(cls) for cls in root.__subclasses__()))


def test_every_error_of_the_module_is_drawn_in_its_docstring() -> None:
    drawn = errors.__doc__ or ""
    named = {cls.__name__ for cls in _all_errors() if cls.__module__ == errors.__name__}
    assert {name for name in named if name not in drawn} == set()


def test_every_error_but_the_root_is_transient_or_terminal() -> None:
    for cls in _all_errors() - {errors.FabricError}:
        assert issubclass(cls, errors.TransientError) != issubclass(cls, errors.TerminalError)


@pytest.mark.parametrize(
    ("cls", "code"),
    [
        (errors.EngineFailed, 1),
        (errors.UsageError, 2),
        (errors.SettingsError, 2),
        (errors.CheckFailed, 3),
        (errors.BalanceBroken, 3),
        (errors.ManifestRefused, 4),
        (errors.AlreadyRunning, 4),
        (errors.Interrupted, 130),
    ],
)
def test_exit_codes_are_those_that_scripts_rely_on(
    cls: type[errors.FabricError], code: int
) -> None:
    assert cls.exit_code == code


def test_an_error_keeps_its_type_by_its_code() -> None:
    for cls in _all_errors():
        assert errors.by_code(cls.__name__) is cls
    assert errors.by_code("NoSuchError") is errors.FabricError


def test_a_missing_package_names_the_install_command() -> None:
    fault = errors.MissingDependency("ctranslate2", "embedded", "the generation engine")
    assert 'pip install "fabric-pipelines[embedded]"' in str(fault)


def test_an_error_keeps_type_and_sentence_in_the_last_line_of_a_log() -> None:
    line = errors.as_line(errors.DigestMismatch("file x\nis not the pinned one"))
    assert line == "DigestMismatch: file x is not the pinned one"
    assert errors.from_line(line) == (errors.DigestMismatch, "file x is not the pinned one")
    missing = errors.MissingDependency("onnx", "embedded", "embedding")
    assert errors.from_line(errors.as_line(missing)) == (errors.MissingDependency, str(missing))
    for other in ("", "broker ready", "KeyError: 'x'", "errors.StorageFailed: x", "Refused"):
        assert errors.from_line(other) is None


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ENOSPC, "free some space"), (errno.EROFS, "FABRIC_HOME"), (errno.EIO, "error")],
)
def test_an_unexpected_oserror_names_its_file_and_a_remedy(number: int, remedy: str) -> None:
    fault = errors.storage_failed(OSError(number, os.strerror(number), "/x/y"))
    assert str(fault).startswith("/x/y: ")
    assert remedy in str(fault)
