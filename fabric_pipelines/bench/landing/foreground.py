"""Somebody else's small transactions, in a process of its own: `python -m ... URL SECONDS` prints when each began
(wall clock, seconds) and its milliseconds.

One row of a small table is updated and committed, then a pause, again and again. The time is that of the statement
with its commit, as a web application would see it.
"""

from __future__ import annotations

import json
import random
import sys
import time

import psycopg

ROWS = 1_000
PAUSE_S = 0.005
TABLE = """
create table if not exists foreground (id int primary key, n bigint not null);
insert into foreground select g, 0 from generate_series(1, 1000) as g on conflict do nothing;
"""


def run(url: str, seconds: float) -> list[tuple[float, float]]:
    draw = random.Random(1)
    took: list[tuple[float, float]] = []
    with psycopg.connect(url, autocommit=True) as connection:
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            at = time.time()
            connection.execute(
                "update foreground set n = n + 1 where id = %s", (draw.randint(1, ROWS),)
            )
            took.append((at, (time.perf_counter() - began) * 1e3))
            time.sleep(PAUSE_S)
    return took


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run(sys.argv[1], float(sys.argv[2]))))
