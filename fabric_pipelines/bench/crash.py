"""`fabric bench crash`: what a crash after any operation may leave of a broker's log, and what is lost by it.

A recorded life of a broker on a simulated disk (every kind of fact, rolls, recycled files, checkpoints, restarts,
segments that go to the cold tier and come back) is cut after each operation; what POSIX lets the platter hold then
is recovered by a new broker and held to what had been acknowledged. Then what that life keeps and carries is damaged,
one thing at a time: it must be refused by name or be without effect. On demand every single call of that life fails
once, too, with EIO and with ENOSPC. The one bench that stands on a stand-in, since
no real disk can be asked for these states; it measures no speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fabric_pipelines.broker.facts import Kind
from fabric_pipelines.testing.crash_faults import ENDS, FaultJudge
from fabric_pipelines.testing.crash_judge import DOUBLED, LOST, UNBALANCED, Judge, states_of
from fabric_pipelines.testing.crash_life import Life
from fabric_pipelines.testing.damage_carried import damaged_states
from fabric_pipelines.testing.damage_judge import OUTCOMES, DamageJudge
from fabric_pipelines.testing.sim_disk import SimDisk

SHOWN = 5


@dataclass(frozen=True, slots=True)
class Options:
    """subsets: random choices of sectors after each operation; torn: writes that are cut, about `torn_each` cuts
    in each; faults: let every call fail as well."""

    seed: int = 7
    subsets: int = 24
    torn: int = 30
    torn_each: int = 400
    faults: bool = False


def measure(options: Options, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """states: distinct ones that were judged; lost, doubled, unbalanced: how many of them broke a promise of that
    kind; damaged: by thing and in all, how many states had one damage, and how many of those were refused by name, had no
    effect, or were served; faults, if asked for: by errno, how many calls failed, how those lives ended, and how many states
    after it were judged; broken: the first promises that were not kept, in words."""
    begin_s = time.process_time()
    life = Life(SimDisk())
    judge = Judge(life)
    cut_short = judge.live()
    say(
        f"recorded {len(life.disk.log)} operations with {len(life.kinds)} of {len(Kind)} kinds of facts"
    )
    broken = cut_short + judge.count(
        states_of(
            life.disk,
            seed=options.seed,
            subsets=options.subsets,
            torn=options.torn,
            torn_each=options.torn_each,
        )
    )
    say(f"judged {len(judge.states)} states of the disk after crashes")
    damage = DamageJudge()
    if not cut_short:  # there is no whole log to damage
        broken += damage.count(damaged_states(life, seed=options.seed))
    counted, failing = judge.broken, None
    if options.faults and not cut_short:
        say(f"judged {sum(damage.found.values())} damages; now every call fails once in each way")
        failing = FaultJudge()
        broken += list(failing.count(say))
        counted = counted + failing.broken
    return {
        "states": len(judge.states),
        LOST: counted[LOST],
        DOUBLED: counted[DOUBLED],
        UNBALANCED: counted[UNBALANCED],
        "damaged": damage.table(),
        "faults": failing.table() if failing is not None else {},
        "logs": len(judge.logs),
        "operations": len(life.disk.log),
        "acknowledgements": len(life.promises),
        "kinds": sorted(Kind(kind).name.lower() for kind in life.kinds),
        "segments": len(life.epochs),
        "counters": dict(sorted(life.counters.items())),
        "seed": options.seed,
        "broken": broken[:SHOWN],
        "cpu_seconds": round(time.process_time() - begin_s, 1),
    }


def table(found: dict[str, Any]) -> str:
    """For the page and the terminal."""
    lines = [
        "| distinct states | lost | doubled | unbalanced | logs recovered | CPU s |",
        "|---|---|---|---|---|---|",
        f"| {found['states']} | {found[LOST]} | {found[DOUBLED]} | {found[UNBALANCED]} | {found['logs']} | "
        f"{found['cpu_seconds']} |",
        "",
        f"{found['operations']} operations, {found['acknowledgements']} acknowledgements, "
        f"{len(found['kinds'])} kinds of facts, {found['segments']} segments, seed {found['seed']}",
        "",
    ]
    lines += ["| damaged | states | refused | harmless | served |", "|---|---|---|---|---|"]
    lines += [
        f"| {thing} | {row['states']} | {' | '.join(str(row[name]) for name in OUTCOMES)} |"
        for thing, row in found["damaged"].items()
    ]
    lines.append("")
    if found["faults"]:
        lines += ["| every call fails with | calls | fatal | refused | whole | states |"]
        lines += ["|---|---|---|---|---|---|"]
        lines += [
            f"| {name} | {row['calls']} | {' | '.join(str(row[end]) for end in ENDS)} | {row['states']} |"
            for name, row in found["faults"].items()
        ]
        lines.append("")
    lines += [f"{name.replace('_', ' ')}: {count}" for name, count in found["counters"].items()]
    return "\n".join([*lines, *found["broken"]])
