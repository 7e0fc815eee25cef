"""Building: make the folder that an engine is opened from, each kind in its own way.

The shipped engines are converted from the catalogue's models and know their sizes; a checkpoint (vllm, transformers)
is described where it lies, and all of its sizes and quantisations must be said: a manifest has no defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fabric_pipelines import models
from fabric_pipelines.errors import MissingDependency, UsageError
from fabric_pipelines.models.recipes import Limits
from fabric_pipelines.telemetry import ProgressBoard
from fabric_pipelines.worker.engines.checkpoint import CHECKPOINTS, describe
from fabric_pipelines.worker.engines.registry import checkpoint_runtime, engine_spec


@dataclass(frozen=True, slots=True)
class Declared:
    """What a caller says of a checkpoint; None = not said. Names are those of the manifest."""

    weight_quantisation: str | None = None
    kv_quantisation: str | None = None
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_input_len: int | None = None
    max_seq_len: int | None = None

    def options(self, *, said: bool) -> list[str]:
        """Command-line names of the fields that were said, or were not."""
        return [
            f"--{field.name.replace('_', '-')}"
            for field in fields(self)
            if (getattr(self, field.name) is not None) is said
        ]


def build(
    name: str,
    declared: Declared,
    *,
    cache: Path,
    eos_ids: tuple[int, ...] = (),
    progress: ProgressBoard | None = None,
) -> None:
    """Make the engine `name` ready to open; idempotent. UsageError names what must, or may not, be said."""
    runtime = checkpoint_runtime(name)
    if runtime is None:
        given = [*declared.options(said=True), *(["--eos"] if eos_ids else [])]
        spec = engine_spec(name)
        if given:
            raise UsageError(
                f"{', '.join(given)} cannot be chosen for {name}: its conversion fixes them"
            )
        models.pull(spec.model, cache, progress=progress)
        return
    missing = declared.options(said=False)
    if missing:
        raise UsageError(f"building {name} needs {', '.join(missing)}: a manifest has no defaults")
    assert declared.weight_quantisation is not None
    assert declared.kv_quantisation is not None
    folder = cache / CHECKPOINTS / name
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}: put config.json and the weights into it")
    describe(
        folder,
        Limits(
            declared.max_batch_size or 0,
            declared.max_num_tokens or 0,
            declared.max_input_len or 0,
            declared.max_seq_len or 0,
        ),
        version=_installed(runtime),
        weight_quantisation=declared.weight_quantisation,
        kv_quantisation=declared.kv_quantisation,
        eos_ids=eos_ids,
    )


def _installed(runtime: str) -> str:
    try:
        return f"{runtime} {version(runtime)}"
    except PackageNotFoundError:
        raise MissingDependency(
            runtime, runtime, f"describing a checkpoint for {runtime}"
        ) from None
