"""What a call to the broker costs on one machine: by the call socket and by a Flight action, in turns.

    PYTHONPATH=. python tests/bench/call_costs.py --folder /some/disk

`hello` asks for next to nothing; `lease` of 256 tasks brings 256 KB and takes a
decision. Wall time is the median of one call; CPU is that of both processes together.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from fabric_pipelines.bench.peers.fabric_peer import FabricClient, FabricServer
from fabric_pipelines.bench.peers.peer import Work
from fabric_pipelines.broker.client import BrokerClient

WAYS = ("call socket", "flight action")


def choose(client: BrokerClient, way: str) -> None:
    client.close()
    client._call_path = None if way == "flight action" else client._call_path


def measure(server: FabricServer, act: Callable[[], object], times: int) -> tuple[float, float]:
    """(median seconds of one call, CPU seconds a call of both sides)."""
    process = psutil.Process(server.pids[0])
    act()
    before, mine, seconds = process.cpu_times(), time.process_time(), []
    for _ in range(times):
        begin = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - begin)
    after = process.cpu_times()
    cpu = after.user + after.system - before.user - before.system + time.process_time() - mine
    return statistics.median(seconds), cpu / times


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--rounds", type=int, default=3)
    asked = options.parse_args()
    server = FabricServer()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        server.start(Path(folder))
        found: dict[tuple[str, str], list[tuple[float, float]]] = {}
        try:
            for number in range(asked.rounds):
                for at, way in enumerate(WAYS):
                    client = FabricClient(server.endpoint)
                    for each in (client._producer, client._worker, client._completion):
                        choose(each, way)
                    client.prepare(Work(2 * number + at, 20_000))
                    client.enqueue()
                    acts: list[tuple[str, Callable[[], object], int]] = [
                        ("hello", client._producer.hello, 500),
                        ("lease of 256", client.lease, 70),
                    ]
                    for name, act, times in acts:
                        found.setdefault((name, way), []).append(measure(server, act, times))
                    client._worker.detach()
                    client.close()
        finally:
            server.stop()
    sys.stdout.write("| call | way | median wall us | CPU us, both sides |\n|---|---|---|---|\n")
    for (name, way), rounds in found.items():
        wall, cpu = (statistics.median(each[at] for each in rounds) * 1e6 for at in (0, 1))
        sys.stdout.write(f"| {name} | {way} | {wall:.0f} | {cpu:.0f} |\n")


if __name__ == "__main__":
    main()
