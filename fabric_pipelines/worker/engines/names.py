"""Names that become folders: an engine is a folder of the model cache by its own name."""

from __future__ import annotations

from pathlib import Path

from fabric_pipelines.errors import UsageError

NAME_BYTES_MAX = 200


def folder_of(parent: Path, name: str) -> Path:
    """`parent`/`name`; UsageError unless `name` is a plain folder name, which leads nowhere else."""
    plain = (
        name
        and not name.startswith(".")
        and not set(name) & {"/", "\\"}
        and name.isprintable()
        and name.isascii()
        and len(name) <= NAME_BYTES_MAX
    )
    if not plain:
        raise UsageError(
            f"engine {name[:NAME_BYTES_MAX]!r} is no name of a folder: an engine's name has 1 to {NAME_BYTES_MAX} printable "
            "ASCII characters, no slash or backslash, and no dot at its beginning"
        )
    return parent / name
