"""Judge the lists of one generation: measure, compare with the full build under it, carry on the verdicts before it.

The rim of analytics.decisions. What is compared with is the generation that the lists were cut in, never the one just
before: against that, damage that stays would look well from the second measurement on. Lists that were cut anew since
start afresh. A generation is one measurement however often it is measured; what was decided on it lies beside it as
decisions.json once somebody recorded it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fabric_pipelines.analytics.decisions import Decision, counts, decide
from fabric_pipelines.analytics.health import HealthTable, Metric, measure
from fabric_pipelines.analytics.probes import Probes
from fabric_pipelines.analytics.rules import RuleTable, Verdict
from fabric_pipelines.analytics.signals import BASELINE, Earlier, signals
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.errors import SchemaError
from fabric_pipelines.shards.asking import own_probes
from fabric_pipelines.shards.disk import DISK, Disk
from fabric_pipelines.shards.generation import Generation, shard_folder
from fabric_pipelines.shards.manifest import ShardManifest, folder_name
from fabric_pipelines.shards.scrub import require_whole
from fabric_pipelines.shards.shard import Shard, open_generation
from fabric_pipelines.shards.store import VectorStore, store_of

DECISIONS_FILE = "decisions.json"
DIGESTS = "checksum_mismatch"  # what a reference is made with


@dataclass(frozen=True, slots=True)
class Judged:
    """compared_with: the generation that changes are told from. follows: the one whose decisions were carried on.
    Either is None where there is none."""

    health: HealthTable
    decisions: Sequence[Decision]
    generation: int
    rules_sha256: str
    compared_with: int | None
    follows: int | None
    probes: Probes | None = None  # where they were asked for

    def verdicts(self) -> dict[str, int]:
        return counts(self.decisions)

    def partners(self) -> dict[str, int]:
        """By cluster, the one that it would be merged with: where MERGE stands or is on its way."""
        partner = self.health.aux.get("davies_bouldin_partner")  # none where its pass was skipped
        if partner is None:
            return {}
        return {
            str(each.cluster): int(partner[each.cluster])
            for each in self.decisions
            if any(
                found and found.verdict is Verdict.MERGE for found in (each.stands, each.pending)
            )
        }

    def odd(self) -> npt.NDArray[np.bool_]:
        """Clusters [K] under another verdict than KEEP."""
        return np.array([each.verdict is not Verdict.KEEP for each in self.decisions], np.bool_)

    def to_arrow(self) -> pa.Table:
        """The health table with the verdict of each cluster and the rule that it comes from."""
        table = self.health.to_arrow()
        table = table.append_column("verdict", pa.array([d.verdict.value for d in self.decisions]))
        return table.append_column("rule", pa.array([d.shown.rule for d in self.decisions]))

    def to_json(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "rules_sha256": self.rules_sha256,
            "compared_with": self.compared_with,
            "follows": self.follows,
            "verdicts": self.verdicts(),
            "partners": self.partners(),
            **self._met(),
            "decisions": [each.to_json() for each in self.decisions],
        }

    def _met(self) -> dict[str, Any]:
        if self.probes is None:
            return {}
        probe, wasted = self.probes.probe.tolist(), self.probes.wasted.tolist()
        return {"probes": {"width": self.probes.width, "probe": probe, "wasted": wasted}}


def judge(
    db: Database | VectorStore, root: Path, shard: Shard, table: RuleTable, *, ask: bool = False
) -> Judged:
    """Every list of the open `shard`, whose generations lie under `root`. Reads only. ask: also for the neighbours of its own
    rows, here and in what it is compared with, to count probes that give nothing (as much work as a few hundred exact
    searches)."""
    manifest = shard.manifest
    metric = cast(Metric, manifest.metric)
    store = store_of(db)
    base, earlier = _base(store, root, manifest, metric, ask)
    probes = own_probes(shard) if ask else None
    health = measure(
        shard.vectors(),
        shard.indptr,
        shard.ids(),
        metric=metric,
        reference=earlier.reference if earlier else None,
    )
    follows, before = _before(store, root, manifest, table)
    return Judged(
        health,
        decide(table, signals(health, earlier, probes), before, manifest.generation),
        manifest.generation,
        table.sha256,
        base,
        follows,
        probes,
    )


def record(generation: Generation, judged: Judged, disk: Disk = DISK) -> Path:
    """Keep the decisions beside the generation, for those after it; what was kept there before is replaced."""
    assert judged.generation == generation.number
    path = generation.folder / DECISIONS_FILE
    content = json.dumps(judged.to_json(), sort_keys=True, indent=1, allow_nan=False)
    disk.replace_file(path, content.encode() + b"\n")
    return path


def _base(
    store: VectorStore, root: Path, manifest: ShardManifest, metric: Metric, ask: bool
) -> tuple[int | None, Earlier | None]:
    """The full build under an increment, hashed and measured; none under a full build, or where its folder is gone."""
    if manifest.increment is None:
        return None, None
    found = _earlier(store, root, manifest, manifest.increment.base_generation)
    if found is None:
        return None, None
    folder, older = found
    if not folder.is_dir():
        return None, None
    generation = open_generation(store, root, manifest.name, older.generation)
    with Shard(generation) as shard:
        require_whole(
            generation
        )  # what is measured of rot would be the measure of every list for years
        table = measure(
            shard.vectors(), shard.indptr, shard.ids(), metric=metric, only=[*BASELINE, DIGESTS]
        )
        probes = own_probes(shard) if ask else None
    anew = _cut_anew(older, manifest)
    return older.generation, Earlier.of(
        table, manifest.lists, same_rows=False, anew=anew, probes=probes
    )


def _before(
    store: VectorStore, root: Path, manifest: ShardManifest, table: RuleTable
) -> tuple[int | None, dict[int, Decision]]:
    """The last recorded decisions on lists that still are the same, by the same rules."""
    if manifest.increment is None:
        return None, {}
    for number in range(manifest.generation - 1, manifest.increment.base_generation - 1, -1):
        found = _earlier(store, root, manifest, number)
        if found is None:
            continue
        folder, older = found
        path = folder / DECISIONS_FILE
        kept = _read(path)
        if kept is None or kept.get("rules_sha256") != table.sha256:
            continue
        anew = set(_cut_anew(older, manifest).tolist())
        decisions = _decisions(path, kept.get("decisions", []))
        return number, {each.cluster: each for each in decisions if each.cluster not in anew}
    return None, {}


def _earlier(
    store: VectorStore, root: Path, manifest: ShardManifest, number: int
) -> tuple[Path, ShardManifest] | None:
    """Folder and manifest of generation `number`, if its lists come from the same full build."""
    row = store.current_generation(manifest.name, number)
    if row is None or row.pruned:
        return None
    older = ShardManifest.from_json(row.manifest, f"generation {number} of {manifest.name!r}")
    if _built_in(older) != _built_in(manifest):
        return None
    return shard_folder(root, manifest.name) / folder_name(number, row.token), older


def _built_in(manifest: ShardManifest) -> int:
    return manifest.increment.base_generation if manifest.increment else manifest.generation


def _cut_anew(older: ShardManifest, newer: ShardManifest) -> npt.NDArray[np.int64]:
    """Lists of `newer` that `older` did not have, or that were split or merged between the two: their rows were counted
    when they were cut."""
    then, now = _rows_when_cut(older), _rows_when_cut(newer)
    same = np.zeros(len(now), np.bool_)
    both = min(len(then), len(now))
    same[:both] = then[:both] == now[:both]
    return np.flatnonzero(~same)


def _rows_when_cut(manifest: ShardManifest) -> npt.NDArray[np.int64]:
    if manifest.increment:
        return np.asarray(manifest.increment.reference_rows, np.int64)
    return np.diff(manifest.offsets())


def _decisions(path: Path, told: object) -> list[Decision]:
    try:
        if not isinstance(told, list):
            raise SchemaError("its decisions are no list")
        return [Decision.from_json(each) for each in told]
    except SchemaError as fault:
        raise SchemaError(
            f"{path} cannot be read ({fault}): remove it, and the verdicts begin afresh"
        ) from fault


def _read(path: Path) -> Mapping[str, Any] | None:
    """What `record` left, None where it never was called. SchemaError for anything else."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as fault:
        raise SchemaError(
            f"{path} cannot be read ({fault}): remove it, and the verdicts begin afresh"
        ) from fault
    if not isinstance(found, dict):
        raise SchemaError(f"{path} holds no decisions: remove it, and the verdicts begin afresh")
    return found
