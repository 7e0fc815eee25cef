"""Our broker beside the durable queues found on this machine: same work, same durability, ratios within one run.

Rounds are interleaved (A B C A B C) so that a busy machine is busy for all; figures are medians over rounds and a
ratio is the median of the ratios of each round. A further, untimed round under strace counts fsyncs, which is what
says that durability was equal. Uses what is installed, installs nothing, and names what is missing.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from fabric_pipelines.bench.peers.peer import TASK_TOKENS, Seconds, Server, Work
from fabric_pipelines.dataplane.postgres import kept_elsewhere
from fabric_pipelines.errors import CheckFailed, FabricError, UsageError
from fabric_pipelines.settings import Settings

OURS = "fabric"
ANSWER_S = 600.0
SYNC_CALLS = ("fsync", "fdatasync", "sync_file_range", "msync", "sync", "syncfs")
DISK_PROBES = 40

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    tasks: int = 10_000
    batch: int = 1000  # tasks of one enqueue
    lease: int = 256  # tasks of one lease, report and retirement
    tokens: int = TASK_TOKENS  # of one task
    rounds: int = 5
    systems: tuple[str, ...] = ()  # () = all


@dataclass(frozen=True, slots=True)
class Round:
    seconds: Seconds
    server_cpu: float


@dataclass(slots=True)
class Series:
    """The rounds of one system in one mode."""

    synced_leases: bool
    rounds: list[Round] = field(default_factory=list)

    def median(self, of: Callable[[Round], float]) -> float:
        return statistics.median(of(each) for each in self.rounds)


def servers(names: Sequence[str]) -> tuple[list[Server], dict[str, str]]:
    """What can run here, ours first, and why the rest cannot. `names`: only these; () all."""
    from fabric_pipelines.bench.peers.fabric_peer import FabricServer
    from fabric_pipelines.bench.peers.nats_peer import NatsServer
    from fabric_pipelines.bench.peers.postgres_peer import PostgresServer
    from fabric_pipelines.bench.peers.rabbitmq_peer import RabbitServer
    from fabric_pipelines.bench.peers.redis_peer import RedisServer
    from fabric_pipelines.bench.peers.sqlite_peer import SqliteServer

    known: list[Callable[[], Server]] = [
        FabricServer,
        RedisServer,
        PostgresServer,
        RabbitServer,
        NatsServer,
        SqliteServer,
    ]
    unknown = sorted(set(names) - {make.name for make in known})  # type: ignore[attr-defined]
    if unknown:
        raise UsageError(f"there is no system {', '.join(unknown)} to compare with")
    found: list[Server] = []
    missing: dict[str, str] = {}
    for make in known:
        name = make.name  # type: ignore[attr-defined]  # a class attribute of each
        if names and name not in names:
            continue
        try:
            found.append(make())
        except FabricError as reason:
            missing[name] = str(reason)
    return found, missing


class ClientProcess:
    """The client of one system, in a process of its own."""

    def __init__(self, server: Server) -> None:
        self._name = server.name
        module = "fabric_pipelines.bench.peers.client"
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, server.name, server.endpoint],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, work: Work) -> Seconds:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(work)) + "\n")
        self._process.stdin.flush()
        return Seconds(**self._answer())

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise CheckFailed(f"the client of {self._name} ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.communicate(timeout=ANSWER_S)


def measure(settings: Settings, options: Options, say: Say) -> dict[str, Any]:
    """The whole benchmark; its report is what `fabric bench broker --json` prints."""
    found, missing = servers(options.systems)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers of ours must not outlive us
    with _folder(settings) as folder, ExitStack() as stack:
        clients: dict[str, ClientProcess] = {}
        running: list[Server] = []
        for server in found:
            try:
                server.start(folder / server.name)
                stack.callback(server.stop)
                clients[server.name] = ClientProcess(server)
                stack.callback(clients[server.name].close)
                running.append(server)
            except FabricError as fault:
                if server.name == OURS:
                    raise
                missing[server.name] = str(fault)
        series = _rounds(running, clients, options, say)
        fsyncs = {s.name: _count_syncs(s, clients[s.name], options, say) for s in running}
        disk = disk_rates(folder)
    return _report(running, missing, series, fsyncs, disk, options)


@contextmanager
def _folder(settings: Settings) -> Iterator[Path]:
    """A folder of this run on the disk of the home; everything in it is removed at the end."""
    settings.home.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=settings.home))
    try:
        yield folder
    finally:
        elsewhere = kept_elsewhere(Settings(home=folder / "postgres"))
        for left in (folder, elsewhere):
            if left is not None:
                shutil.rmtree(left, ignore_errors=True)


def _rounds(
    running: Sequence[Server], clients: dict[str, ClientProcess], options: Options, say: Say
) -> dict[tuple[str, bool], Series]:
    """Round 0 warms up and is not kept."""
    modes = [
        (server, synced)
        for synced in (False, True)
        for server in running
        if not synced or server.durable.lease_is_a_choice
    ]
    series = {(server.name, synced): Series(synced) for server, synced in modes}
    for number in range(options.rounds + 1):
        for at, (server, synced) in enumerate(modes):
            work = Work(
                1000 * number + at,
                options.tasks,
                options.batch,
                options.lease,
                synced,
                options.tokens,
            )
            before = _cpu_seconds(server.pids)
            seconds = clients[server.name].run(work)
            if number:
                cpu = _cpu_seconds(server.pids) - before
                series[server.name, synced].rounds.append(Round(seconds, cpu))
            say(f"round {number} {server.name:<9} {options.tasks / seconds.cycle:>9,.0f} tasks/s")
    return series


def _cpu_seconds(pids: Sequence[int]) -> float:
    total = 0.0
    for pid in pids:
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def _count_syncs(server: Server, client: ClientProcess, options: Options, say: Say) -> int | None:
    """fsync and its kin in one round, by strace on whatever writes for this system; None without strace or
    without leave to trace."""
    tracer = shutil.which("strace")
    if tracer is None:
        return None
    with tempfile.NamedTemporaryFile("r") as summary:
        pids = [part for pid in server.pids or [client.pid] for part in ("-p", str(pid))]
        calls = ",".join(SYNC_CALLS)
        trace = subprocess.Popen(
            [
                tracer,
                "-f",
                "-c",
                "-U",
                "name,calls",
                "-e",
                f"trace={calls}",
                "-o",
                summary.name,
                *pids,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert trace.stderr is not None
        line = trace.stderr.readline()
        if "attached" not in line:
            trace.communicate()
            return None
        client.run(Work(999_000, options.tasks, options.batch, options.lease, width=options.tokens))
        trace.terminate()
        trace.communicate()
        rows = (row.split() for row in summary.read().splitlines())
        count = sum(int(row[1]) for row in rows if len(row) == 2 and row[0] in SYNC_CALLS)
    say(f"fsyncs of {server.name}: {count}")
    return count


def disk_rates(folder: Path) -> dict[str, float]:
    """What the disk itself gives: serial 4 KB and 1 MB writes, each with fdatasync, into allocated space."""
    rates = {}
    for name, size in (("fdatasync_4k_per_s", 4096), ("fdatasync_1m_per_s", 1 << 20)):
        block = os.urandom(size)
        with (folder / "probe").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size * DISK_PROBES)
            os.fsync(file.fileno())
            begin = time.perf_counter()
            for at in range(DISK_PROBES):
                os.pwrite(file.fileno(), block, at * size)
                os.fdatasync(file.fileno())
            rates[name] = DISK_PROBES / (time.perf_counter() - begin)
    return rates


def _report(
    running: Sequence[Server],
    missing: dict[str, str],
    series: dict[tuple[str, bool], Series],
    fsyncs: dict[str, int | None],
    disk: dict[str, float],
    options: Options,
) -> dict[str, Any]:
    tasks = options.tasks
    systems = [
        {
            **_figures(server, series[server.name, False], tasks),
            "fsyncs": fsyncs[server.name],
            "durable": server.durable.as_json(),
        }
        for server in running
    ]
    synced = [
        _figures(server, series.get((server.name, True), series[server.name, False]), tasks)
        for server in running
    ]
    report: dict[str, Any] = {
        "tasks": tasks,
        "batch": options.batch,
        "lease": options.lease,
        "task_bytes": options.tokens * 4,
        "rounds": options.rounds,
        "systems": systems,
        "leases_synced": synced,
        "missing": missing,
        "disk": {name: round(rate, 1) for name, rate in disk.items()},
        "machine": machine(),
    }
    for peer in ("redis", "postgres"):
        report[f"ratio_{peer}"] = _ratio(series, peer, synced=False)
        report[f"ratio_{peer}_leases_synced"] = _ratio(series, peer, synced=True)
        report[f"ratio_{peer}_without_outcomes"] = _ratio(
            series, peer, synced=False, theirs=lambda s: s.cycle - s.computed
        )
    return report


def _figures(server: Server, series: Series, tasks: int) -> dict[str, Any]:
    """Tasks a second of each step and of the whole cycle, its spread, and CPU a task on both sides."""
    rates = {
        f"{step}_tasks_per_s": round(
            tasks / series.median(lambda each, step=step: getattr(each.seconds, step))  # type: ignore[misc]
        )
        for step in ("cycle", "enqueue", "lease", "computed", "retire")
    }
    cycles = sorted(tasks / each.seconds.cycle for each in series.rounds)
    return {
        "name": server.name,
        "version": server.version,
        **rates,
        "cycle_min": round(cycles[0]),
        "cycle_max": round(cycles[-1]),
        "server_cpu_us": round(series.median(lambda each: each.server_cpu) / tasks * 1e6, 1),
        "client_cpu_us": round(
            series.median(lambda each: each.seconds.client_cpu) / tasks * 1e6, 1
        ),
    }


def _ratio(
    series: dict[tuple[str, bool], Series],
    peer: str,
    *,
    synced: bool,
    theirs: Callable[[Seconds], float] = lambda s: s.cycle,
) -> float | None:
    """How many times the peer's rate is ours, in the same round; None without the peer."""
    ours = series.get((OURS, synced))
    other = series.get((peer, synced), series.get((peer, False)))
    if ours is None or other is None:
        return None
    pairs = zip(ours.rounds, other.rounds, strict=True)
    return round(statistics.median(theirs(b.seconds) / a.seconds.cycle for a, b in pairs), 2)


def machine() -> str:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} x {model}, Python {platform.python_version()}, load {load:.1f}"


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = [
        f"{report['tasks']:,} tasks of {report['task_bytes']:,} B a round, enqueued {report['batch']:,} and leased "
        f"{report['lease']:,} at a time, median of {report['rounds']} "
        f"interleaved rounds; {report['machine']}; disk {report['disk']['fdatasync_4k_per_s']:.0f} syncs/s "
        f"of 4 KB, {report['disk']['fdatasync_1m_per_s']:.0f} of 1 MB.",
    ]
    for title, rows in (
        ("Leases as each system ships them", report["systems"]),
        ("Leases synced as well", report["leases_synced"]),
    ):
        lines += ["", f"**{title}**", "", *_markdown(rows)]
    lines += ["", "| ratio of full cycles | Redis | Postgres |", "|---|---|---|"]
    for label, tail in (
        ("same work", ""),
        ("same work, leases synced", "_leases_synced"),
        ("peers without storing outcomes", "_without_outcomes"),
    ):
        pair = [report[f"ratio_{peer}{tail}"] for peer in ("redis", "postgres")]
        cells = ["-" if ratio is None else f"{ratio:.1f}" for ratio in pair]
        lines.append(f"| {label} | {cells[0]} | {cells[1]} |")
    lines += ["", "| system | enqueue | lease | computed | retire |", "|---|---|---|---|---|"]
    for row in report["systems"]:
        lines.append(f"| {row['name']} | {' | '.join(row['durable'].values())} |")
    lines += ["", *(f"Missing: {name}: {why}" for name, why in report["missing"].items())]
    return "\n".join(lines).rstrip() + "\n"


def _markdown(rows: Sequence[dict[str, Any]]) -> list[str]:
    head = (
        "| tasks/s | cycle | (min..max) | enqueue | lease | computed | retire | CPU us/task server + client "
        "| fsyncs |"
    )
    lines = [head, "|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        steps = " | ".join(
            f"{row[f'{step}_tasks_per_s']:,}" for step in ("enqueue", "lease", "computed", "retire")
        )
        cells = [
            f"{row['name']} {row['version']}",
            f"**{row['cycle_tasks_per_s']:,}**",
            f"{row['cycle_min']:,}..{row['cycle_max']:,}",
            steps,
            f"{row['server_cpu_us']:.0f} + {row['client_cpu_us']:.0f}",
            "-" if row.get("fsyncs") is None else f"{row['fsyncs']:,}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
