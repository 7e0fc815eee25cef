"""`fabric bench landing`: one run, one server of its own, four tables: ways, floor, prices, governor.

Ways are interleaved round by round and each has a database of its own; figures are medians. CPU is what counts, client
and backend together, since wall time on a shared machine measures the neighbours. Uses the ways that are installed and
names those that are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psycopg

from fabric_pipelines.bench import behind
from fabric_pipelines.bench.broker import machine
from fabric_pipelines.bench.landing import floor, governed, prices, turns
from fabric_pipelines.bench.landing.cpu import Spent, spent
from fabric_pipelines.bench.landing.rows import FUNCTIONS, batch
from fabric_pipelines.bench.landing.ways import WAYS, Way
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.postgres import EmbeddedPostgres
from fabric_pipelines.errors import FabricError, UsageError
from fabric_pipelines.settings import Settings

PARTS = ("ways", "floor", "prices", "governor")
BATCH_ROWS = 5_000
SLOW_ROWS = 2_500
"""Vectors by a way of half a millisecond a row: so many, in one batch."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    rows: int = 40_000
    rounds: int = 3
    runs: int = 5  # of the governor's part
    seconds: float = 16.0  # of each kind of bulk in a run
    parts: tuple[str, ...] = PARTS


@dataclass(slots=True)
class Series:
    """One way with one function, a round each."""

    rows: int = 0
    size: int | None = None
    rounds: list[Spent] = field(default_factory=list)

    def median(self, of: Callable[[Spent], float]) -> float:
        return float(np.median([of(each) / self.rows for each in self.rounds]))


def measure(settings: Settings, options: Options, say: Say) -> dict[str, Any]:
    """The whole report; keys of a part that was not asked for are absent."""
    unknown = sorted(set(options.parts) - set(PARTS))
    if unknown:
        raise UsageError(f"there is no part {', '.join(unknown)}; parts are {', '.join(PARTS)}")
    report: dict[str, Any] = {"rows": options.rows, "rounds": options.rounds, "machine": machine()}
    with behind.postgres(settings.home) as server:
        report["postgres"] = server.binaries.version if server.binaries else ""
        if "ways" in options.parts:
            report |= _measure_ways(server, options, say)
        if "floor" in options.parts:
            database = Database(behind.database(server, "floor"))
            report["floor"] = floor.measure(database, options.rounds, say)
        if "prices" in options.parts:
            url = behind.database(server, "prices")
            report["prices"] = prices.measure(url, options.rows // 2, options.rounds, say)
        if "governor" in options.parts:
            database = Database(behind.database(server, "governed"))
            report["governor"] = governed.measure(database, options.seconds, options.runs, say)
    return report


def _measure_ways(server: EmbeddedPostgres, options: Options, say: Say) -> dict[str, Any]:
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        running: list[tuple[Way, psycopg.Connection]] = []
        for at, make in enumerate(WAYS):
            url = behind.database(server, f"way{at}")
            try:
                way = make(url)
            except FabricError as reason:
                missing[make.name] = str(reason)
                continue
            stack.callback(way.close)
            admin = stack.enter_context(psycopg.connect(url, autocommit=True))
            running.append((way, admin))
        series = {(way.name, function): Series() for way, _ in running for function in FUNCTIONS}
        for number in range(options.rounds + 1):
            for function in FUNCTIONS:
                for way, admin in running:
                    _round(way, admin, function, number, options, series[way.name, function])
            say(f"ways, round {number} of {options.rounds}")
    systems = [
        {"name": way.name, "function": function, **_figures(series[way.name, function])}
        for function in FUNCTIONS
        for way, _ in running
    ]
    ours = {key: value for key, value in systems[0].items() if key not in ("name", "function")}
    return {**ours, "systems": systems, "missing": missing}


def _round(
    way: Way,
    admin: psycopg.Connection,
    function: str,
    number: int,
    options: Options,
    into: Series,
) -> None:
    """The round 0 warms up and is not kept."""
    total = SLOW_ROWS if way.slow and function == "embed" else options.rows
    step = min(BATCH_ROWS, total)
    start = (number * len(FUNCTIONS) + FUNCTIONS.index(function)) * options.rows
    batches = [batch(function, step, start + at) for at in range(0, total, step)]
    sizes: list[int | None] = []
    with spent(admin, way.pid) as took:
        for item in batches:
            sizes.append(way.land(item))  # noqa: PERF401 a comprehension would hide what is timed
    if number:
        into.rows = step * len(batches)
        into.rounds.append(took)
        into.size = None if None in sizes else sum(size for size in sizes if size is not None)


def _figures(series: Series) -> dict[str, Any]:
    client = series.median(lambda each: each.client_s) * 1e6
    backend = series.median(lambda each: each.backend_s) * 1e6
    wal = series.median(lambda each: each.wal_bytes)
    copied = None if series.size is None else series.size / series.rows
    return {
        "rows_per_cpu_s": round(1e6 / (client + backend)),
        "client_us_per_row": round(client, 2),
        "backend_us_per_row": round(backend, 2),
        "wal_bytes_per_row": round(wal),
        "copy_bytes_per_row": None if copied is None else round(copied),
        "wal_per_copy_byte": None if copied is None else round(wal / copied, 3),
        "wall_rows_per_s": round(1 / series.median(lambda each: each.wall_s)),
    }


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = [
        f"Postgres {report['postgres']}, {report['rows']:,} rows a round (vectors by psycopg's own ways: "
        f"{SLOW_ROWS:,}), median of {report['rounds']} interleaved rounds; {report['machine']}."
    ]
    if "systems" in report:
        lines += _ways_table(report["systems"])
        lines += [f"\nMissing: {name}: {why}" for name, why in report["missing"].items()]
    if "floor" in report:
        lines += _floor_lines(report["floor"])
    if "prices" in report:
        lines += _prices_table(report["prices"])
    if "governor" in report:
        lines += _governor_table(report["governor"])
    return "\n".join(lines) + "\n"


def _ways_table(systems: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    titles = {"embed": "384-dim halfvec rows", "generate": "Generation rows of 64 tokens"}
    for function in FUNCTIONS:
        lines += [
            "",
            f"**{titles[function]}**",
            "",
            "| way | rows per CPU-s | client us/row | backend us/row | WAL B/row | COPY B/row | WAL / COPY | wall rows/s |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in [item for item in systems if item["function"] == function]:
            cells = [
                row["name"],
                f"**{row['rows_per_cpu_s']:,}**",
                f"{row['client_us_per_row']:.1f}",
                f"{row['backend_us_per_row']:.1f}",
                f"{row['wal_bytes_per_row']:,}",
                *(
                    "-" if row[name] is None else f"{row[name]:,}"
                    for name in ("copy_bytes_per_row", "wal_per_copy_byte")
                ),
                f"{row['wall_rows_per_s']:,}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _floor_lines(found: dict[str, Any]) -> list[str]:
    kept = "kept" if found["worst_s"] < found["within_s"] else "NOT kept"
    each = ", ".join(f"{seconds:.2f}" for seconds in found["seconds"])
    return [
        "",
        f"**{found['rows']:,} generated rows through completion's loop, a new governor each round**: {each} s; median "
        f"{found['median_s']:.2f} s, {found['rows'] / found['median_s']:,.0f} rows/s. Floor of {found['within_s']:.0f} s "
        f"in the worst round: {kept}. CPU of client and server: "
        f"{', '.join(f'{seconds:.2f}' for seconds in found['cpu_s'])} s.",
    ]


def _prices_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "",
        "**What an index or a trigger adds**",
        "",
        "| table has | backend us/row | WAL B/row | CPU multiple | the governor's prior |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['name']} | {row['backend_us_per_row']:,.1f} | {row['wal_bytes_per_row']:,} | "
        f"{row['multiple']:.1f} | {row['assumed_multiple']:.1f} |"
        for row in rows
    ]
    return lines


def _governor_table(found: dict[str, Any]) -> list[str]:
    lines = [
        "",
        "**A small writer beside bulk** (its transactions' p99 in ms, and how many times that of silence in the same run)",
        "",
        "| run | load | CPUs in silence | silence | its halves | ungoverned | rows/s | governed | rows/s | share of the rate |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    named = [(str(number), run) for number, run in enumerate(found["runs"], 1)]
    for name, run in [*named, ("all", found["all"])]:
        idle = run["idle"]
        cells = [name, f"{run['load']}", f"{idle['busy_share']:.0%}", f"{idle['p99_ms']}"]
        cells.append(f"{idle['noise']:.2f}")
        for each in (run["ungoverned"], run["governed"]):
            cells += [f"{each['p99_ms']} (**{each['p99_ratio']:.2f}**)", f"{each['rows_per_s']:,}"]
        lines.append(f"| {' | '.join(cells)} | {run['rate_share']:.0%} |")
    now, pooled = found["account"], found["all"]
    medians = ", ".join(
        f"{pooled[name]['p50_ms']} {name}" for name in ("idle", "ungoverned", "governed")
    )
    samples = sum(pooled[name]["transactions"] for name in ("idle", "ungoverned", "governed"))
    return [
        *lines,
        "",
        *_verdict(found["verdict"], len(found["runs"])),
        "",
        f"{samples:,} small transactions; medians in ms: {medians}. At the end of the last run the governor allows "
        f"{now['rate_bytes_per_s'] / 1e6:,.0f} MB/s of write cost, {now['rows_per_transaction']:,} rows a "
        f"transaction, {now['writers']} writer(s); pressures {_named(now['pressures'])}; moves {_named(now['moves'])}.",
    ]


def _verdict(said: dict[str, Any], runs: int) -> list[str]:
    noisy = ", ".join(map(str, said["not_quiet"]))
    return [
        f"**p99 at most {turns.RATIO_MOST} times that of silence and at least {turns.SHARE_LEAST:.0%} of the rate: "
        f"{said['both']} of {runs} runs** ({said['ratio']} the first, {said['share']} the second); medians: "
        f"{said['median_ratio']} times (ungoverned {said['median_ungoverned_ratio']}, one half of silence against the other {said['median_noise']}), {said['median_share']:.0%}.",
        f"The machine was not quiet in runs {noisy}: more than {turns.QUIET_SHARE:.0%} of its CPUs' time was taken while "
        "only the small writer ran."
        if noisy
        else "The machine was quiet in every run.",
    ]


def _named(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count) or "none"
