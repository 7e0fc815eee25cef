"""The tables of docs/benchmarks/feeding.md from one engine process, since opening it takes longer than most of them.

    python -m tests.bench.vllm_session_on_cuda --out FOLDER --landed-s 600

In order: a client of request and response (request_response), what the rate hangs on (levers_on_cuda), the fabric against the engine fed directly
(fabric_pipelines.bench.supply, landed in Postgres), a long run of steady supply (soak_on_cuda), arrival order against the
broker's (prefixes_on_cuda); where asked, products in fp8. One JSON object a line in FOLDER/session.jsonl. A part that fails says so there
and the next one runs. --landed-s: seconds that the sides of the second part may take together; so many tasks are drawn (at most
--tasks). Started with LD_PRELOAD=$(python -m fabric_pipelines.device.calls), the soak counts CUDA calls.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fabric_pipelines.bench import behind, supply
from fabric_pipelines.models.recipes import Limits
from fabric_pipelines.worker.engines.vllm import VllmEngine, VllmOptions
from tests.bench import (
    fp8_products_on_cuda,
    levers_on_cuda,
    prefixes_on_cuda,
    request_response,
    soak_on_cuda,
    vllm_inside,
)
from tests.bench.levers_on_cuda import Lever
from tests.bench.prefixes_on_cuda import Row
from tests.bench.vllm_inside import ask

TOKENS_A_TASK = 589.2
SIDES = 4
SETTLE_S, COUNT_S = 4.0, 6.0  # of a row of levers
EDGES = 0.94  # of the steady rate, over a run with its beginning and its drain
WORTH = 1.01  # running further ahead costs a little: it is taken for more than this
PREFIX_ROWS = (
    Row(0.5, 24, ("arrival", "broker", "broker", "arrival")),
    Row(2.0, 8, ("arrival", "broker", "broker", "arrival")),
    Row(5.0, 5, ("arrival", "broker", "broker", "arrival")),
    # all fits: 400,000 tokens of documents, and 512 running sequences add some 120 of their own each
    Row(0.5, 8, ("arrival", "broker", "broker", "arrival"), cache_tokens=800_000),
)


class Told:
    """A line a figure, kept as it comes."""

    def __init__(self, file: Path) -> None:
        self._file, self._started = file, time.monotonic()

    def __call__(self, figure: dict[str, Any]) -> None:
        at = {"at_s": round(time.monotonic() - self._started, 1), **figure}
        line = json.dumps(at, default=float) + "\n"
        with self._file.open("a") as kept:
            kept.write(line)
        sys.stdout.write(line)
        sys.stdout.flush()


def part(say: Told, name: str, body: Callable[[], None]) -> None:
    try:
        body()
    except Exception:  # noqa: BLE001 - a table that fails must not take the next one along
        say({"failed": name, "why": traceback.format_exc()[-3000:]})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", type=int, default=20_000)
    parser.add_argument("--landed-s", type=float, default=600.0)
    parser.add_argument("--soak-s", type=float, default=490.0)
    parser.add_argument(
        "--steps-ahead", type=int, default=supply.STEPS_AHEAD,
        help="at most, as the setting of a worker; 1: vLLM as it is",
    )  # fmt: skip
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--prefix-sequences", type=int, default=512)
    parser.add_argument("--step-tokens", type=int, default=16_384)
    parser.add_argument("--cache-tokens", type=int, default=80_000)
    parser.add_argument("--parts", default="client,levers,landed,soak,prefixes")
    parser.add_argument("--prefix-rows", default="0,1,2,3", help="of PREFIX_ROWS")
    given = parser.parse_args(argv)
    out: Path = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    say, parts = Told(out / "session.jsonl"), given.parts.split(",")
    home = out / "home"
    with ExitStack() as stack:
        servers: list[Any] = []
        part(
            say,
            "postgres",
            lambda: servers.append(stack.enter_context(behind.postgres(home / "pg"))),
        )
        limits = Limits(given.sequences, given.step_tokens, 2048, 4096)
        options = VllmOptions(steps_ahead=given.steps_ahead, whole_answers=given.steps_ahead > 1)
        engine, load_s = supply.open_shape(home, "fp8", limits, options)
        stack.callback(engine.close)
        say({"engine": engine.name, "load_s": round(load_s, 1), **engine.profile.as_json()})
        sequences, step_tokens = given.sequences, given.step_tokens
        group = sequences // 32
        rates: dict[Lever, float] = {}

        def client() -> None:
            request_response.vllm_rows(engine, SETTLE_S, COUNT_S, say)

        def levers() -> None:
            # The client's next step first: some requests always wait at the engine. Then steps ahead, which only grow:
            # what was scheduled further ahead cannot be taken back.
            rows = [
                Lever(sequences, step_tokens),
                Lever(sequences, step_tokens, group, traced=True),
                Lever(sequences, step_tokens, group, whole_answers=True),
                Lever(sequences, step_tokens, group, ahead=2, whole_answers=True, traced=True),
                Lever(
                    sequences,
                    step_tokens,
                    group,
                    ahead=max(given.steps_ahead, 2),
                    whole_answers=True,
                    traced=True,
                ),
            ]
            rows = [
                row
                for row in dict.fromkeys(rows)
                if row.ahead <= given.steps_ahead
                and (given.steps_ahead > 1 or not row.whole_answers)
            ]
            told = levers_on_cuda.measure(engine, rows, SETTLE_S, COUNT_S, out / "traces")
            for row, found in zip(rows, told, strict=True):
                say({"table": "levers", **found})
                rates[row] = found["total_tok_s"]

        def landed() -> None:
            rate = max(rates.values(), default=50_000.0)
            side_s = given.landed_s / SIDES
            tasks = min(given.tasks, int(side_s * EDGES * rate / TOKENS_A_TASK))
            pg_url = partial(behind.database, servers[0])
            mix = supply.draw_mix(tasks)
            sides = supply.measure(
                engine, mix, SIDES // 2, home, lambda side: say({"table": "landed", **side.as_json()}), pg_url,
                warm=bool(rates),
            )  # fmt: skip
            say({"fabric_over_direct": [round(ratio, 4) for ratio in supply.ratios(sides)]})

        def soak() -> None:
            assert engine.llm.reset_prefix_cache()
            url = behind.database(servers[0], "soak")
            soak_on_cuda.measure(engine, given.soak_s, home / "soak", url, say)

        def prefixes() -> None:
            use(engine, given.prefix_sequences, step_tokens)
            rows = [
                (number, PREFIX_ROWS[number]) for number in map(int, given.prefix_rows.split(","))
            ]
            prefixes_on_cuda.measure(engine, rows, given.cache_tokens, home, say)

        def products() -> None:
            for row in fp8_products_on_cuda.measure():
                say({"table": "products", **row})

        if "client" in parts:
            part(say, "client", client)
        if "levers" in parts:
            part(say, "levers", levers)
        best = max(
            rates,
            key=rates.__getitem__,
            default=Lever(0, 0, ahead=given.steps_ahead, whole_answers=given.steps_ahead > 1),
        )
        for row, rate in rates.items():
            if row.ahead < best.ahead and row.whole_answers and WORTH * rate > rates[best]:
                best = row
                break
        ask(engine, vllm_inside.set_ahead, best.ahead, best.whole_answers)
        say({"ahead": best.ahead, "whole_answers": best.whole_answers, "feeding": engine.feeding})
        for name, body in (
            ("landed", landed), ("soak", soak), ("prefixes", prefixes), ("products", products),
        ):  # fmt: skip
            if name in parts:
                part(say, name, body)
    say({"done": True})
    return 0


def use(engine: VllmEngine, sequences: int, step_tokens: int) -> None:
    """The engine as if it had been opened with so many sequences."""
    ask(engine, vllm_inside.set_limits, sequences, step_tokens)
    engine.profile = replace(engine.profile, max_batch_size=sequences)
    engine.feed_in_groups(sequences, max(sequences // 32, 1))


if __name__ == "__main__":
    sys.exit(main())
