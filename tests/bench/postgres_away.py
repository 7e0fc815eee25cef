"""Postgres away for minutes under load: what the broker holds meanwhile, and whether all of it lands afterwards.

    PYTHONPATH=. python tests/bench/postgres_away.py [--seconds 300] [--every 1] [--high-water 4000] [--json]

A real broker, completion, worker (all-MiniLM-L6-v2 on the CPU) and Postgres; a producer submits 40 tasks every
`--every` seconds all the time. Exit code 1 when a row is missing or there twice, or the ledger does not balance.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from tests.support_away import Look, Outcome, outage, own_server, running

POLL_S = 0.2


def until(probe: Callable[[], object], within_s: float, what: str) -> object:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if answer := probe():
            return answer
        time.sleep(POLL_S)
    raise TimeoutError(f"not within {within_s} s: {what}")


def one(options: argparse.Namespace) -> Outcome:
    folder = Path(tempfile.mkdtemp(prefix="fabric-away-"))
    folder.chmod(0o755)
    try:
        with own_server(folder) as server, running(server, folder, options.high_water) as loaded:
            return outage(
                loaded,
                server,
                away_s=options.seconds,
                every_s=options.every,
                until=until,
                say=_row,
                look_s=options.seconds / 10,
            )
    finally:
        shutil.rmtree(folder)


def _row(seen: Look) -> None:
    cells = (seen.away_s, seen.enqueued, seen.ready, seen.computed, seen.retired)
    sys.stderr.write(f"| {' | '.join(f'{cell:,}' for cell in cells)} |\n")
    sys.stderr.flush()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--every", type=float, default=1.0)
    parser.add_argument("--high-water", type=int, default=4_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    sys.stderr.write(
        "| seconds away | enqueued | ready | computed | retired |\n|---|---|---|---|---|\n"
    )
    found = one(options)
    total = found.total
    whole = not (found.missing or found.twice or total.open_tasks or total.balance.tasks)
    if options.json:
        seen = {"looks": [asdict(item) for item in found.looks], "total": total.as_json()}
        seen |= {"submitted": found.submitted, "restarts": found.restarts}
        seen |= {"missing": len(found.missing), "twice": len(found.twice)}
        sys.stdout.write(json.dumps(seen) + "\n")
    else:
        sys.stdout.write(
            f"away {found.looks[-1].away_s:,.0f} s: {found.submitted:,} submitted, {total.retired.tasks:,} landed, "
            f"{total.dead.tasks} dead, {len(found.missing)} missing, {len(found.twice)} twice, balance "
            f"{total.balance.tasks} tasks / {total.balance.tokens} tokens / fingerprint {total.balance.fingerprint}, "
            f"processes restarted: {', '.join(found.restarts) or 'none'}\n"
        )
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
