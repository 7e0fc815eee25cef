"""Which of an engine's plans fits the card: plans lie in one folder a set of compute capabilities.

With one plan the choice is made; with several the card is asked. A plan that does not fit is refused by the engine when it
opens, so nothing here decides whether to run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fabric_pipelines.errors import DeviceRefused, ModelMissing
from fabric_pipelines.models import contents
from fabric_pipelines.models.recipes import MANIFEST
from fabric_pipelines.worker.engines.names import folder_of

PLANS = "plans"  # <model cache>/plans/<engine name>/<folder_name>/


def folder_name(capabilities: Sequence[tuple[int, int]]) -> str:
    """E.g. "sm_90" or "sm_89_120"."""
    return "_".join(["sm", *(f"{major}{minor}" for major, minor in sorted(capabilities))])


def card_capability() -> tuple[int, int]:
    """Of the first card this process sees; MissingDependency or DeviceRefused without one."""
    from fabric_pipelines.worker.engines.transfers import CupyTransfers

    return CupyTransfers().capability


def plan_folder(
    name: str, cache: Path, capability: Callable[[], tuple[int, int]] | None = None
) -> Path:
    """The folder of the plan to open. ModelMissing when none was built, DeviceRefused when several were and none is
    for the card."""
    home = folder_of(cache / PLANS, name)
    # Not those that a build is about to publish, or that a killed one left.
    folders = sorted(path.parent for path in home.glob(f"[!.]*/{MANIFEST}"))
    if not folders:
        raise ModelMissing(
            f"engine {name!r} has no plan in {home}: run `fabric engine build {name}`"
        )
    if len(folders) == 1:
        return folders[0]
    major, minor = (capability or card_capability)()
    for folder in folders:
        if f"{major}.{minor}" in contents(folder)["facts"]["compute_capabilities"]:
            return folder
    built = ", ".join(folder.name for folder in folders)
    raise DeviceRefused(
        f"{name} was built for {built}, and the card has {major}.{minor}: "
        f"run `fabric engine build {name}` on this card"
    )
