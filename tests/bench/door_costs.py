"""What the broker's doors cost: on this machine in plain, and for other machines over mutual TLS; in turns.

    PYTHONPATH=. python tests/bench/door_costs.py --folder /some/disk

Uploads are 20 batches of 2 MB (1,000 prompts of 512 tokens), durable on return; `hello` is a call that asks for next to
nothing. Both ends are on one machine, so that TLS shares its cores. Median and spread of the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fabric_pipelines import settings
from fabric_pipelines.broker import certificates
from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.broker.transport import Credentials
from fabric_pipelines.supervise.table import free_port
from tests.support_broker import submission_of, tasks_of

CALLS = 200


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--rounds", type=int, default=5)
    asked = options.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        folder = Path(name)
        certificates.make(folder / "papers", hosts=[], clients=["producer"])
        endpoint = f"grpc+tls://127.0.0.1:{free_port('127.0.0.1', 18_900)}"
        own = {
            name: folder / "papers" / f"broker.{end}"
            for name, end in (("tls_cert", "pem"), ("tls_key", "key"))
        }
        loaded = settings.load(
            {
                "home": folder / "home",
                "broker_listen": endpoint,
                "tls_ca": folder / "papers" / "ca.pem",
                **own,
            },
            {},
            folder,
        )
        broker = subprocess.Popen(
            [sys.executable, "-m", "fabric_pipelines.broker"],
            env={**os.environ, **loaded.as_environment()},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert broker.stdout is not None
        broker.stdout.readline()
        files = (folder / "papers" / file for file in ("ca.pem", "producer.pem", "producer.key"))
        credentials = Credentials(*(file.read_bytes() for file in files))
        ways = {
            "this machine": BrokerClient(loaded.broker_endpoint, role="producer", timeout_s=60),
            "mutual TLS": BrokerClient(
                endpoint, role="producer", timeout_s=60, credentials=credentials
            ),
        }
        try:
            report(ways, asked.rounds)
        finally:
            broker.terminate()
            broker.wait()


def report(ways: dict[str, BrokerClient], rounds: int) -> None:
    batches = [tasks_of([512] * 1000, seed=at) for at in range(20)]
    size = sum(batch.nbytes for batch in batches)
    uploads: dict[str, list[float]] = {way: [] for way in ways}
    calls: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(
        rounds + 1
    ):  # the first one warms connections and segments, and does not count
        for at, (way, client) in enumerate(ways.items()):
            header = submission_of(batches, 2 * number + at)
            begin = time.perf_counter()
            client.submit(header, batches)
            middle = time.perf_counter()
            for _ in range(CALLS):
                client.hello()
            end = time.perf_counter()
            if number:
                uploads[way].append(size / (middle - begin) / 1e6)
                calls[way].append((end - middle) / CALLS * 1e6)
    sys.stdout.write(
        "| door | upload, MB/s (least-most) | `hello`, us (least-most) |\n|---|---|---|\n"
    )
    for way in ways:
        columns = (
            f"{statistics.median(found):,.0f} ({min(found):,.0f}-{max(found):,.0f})"
            for found in (uploads[way], calls[way])
        )
        sys.stdout.write(f"| {way} | {' | '.join(columns)} |\n")


if __name__ == "__main__":
    main()
