"""What quickstart says when its run fails, is stopped, or meets services that cannot serve it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
import pytest

from fabric_pipelines import quickstart
from fabric_pipelines.errors import (
    BrokerUnavailable,
    CheckFailed,
    Interrupted,
    StorageFailed,
    UsageError,
)
from fabric_pipelines.settings import Settings
from fabric_pipelines.telemetry import ProgressBoard


def definitions(asset: dg.AssetsDefinition, *checks: dg.AssetChecksDefinition) -> dg.Definitions:
    return dg.Definitions(assets=[asset], asset_checks=checks, executor=dg.in_process_executor)


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


def materialise(
    monkeypatch: pytest.MonkeyPatch, instance: dg.DagsterInstance, defs: dg.Definitions
) -> str:
    monkeypatch.setattr(quickstart, "build_defs", lambda overrides: defs)
    monkeypatch.setattr(quickstart, "RUN_TAGS", {})
    return quickstart._materialise(instance)


def test_a_fault_inside_a_step_keeps_its_type(
    monkeypatch: pytest.MonkeyPatch, instance: dg.DagsterInstance
) -> None:
    @dg.asset
    def broken():
        raise BrokerUnavailable("no broker answers; run `fabric up`")

    with pytest.raises(BrokerUnavailable, match="fabric up"):
        materialise(monkeypatch, instance, definitions(broken))


def test_a_blocking_check_that_fails_is_a_failed_check(
    monkeypatch: pytest.MonkeyPatch, instance: dg.DagsterInstance
) -> None:
    @dg.asset
    def fine():
        return None

    @dg.asset_check(asset=fine, blocking=True)
    def never():
        return dg.AssetCheckResult(passed=False)

    with pytest.raises(CheckFailed, match="never"):
        materialise(monkeypatch, instance, definitions(fine, never))


@pytest.mark.parametrize("signal", [KeyboardInterrupt, dg.DagsterExecutionInterruptedError])
def test_a_stop_says_what_is_kept(
    monkeypatch: pytest.MonkeyPatch,
    home_settings: Settings,
    signal: type[BaseException],
    tmp_path: Path,
) -> None:
    @contextmanager
    def stopped(*_: object) -> Iterator[None]:
        raise signal
        yield

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstart, "_pull_models", lambda *_: 0.0)
    monkeypatch.setattr(quickstart, "_prepare", lambda *_: {})
    monkeypatch.setattr(quickstart, "_services", stopped)
    with pytest.raises(Interrupted, match="run `fabric quickstart` again"):
        quickstart.run(home_settings, progress=ProgressBoard(quiet=True))


@pytest.mark.parametrize("fault", [BrokerUnavailable("no broker answers"), RuntimeError("disk")])
def test_a_home_deleted_in_mid_run_is_what_is_said(
    monkeypatch: pytest.MonkeyPatch, home_settings: Settings, fault: Exception, tmp_path: Path
) -> None:
    @contextmanager
    def gone(*_: object) -> Iterator[None]:
        shutil.rmtree(home_settings.home)
        raise fault
        yield

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstart, "_pull_models", lambda *_: 0.0)
    monkeypatch.setattr(quickstart, "_prepare", lambda *_: {})
    monkeypatch.setattr(quickstart, "_services", gone)
    with pytest.raises(StorageFailed, match="home was deleted while quickstart ran") as said:
        quickstart.run(home_settings, progress=ProgressBoard(quiet=True))
    assert said.value.__cause__ is fault


def test_running_services_without_a_needed_engine_are_named(
    monkeypatch: pytest.MonkeyPatch, home_settings: Settings
) -> None:
    class Client:
        @classmethod
        def of(cls, settings: Settings, *, role: str) -> Client:
            return cls()

        def __enter__(self) -> Client:
            return self

        def __exit__(self, *_: object) -> None: ...
        def status(self) -> Client:
            return self

        consumers = [{"engine": name} for name in quickstart.ENGINES[1:]]  # noqa: RUF012

    monkeypatch.setattr(quickstart, "BrokerClient", Client)
    with pytest.raises(UsageError, match=quickstart.ENGINES[0]):
        quickstart._require_workers(home_settings)
