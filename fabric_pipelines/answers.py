"""What a person is shown of a command's answer: the columns that matter, and tasks by engine instead of by lane.

`--json` has all of it, so nothing here may be the only place of a fact.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from fabric_pipelines import screen
from fabric_pipelines.telemetry import format_eta
from fabric_pipelines.waits import Wait

SHOWN = {
    "processes": ("name", "state", "pid", "restarts", "last_exit"),
    "consumers": ("engine", "device", "leased", "session"),
    "stale": (
        "shard",
        "generation",
        "verdict",
        "moved",
        "moved_fraction",
        "deleted_fraction",
        "log",
    ),
    "receipts": ("shard", "generation", "bytes", "receipt_id"),
    "files": ("role", "rows", "bytes", "sha256"),
    "refusals": ("function", "sqlstate", "message", "last_said", "accepted_at"),
    "letters": ("task_id", "state", "function", "error_code", "attempts", "consumer", "reason"),
    "kernels": ("family", "arch", "registers", "spills", "digest"),
}
TASK_STATES = ("ready", "leased", "computed", "in_doubt", "retired", "dead")


def chosen(answer: dict[str, Any]) -> dict[str, Any]:
    """The columns of SHOWN, wherever such a list of rows stands."""
    found: dict[str, Any] = {}
    for name, item in answer.items():
        if isinstance(item, dict):
            found[name] = chosen(item)
        elif name in SHOWN and isinstance(item, list):
            found[name] = [{key: row.get(key) for key in SHOWN[name]} for row in item]
        else:
            found[name] = item
    return found


def _progress(progress: Mapping[str, Any], held: str) -> str:
    done, total = progress["tokens_done"], progress["tokens_total"]
    rate = f", {progress['tokens_per_s']:,.0f} a second" if progress["tokens_per_s"] else ""
    eta = "done" if done >= total else held or format_eta(progress["eta_s"])
    return f"{done:,} of {total:,} tokens{rate}, {eta}"


def work_of(broker: Mapping[str, Any]) -> dict[str, Any]:
    """The broker's account for a person: tasks by engine, since lanes are by the hundred, and their sum."""
    # in doubt is a state of recovery: shown while there is any
    states = [name for name in TASK_STATES if name != "in_doubt" or broker[name]]
    by_engine: dict[str, dict[str, Any]] = {}
    for lane in broker["lanes"]:
        # a lane is tenant/engine/sampling/length; see records/shape.py
        engine = "/".join(lane["lane"].split("/")[1:-2])
        row = by_engine.setdefault(engine, {"engine": engine, **dict.fromkeys(states, 0)})
        for state in states:
            row[state] += lane[state]
    total = {"engine": "all", **{state: broker[state] for state in states}}
    balance = [broker[f"balance_{kind}"] for kind in ("tasks", "tokens", "fingerprint")]
    return {
        "balance": "0 tasks, 0 tokens, 0 fingerprint" if not any(balance) else str(balance),
        "journal": _journal(broker["journal"]),
        "fault": broker["fault"] or "none",
        **_damage(broker["journal"]),
        "progress": _progress(
            broker["progress"],
            "stopped" if broker["fault"] else "draining" if broker["draining"] else "",
        ),
        "draining": broker["draining"],
        "lanes": len(broker["lanes"]),
        "workers": f"{len(broker['consumers'])}{', told to hold' if broker['hold'] else ''}",
        "tasks": [*by_engine.values(), total],
    }


def waiting(
    waits: Sequence[Wait], processes: Sequence[Mapping[str, Any]], now_s: float | None = None
) -> list[dict[str, Any]]:
    """One row a process that waits; one of the supervisor's goes by the name it has there."""
    now = time.time() if now_s is None else now_s
    names = {row["pid"]: row["name"] for row in processes}
    return [
        {
            "name": names.get(wait.pid, wait.name),
            "pid": wait.pid,
            "for": wait.reason,
            "since": datetime.fromtimestamp(wait.since_s, UTC).isoformat(timespec="seconds"),
            "seconds": round(max(now - wait.since_s, 0.0), 1),
        }
        for wait in waits
    ]


def waits_for_a_person(rows: Sequence[Mapping[str, Any]]) -> Any:
    if not rows:
        return "none"
    return {f"{row['name']} ({row['pid']})": _wait_line(row) for row in rows}


def _wait_line(row: Mapping[str, Any]) -> str:
    minutes, seconds = divmod(int(row["seconds"]), 60)
    return f"for {minutes}:{seconds:02d} min, since {row['since']}: {row['for']}"


def _damage(figures: Mapping[str, Any]) -> dict[str, Any]:
    """What of the log is known not to be what was written, and what keeps the cold tier from its work; nothing when
    all is well."""
    found = {"cold tier": figures.get("cold_fault"), "damaged": figures.get("damaged")}
    return {name: item for name, item in found.items() if item}


def _journal(figures: Mapping[str, Any]) -> str:
    """One tenant of several is told which journal it is in, not how large that is."""
    if "bytes" not in figures:
        return str(figures["journal_id"])
    return f"{screen.size(figures['bytes'])}, durable up to {figures['durable_lsn']}"
