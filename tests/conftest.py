"""What every test may rely on: a home of its own, and no setting that leaks in from the shell."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from fabric_pipelines import settings

pytest_plugins = ["tests.support_quickstart"]


def pytest_configure(config: pytest.Config) -> None:
    """Beta APIs of Dagster that we use on purpose. Not in pyproject.toml: a GPU machine runs `tests/gpu` without
    Dagster, and there a filter that names its class is an error of its own."""
    # Started in the background by a script, a process inherits SIGINT as ignored, and so would its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if importlib.util.find_spec("hypothesis"):
        _judge_no_example_by_its_time()
    if importlib.util.find_spec("dagster_shared"):
        for kind in ("BetaWarning", "PreviewWarning"):
            config.addinivalue_line(
                "filterwarnings", f"ignore::dagster_shared.utils.warnings.{kind}"
            )


def _judge_no_example_by_its_time() -> None:
    """Hypothesis fails an example above 200 ms, and a strategy that is slow to draw: on a busy machine both."""
    from hypothesis import HealthCheck, settings

    settings.register_profile("fabric", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("fabric")


KEEP = {"FABRIC_MODELS", "FABRIC_REQUIRE_GPU", "FABRIC_REQUIRE_PARITY", "FABRIC_PG_BIN"}


@pytest.fixture(autouse=True)
def _no_settings_from_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("FABRIC_") and name not in KEEP]:
        monkeypatch.delenv(name)


@pytest.fixture
def home_settings(tmp_path: Path) -> settings.Settings:
    """Settings whose home is the test's own folder."""
    return settings.load({"home": tmp_path / "home"}, {}, tmp_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on the one real quickstart run last: its services stay up until the session ends."""
    items.sort(key=lambda item: "quickstarted" in getattr(item, "fixturenames", ()))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where the run is spread over processes (`-n 3`)."""
    from tests.support_spread import ByFile

    return ByFile(config, log)
