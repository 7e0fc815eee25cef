"""The folder of the Dagster instance: its dagster.yaml and workspace.yaml, and the .env by which plain `dagster
dev` finds it.

All are written once and never over what a person put there. The .env belongs to the working folder, is
ignored by git, and holds two paths; without it `dagster dev` works too, on an instance that ends with it.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from fabric_pipelines.errors import StorageFailed
from fabric_pipelines.settings import Settings

CONFIG_NAME = "dagster.yaml"
WORKSPACE_NAME = "workspace.yaml"
QUIET_NAME = "dagster.quiet.yaml"
NO_CAPTURE = """
compute_logs:
  module: dagster._core.storage.noop_compute_log_manager
  class: NoOpComputeLogManager
"""


def ensure_dagster_home(settings: Settings) -> Path:
    """The instance's folder with both files in it. Raises StorageFailed where it may not write."""
    folder = settings.dagster_home
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (CONFIG_NAME, WORKSPACE_NAME):
            if not (folder / name).exists():
                text = files("fabric_pipelines").joinpath(name).read_text()
                (folder / name).write_text(text)
    except OSError as fault:
        raise StorageFailed(
            f"{folder} cannot be written ({fault.strerror}); choose another folder with FABRIC_HOME"
        ) from fault
    return folder


def write_quiet_config(folder: Path) -> str:
    """The name of a second configuration of the same instance that captures no output of steps.

    Dagster captures by pointing stdout and stderr at a file and starting four processes a step that copy it
    back: a progress bar in this process would stand still until the step ends."""
    text = (folder / CONFIG_NAME).read_text()
    if "compute_logs:" not in text:
        text += NO_CAPTURE
    try:
        (folder / QUIET_NAME).write_text(text)
    except OSError as fault:
        raise StorageFailed(
            f"{folder / QUIET_NAME} cannot be written ({fault.strerror})"
        ) from fault
    return QUIET_NAME


def write_env_file(settings: Settings, folder: Path) -> Path:
    """Set DAGSTER_HOME and FABRIC_HOME in `folder`/.env; other lines of the file stay as they are."""
    path = folder / ".env"
    ours = {"DAGSTER_HOME": settings.dagster_home, "FABRIC_HOME": settings.home}
    try:
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in lines if line.partition("=")[0].strip() not in ours]
        content = "\n".join([*kept, *(f"{name}={value}" for name, value in ours.items())]) + "\n"
        if not path.exists() or path.read_text() != content:
            path.write_text(content)
    except OSError as fault:
        raise StorageFailed(
            f"{path} cannot be written ({fault.strerror}); set DAGSTER_HOME={settings.dagster_home}"
        ) from fault
    return path
