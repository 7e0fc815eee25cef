"""One real quickstart for the whole session: the end-to-end tests and the browser tests look at the same one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fabric_pipelines.errors import MissingDependency, SourceUnreachable
from fabric_pipelines.settings import Settings, load
from tests.support import skip_or_fail

if TYPE_CHECKING:
    import dagster as dg


@dataclass
class Demo:
    """A working folder with its own home; what quickstart reported there, first and second time."""

    folder: Path
    settings: Settings
    reports: list[dict[str, Any]] = field(default_factory=list)

    def quickstart(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "fabric_pipelines", "quickstart", "--json"],
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        self.reports.append(json.loads(done.stdout))

    def environment(self) -> dict[str, str]:
        return {**os.environ, **self.settings.as_environment()}

    def instance(self) -> dg.DagsterInstance:
        import dagster as dg

        return dg.DagsterInstance.from_config(str(self.settings.dagster_home))


@pytest.fixture(scope="session")
def quickstarted() -> Iterator[Demo]:
    """Run once with nothing running, then again beside services that stay up for the tests."""
    # Imported here: every session loads this module, also on a GPU machine without Dagster or Postgres.
    from fabric_pipelines import models, supervise

    # short, and open to the server's own user: pytest's tmp_path is neither
    folder = Path(tempfile.mkdtemp(prefix="fabric-quick-"))
    folder.chmod(0o755)
    flags = {"home": folder / "home", "models": os.environ.get("FABRIC_MODELS")}
    settings = load(flags, environ={}, folder=folder)
    demo = Demo(folder, settings)
    try:
        for name in models.MODELS:
            models.pull(name, settings.models)
        demo.quickstart()
        assert not supervise.state(settings).running, "quickstart left its services running"
        supervise.up(settings, ui=False)
        demo.quickstart()
        yield demo
    except (SourceUnreachable, MissingDependency) as fault:
        skip_or_fail(str(fault))
    finally:
        supervise.down(settings)
        shutil.rmtree(folder)
