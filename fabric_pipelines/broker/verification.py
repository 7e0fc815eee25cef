"""Verification: a second state from the log alone against the live one, part by part.

What the log's bytes are worth was looked at before (`scrubbing`); this asks what they say. A difference stops
leasing for good, damage in the cold tier does not: only its own tasks wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from fabric_pipelines.broker import snapshot
from fabric_pipelines.broker.checkpoint import Checkpoints
from fabric_pipelines.broker.core import Core
from fabric_pipelines.broker.facts import Dropped
from fabric_pipelines.broker.recovery import Log, rebuild_from_log
from fabric_pipelines.broker.replies import DamagedFrame, VerifyReport
from fabric_pipelines.errors import ColdLost, CorruptionFound


def verify(
    core: Core,
    journal: Log,
    checkpoints: Checkpoints | None,
    base: Dropped | None,
    damaged: Sequence[DamagedFrame],
) -> VerifyReport:
    """`damaged`: each place in the log that is known not to be what was written; with one of them the answer is no,
    whatever the rest says."""
    state, sentences = core.state, [frame.sentence for frame in damaged]
    try:
        twin = rebuild_from_log(journal, checkpoints, base)
    except CorruptionFound as fault:
        if fault.places and not damaged and not isinstance(fault, ColdLost):
            raise  # of a frame that is still written to, which no scrub looks at: to be named
        found = sentences or [str(fault)]
        if not fault.places and not core.fault:
            core.fault = f"verify found that {fault}; leasing has stopped"
        return VerifyReport(False, state.index.count, state.frames, found, list(damaged))
    if isinstance(twin, str):
        if (
            sentences
        ):  # the broker that runs knows what is lost here, and the damage says what to do
            return VerifyReport(False, state.index.count, state.frames, sentences, list(damaged))
        differences = [f"{twin}: restore that file from a copy, and verify again"]
    else:
        differences = state.differences(twin)
        parts = snapshot.take(state).differences(snapshot.take(twin))
        if parts and not differences:
            differences.append(f"{', '.join(parts)} are not what the log gives")
    differences += state.audit() + core.stranded()
    if differences and not core.fault:
        core.fault = (
            f"verify found {len(differences)} differences, first: {differences[0]}; leasing has "
            "stopped, keep the journal folder"
        )
    found = [*sentences, *differences]
    return VerifyReport(not found, state.index.count, state.frames, found, list(damaged))
