"""What the rules make of the lists of an index from its searches alone: no row is measured for it.

Only rules that ask for nothing else are asked. A measurement is one recorded search, of as many queries as it had; what was decided
lies as decisions.json in the folder of the index, beside what its manifest names, and goes with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fabric_pipelines.analytics.decisions import Decision, decide
from fabric_pipelines.analytics.index.door import VectorIndex
from fabric_pipelines.analytics.index.traffic import SearchHealth
from fabric_pipelines.analytics.probes import Probes
from fabric_pipelines.analytics.rules import RuleTable
from fabric_pipelines.analytics.signals import OF_SEARCHES, of_searches
from fabric_pipelines.errors import SchemaError
from fabric_pipelines.named_file import beside

DECISIONS_FILE = "decisions.json"


def judge(
    index: VectorIndex[Any], met: SearchHealth, nprobe: int, table: RuleTable, folder: Path
) -> list[Decision]:
    """One decision a list of the index that was loaded from `folder`; none of a kind without lists of its own. nprobe: lists that
    each query looked at. SchemaError where the decisions kept there cannot be read."""
    if not len(met.probe):
        return []
    sizes = index.list_sizes()
    found = of_searches(sizes, Probes(met.probe, met.wasted, min(nprobe, len(sizes))))
    before = _before(folder / DECISIONS_FILE, table)
    measurement = 1 + max((each.measurement for each in before.values()), default=0)
    return decide(table.within(OF_SEARCHES), found, before, measurement)


def record(folder: Path, decisions: Sequence[Decision], table: RuleTable) -> None:
    """Keep them for the searches after this one; what was kept is replaced."""
    told = {"rules_sha256": table.sha256, "decisions": [each.to_json() for each in decisions]}
    with beside(folder / DECISIONS_FILE, replace=True) as path:
        path.write_text(json.dumps(told, sort_keys=True, indent=1, allow_nan=False) + "\n")


def _before(path: Path, table: RuleTable) -> Mapping[int, Decision]:
    """By the same rules; by others everything begins afresh."""
    try:
        kept = json.loads(path.read_bytes())
        if kept["rules_sha256"] != table.sha256:
            return {}
        return {each.cluster: each for each in map(Decision.from_json, kept["decisions"])}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, SchemaError) as fault:
        raise SchemaError(
            f"{path} cannot be read ({fault}): remove it, and the verdicts begin afresh"
        ) from fault
