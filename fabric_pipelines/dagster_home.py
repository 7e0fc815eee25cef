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
ENV_NAME = ".env"


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


def _lines_of(settings: Settings) -> dict[str, Path]:
    return {"DAGSTER_HOME": settings.dagster_home, "FABRIC_HOME": settings.home}


def write_env_file(settings: Settings, folder: Path) -> Path:
    """Set DAGSTER_HOME and FABRIC_HOME in `folder`/.env; other lines of the file stay as they are."""
    path = folder / ENV_NAME
    ours = _lines_of(settings)
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


def clear_env_file(settings: Settings, folder: Path) -> Path | None:
    """Take out of `folder`/.env what `write_env_file` put there for this home, and the file with it if nothing else
    is left; its path if there was any of it. A line that names another home stays."""
    path = folder / ENV_NAME
    ours = {f"{name}={value}" for name, value in _lines_of(settings).items()}
    try:
        lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
        kept = [line for line in lines if line.strip() not in ours]
        if kept == lines:
            return None
        if kept:
            path.write_text("".join(kept))
        else:
            path.unlink()
    except (OSError, UnicodeDecodeError) as fault:
        raise StorageFailed(
            f"{path} still names the emptied home and cannot be changed ({fault}): take these lines out of it: "
            f"{', '.join(sorted(ours))}"
        ) from fault
    return path
