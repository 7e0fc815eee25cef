"""The supervisor process: takes its orders as JSON on stdin and the lock as an open descriptor.

It forks once, so that the caller waits only for the first half and nobody has to reap the second.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from fabric_pipelines.supervise.place import Place
from fabric_pipelines.supervise.spec import ProcessSpec
from fabric_pipelines.supervise.supervisor import Supervisor


def main() -> int:
    order = json.load(sys.stdin)
    if os.fork():
        os._exit(0)
    os.set_inheritable(order["lock"], False)
    home, runtime_dir, log_dir = (Path(order[n]) for n in ("home", "runtime_dir", "log_dir"))
    place = Place(home, runtime_dir, log_dir, order["mark"])
    table = [ProcessSpec.from_json(spec) for spec in order["table"]]
    _say(f"supervisor of {len(table)} processes, pid {os.getpid()}")
    supervisor = Supervisor(
        table, place, ui_url=order["ui_url"], say=_say, started_by=order["started_by"]
    )
    supervisor.run()
    _say("everything is stopped")
    return 1 if supervisor.lost else 0


def _say(line: str) -> None:
    stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    with contextlib.suppress(OSError):  # a full disk under the log ends nobody
        sys.stderr.write(f"{stamp} {line}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
