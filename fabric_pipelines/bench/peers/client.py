"""The client process of one system: `python -m fabric_pipelines.bench.peers.client NAME ENDPOINT`.

Reads one `Work` as JSON a line, runs it, writes its `Seconds` as JSON; ends with its stdin. So that every system's
client is the same kind of process, and that no round waits for imports.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict

from fabric_pipelines.bench.peers.peer import Client, Work, run


def open_client(name: str, endpoint: str) -> Client:
    module = importlib.import_module(f"fabric_pipelines.bench.peers.{name}_peer")
    client: Client = module.connect(endpoint)
    return client


def main() -> int:
    name, endpoint = sys.argv[1:]
    client = open_client(name, endpoint)
    try:
        _say({"ready": True})
        for line in sys.stdin:
            _say(asdict(run(client, Work(**json.loads(line)))))
    finally:
        client.close()
    return 0


def _say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
