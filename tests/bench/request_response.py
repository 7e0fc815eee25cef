"""What a client of request and response gets out of an engine, and what supply adds to it: the first steps of the ablation.

    python -m tests.bench.request_response [--engine NAME] [--tasks 128] [--ways 1,4,16,32,64,supplied,fabric]     # any engine, on a CPU too

*client* has so many connections; each sends a request in order of arrival, waits for its answer, and sends the next: never
more requests than connections are at the engine, and a place that was left is filled a turn later. No HTTP, no JSON and no
tokeniser stand between, so this is the kindest such client. *supplied* is one variable on: the same requests in the same order,
all at the engine's door at once. *fabric* is one more: broker process, lanes, worker loop, results journaled. All rows go through
the door (worker/engines/door.py), on one open engine. One JSON object a row.

`vllm_rows` is the same client before vLLM, for work without end; tests/bench/vllm_session_on_cuda runs it before its levers, which are
the steps from *supplied* on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fabric_pipelines import settings
from fabric_pipelines.bench import behind
from fabric_pipelines.bench.supply import SAMPLING, Mix, draw_mix
from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.ids import digest
from fabric_pipelines.models import contents
from fabric_pipelines.records.lease import LEASE_SCHEMA, Lease
from fabric_pipelines.records.submission import Submission, fingerprint_of
from fabric_pipelines.records.task import task_batch
from fabric_pipelines.worker.engines.door import Engine
from fabric_pipelines.worker.engines.registry import GENERATE, engine_folder, open_engine
from fabric_pipelines.worker.engines.vllm import VllmEngine
from fabric_pipelines.worker.loop import Pace, WorkerLoop
from tests.bench import vllm_inside
from tests.bench.vllm_inside import ask

GREEDY = {"kind": "generate", "temperature": 0.0}
PROMPT_TOKENS, OUTPUTS = (16, 97), (8, 16, 24)  # of the small mix; upper end left out
POLL_S = 0.5
CONNECTIONS = (32, 256, 1024)  # before vLLM


@dataclass(frozen=True, slots=True)
class Request:
    tokens: Sequence[int]
    new: int


class Client:
    """`connections` at most at the engine at once, sent one by one in the order of `requests`; ended: answers so far."""

    def __init__(
        self,
        engine: Engine,
        requests: Iterator[Request],
        connections: int,
        sampling: dict[str, object],
    ) -> None:
        self._engine, self._requests, self._sampling = engine, requests, sampling
        self.connections = connections
        self._numbers = itertools.count()
        self.inside = self.ended = self.output_tokens = 0
        self.most_inside = 0

    def turn(self) -> bool:
        """Fill free connections, wait for an answer; whether anything is still under way."""
        free = self.connections - self.inside
        for request in itertools.islice(self._requests, free):
            self._engine.submit(self._alone(request))
            self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        return self._answers()

    def drain(self) -> None:
        """Send nothing more; wait for what is under way."""
        while self.inside:
            self._answers()

    def _answers(self) -> bool:
        for batch in self._engine.poll(POLL_S) if self.inside else ():
            failed = [word for word in batch.column("status").to_pylist() if word != "ok"]
            assert not failed, f"{self._engine.name}: {batch.column('error_text').drop_null()[0]}"
            self.inside -= batch.num_rows
            self.ended += batch.num_rows
            self.output_tokens += len(batch.column("output").flatten())
        return bool(self.inside)

    def _alone(self, request: Request) -> Lease:
        """A request is a lease of one task."""
        number = next(self._numbers)
        columns = {
            "task_id": [number],
            "tokens": [request.tokens],
            "max_new_tokens": [request.new],
            "source_row": [number],
            "metadata": [b""],
            "attempts": [0],
            "leader": [False],
        }
        arrays = [pa.array(columns[item.name], item.type) for item in LEASE_SCHEMA]
        rows = pa.RecordBatch.from_arrays(arrays, schema=LEASE_SCHEMA)
        return Lease(number, "client", self._engine.name, self._sampling, 0, 0, rows)


def small_mix(tasks: int, vocab_size: int, seed: int = 3) -> list[Request]:
    """Prompts of 16 to 96 tokens, answers of 8, 16 or 24 at most, uniform, no shared prefixes."""
    draw = np.random.default_rng(seed)
    lengths, new = draw.integers(*PROMPT_TOKENS, tasks), draw.choice(OUTPUTS, tasks)
    # The first ids of a vocabulary are control tokens.
    return [
        Request(draw.integers(vocab_size // 10, vocab_size, length).tolist(), int(most))
        for length, most in zip(lengths, new, strict=True)
    ]


def row(engine: Engine, requests: Sequence[Request], way: str, home: Path) -> dict[str, Any]:
    """The whole list once, by `way`: a number of connections, "supplied" or "fabric". What the engine counted meanwhile, the
    seconds, and the CPU seconds of this process."""
    stats = engine.stats
    before = (stats.steps, stats.computed_tokens, stats.generated_tokens, stats.padded_tokens)
    fill = stats.fill
    started, cpu = time.perf_counter(), time.process_time()
    if way == "fabric":
        answers = through_the_fabric(engine, requests, home)
    else:
        connections = len(requests) if way == "supplied" else int(way)
        client = Client(engine, iter(requests), connections, GREEDY)
        while client.turn() or client.ended < len(requests):
            pass
        answers = client.ended
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    now = (stats.steps, stats.computed_tokens, stats.generated_tokens, stats.padded_tokens)
    steps, computed, generated, padded = (new - old for new, old in zip(now, before, strict=True))
    return {
        "way": f"client, {way} connections" if way.isdigit() else way,
        "answers": answers,
        "offered_tokens": sum(len(request.tokens) for request in requests),
        "computed_tokens": computed,
        "generated_tokens": generated,
        "padded_tokens": padded,
        "steps": steps,
        "sequences_a_step": round(answers / max(steps, 1), 2),
        "batch_fill": round((stats.fill - fill) / max(steps, 1), 3),
        "seconds": round(seconds, 1),
        "cpu_s": round(cpu_s, 1),
        "total_tok_s": round((computed + generated) / seconds, 1),
        "total_tok_cpu_s": round((computed + generated) / cpu_s, 1),
    }


def through_the_fabric(engine: Engine, requests: Sequence[Request], home: Path) -> int:
    """One submission to a broker process of its own, and the loop until all is journaled; the answers that are ok."""
    batch = task_batch(
        [request.tokens for request in requests],
        max_new_tokens=[request.new for request in requests],
    )
    tasks, tokens, fingerprint = fingerprint_of([batch])
    header = Submission(
        submission_id=digest({"bench": "request_response", "fingerprint": fingerprint}),
        function="generate",
        engine=engine.name,
        sampling=GREEDY,
        vocab_size=engine.capabilities.vocab_size,
        tasks=tasks,
        tokens=tokens,
        fingerprint=fingerprint,
    )
    with behind.broker(home) as endpoint:
        with BrokerClient(endpoint, role="producer") as producer:
            producer.submit(header, [batch])
        with BrokerClient(endpoint, role="consumer") as client:
            loop = WorkerLoop(
                engine,
                client,
                device=f"{engine.capabilities.device}:0",
                wait=time.sleep,
                pace=Pace(until_idle=True),
            )
            counts = loop.run()
    assert counts.ok == counts.sent == len(requests), counts
    return counts.ok


def vllm_rows(
    engine: VllmEngine,
    settle_s: float,
    seconds: float,
    say: Callable[[dict[str, Any]], None],
    connections: Sequence[int] = CONNECTIONS,
) -> None:
    """The client before vLLM, its scheduler as it is and requests added as they come; work without end, the tokens that the scheduler gives
    out counted, as levers_on_cuda counts them. The engine is fed as before afterwards, and idle."""
    places, group = engine.feeding
    ask(engine, vllm_inside.count_tokens)
    ask(engine, vllm_inside.set_ahead, 1, False)
    engine.feed_in_groups(places, 1)
    try:
        for number in connections:
            client = Client(engine, endless(draw_mix(6000, seed=5)), number, dict(SAMPLING))
            _for(client, settle_s)
            tokens, steps, _ = ask(engine, vllm_inside.count_tokens)
            started, ended = time.perf_counter(), client.ended
            _for(client, seconds)
            tokens_then, steps_then, running = ask(engine, vllm_inside.count_tokens)
            took, made = time.perf_counter() - started, max(steps_then - steps, 1)
            say({
                "table": "client", "connections": number, "seconds": took,
                "total_tok_s": round((tokens_then - tokens) / took), "running": running,
                "answers_s": round((client.ended - ended) / took, 1),
                "step_ms": round(1000 * took / made, 2), "tokens_a_step": round((tokens_then - tokens) / made),
            })  # fmt: skip
            client.drain()
    finally:
        engine.feed_in_groups(places, group)
        ask(engine, vllm_inside.stop_count)


def endless(mix: Mix) -> Iterator[Request]:
    """The mix again and again, the first token of a prompt its own: it must not find itself in the prefix cache."""
    pairs = itertools.cycle(
        [(prompt.tolist(), new) for prompt, new in zip(mix.prompts, mix.new.tolist(), strict=True)]
    )
    for number, (prompt, new) in enumerate(pairs):
        yield Request([10 + number % 150_000, *prompt[1:]], new)


def _for(client: Client, seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        client.turn()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("--engine", default=GENERATE.name)
    parser.add_argument("--tasks", type=int, default=128)
    parser.add_argument("--ways", default="1,4,16,32,64,supplied,fabric")
    given = parser.parse_args(argv)
    own = settings.load()
    engine = open_engine(given.engine, cache=own.models, threads=own.threads)
    vocab_size = contents(engine_folder(given.engine, own.models))["facts"]["vocab_size"]
    requests = small_mix(given.tasks, vocab_size)
    try:
        with tempfile.TemporaryDirectory(prefix="fabric-") as folder:
            row(engine, requests[:4], "4", Path(folder))  # nobody pays for the first touch
            for number, way in enumerate(given.ways.split(",")):
                told = row(engine, requests, way, Path(folder) / str(number))
                sys.stdout.write(json.dumps(told) + "\n")
                sys.stdout.flush()
    finally:
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
