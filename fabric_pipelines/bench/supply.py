"""What the fabric costs an engine: the same tasks through loop, socket, journal and database, and straight from memory.

`python -m fabric_pipelines.bench.supply --tasks 20000 --rounds 2 --landed`: one vLLM engine in one process, random weights
in the shape of Qwen2.5-7B, two ways of feeding it in turn (direct, fabric, direct, fabric ...), its prefix cache emptied
before each. *direct* is vLLM's engine stepped by a loop of a few lines, everything in memory, in the best order (`best_order`) and groups known here. *fabric* is a broker process of its own (Unix socket, journal on disk)
and the worker loop; it ends when the last completion is journaled, with --landed when the last task is retired: its
row is in Postgres, which runs beside it with a completion process. Prints one JSON object a side, then the ratios.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.bench import behind
from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.device.energy import CardMeter, visible
from fabric_pipelines.errors import (
    DeviceRefused,
    FabricError,
    MissingDependency,
    StorageFailed,
)
from fabric_pipelines.ids import digest
from fabric_pipelines.models.description import CHECKPOINTS
from fabric_pipelines.models.recipes import Limits
from fabric_pipelines.records.submission import Submission, fingerprint_of
from fabric_pipelines.records.task import task_batch
from fabric_pipelines.worker.engines.checkpoint import QWEN_7B_SHAPE, describe
from fabric_pipelines.worker.engines.opening import read_folder
from fabric_pipelines.worker.engines.vllm import VllmEngine, VllmOptions
from fabric_pipelines.worker.engines.vllm_driver import ADDS_PER_TURN
from fabric_pipelines.worker.loop import Pace, WorkerLoop

PROMPT_TOKENS, OUTPUT_TOKENS = (180, 540), (115, 345)  # uniform, upper end left out
VOCABULARY = (10, 150_000)
SAMPLING = {"kind": "generate", "temperature": 0.0, "ignore_eos": True}
STEPS_AHEAD = 3  # of vLLM's scheduler: the best that tests/bench/levers_on_cuda.py found
SUBMIT_ROWS = 1000
TAIL = 0.05
SAMPLE_S = 0.05
GUIDED_TAIL = 50  # the last fiftieth goes longest cap first, as the broker does it
LANDING_S = 120.0


@dataclass(frozen=True, slots=True)
class Mix:
    """Prompts and, for each, how many tokens are generated."""

    prompts: Sequence[npt.NDArray[np.int64]]
    new: npt.NDArray[np.int64]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    def first(self, count: int) -> Mix:
        return Mix(self.prompts[:count], self.new[:count])

    def best_order(self) -> Mix:
        """As it came, its last fiftieth longest cap first: a drain then waits for no long answer that began last."""
        tail = len(self.prompts) - len(self.prompts) // GUIDED_TAIL
        order = [*range(tail), *(tail + np.argsort(-self.new[tail:], kind="stable")).tolist()]
        return Mix([self.prompts[row] for row in order], self.new[order])


def draw_mix(tasks: int, seed: int = 0) -> Mix:
    draw = np.random.default_rng(seed)
    lengths, new = draw.integers(*PROMPT_TOKENS, tasks), draw.integers(*OUTPUT_TOKENS, tasks)
    return Mix([draw.integers(*VOCABULARY, length) for length in lengths], new)


@dataclass(frozen=True, slots=True)
class Side:
    """One way of feeding, once. offered = reused + computed. tail: the last 5 % of the seconds. card_idle: share of
    time without a kernel, as NVML sees it (None without NVML); batch_empty: share of the batch's places not taken."""

    way: str
    tasks: int
    seconds: float
    offered_tokens: int
    reused_tokens: int
    computed_tokens: int
    generated_tokens: int
    card_idle: float | None
    card_idle_tail: float | None
    batch_empty: float
    batch_empty_tail: float
    joules: float | None
    loop: dict[str, Any] = field(default_factory=dict)

    @property
    def total_rate(self) -> float:
        return (self.offered_tokens + self.generated_tokens) / self.seconds

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "total_tok_s": round(self.total_rate),
            "generated_tok_s": round(self.generated_tokens / self.seconds),
        }


class Watch:
    """Samples the card and the engine's fill while a side runs."""

    def __init__(self, unfinished: Callable[[], int], batch: int) -> None:
        self._unfinished, self._batch = unfinished, batch
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._card = open_card()
        self._samples: list[tuple[float, float, float]] = []
        self._joules = 0.0

    def __enter__(self) -> Watch:
        self._joules = self._energy()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._joules = self._energy() - self._joules

    def _energy(self) -> float:
        return 0.0 if self._card is None else self._card.joules() or 0.0

    def _sample(self) -> None:
        while not self._end.wait(SAMPLE_S):
            empty = 1 - min(self._unfinished(), self._batch) / self._batch
            busy = None if self._card is None else self._card.busy()
            idle = 0.0 if busy is None else 1 - busy
            self._samples.append((time.perf_counter(), empty, idle))

    def shares(self, started: float, ended: float) -> dict[str, Any]:
        """Means over the whole, and over the last 5 %."""
        told = np.array([s for s in self._samples if started <= s[0] <= ended] or [(ended, 0, 0)])
        tail = told[told[:, 0] >= ended - TAIL * (ended - started)]
        whole, last = told.mean(0), (tail if len(tail) else told[-1:]).mean(0)
        seen = self._card is not None
        return {
            "card_idle": round(float(whole[2]), 4) if seen else None,
            "card_idle_tail": round(float(last[2]), 4) if seen else None,
            "batch_empty": round(float(whole[1]), 4),
            "batch_empty_tail": round(float(last[1]), 4),
            "joules": round(self._joules) if seen else None,
        }


def open_card() -> CardMeter | None:
    """The card that the engine computes on. None unless it tells both what it used and how busy it is: a figure that is
    half known is left out."""
    try:
        card = CardMeter(visible("cuda:0"))
    except DeviceRefused:
        return None
    return card if card.joules() is not None and card.busy() is not None else None


def run_direct(engine: VllmEngine, mix: Mix) -> Side:
    """vLLM fed from memory by a loop of a few lines, in the groups that its driver uses: the best that is known here."""
    llm_engine, runtime = engine.llm.llm_engine, _vllm()
    kind = runtime.sampling_params.RequestOutputKind.FINAL_ONLY
    params = {
        cap: runtime.SamplingParams(
            max_tokens=cap, ignore_eos=True, detokenize=False, temperature=0.0, output_kind=kind
        )
        for cap in set(mix.new.tolist())
    }
    requests = [
        (f"direct-{row}", runtime.inputs.tokens_input(prompt.tolist()), params[new])
        for row, (prompt, new) in enumerate(zip(mix.prompts, mix.new.tolist(), strict=True))
    ]
    places, group = engine.feeding
    given = done = reused = generated = 0
    watch = Watch(lambda: given - done, engine.profile.max_batch_size)
    with watch:
        started = time.perf_counter()
        while done < len(requests):
            free = places - (given - done)
            if free >= group:
                for request in requests[given : given + min(free, ADDS_PER_TURN)]:
                    llm_engine.add_request(*request)
                given = min(given + min(free, ADDS_PER_TURN), len(requests))
            for output in llm_engine.step():
                if output.finished:
                    done += 1
                    reused += output.num_cached_tokens or 0
                    generated += len(output.outputs[0].token_ids)
        ended = time.perf_counter()
    return _direct("direct", mix, reused, generated, watch, (started, ended))


def run_generate(engine: VllmEngine, mix: Mix) -> Side:
    """vLLM's own blocking call on the whole list."""
    llm, runtime = engine.llm, _vllm()
    prompts = [{"prompt_token_ids": prompt.tolist()} for prompt in mix.prompts]
    params = [
        runtime.SamplingParams(
            max_tokens=int(new), ignore_eos=True, detokenize=False, temperature=0.0
        )
        for new in mix.new
    ]
    watch = Watch(llm.llm_engine.get_num_unfinished_requests, engine.profile.max_batch_size)
    with watch:
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        ended = time.perf_counter()
    reused = sum(output.num_cached_tokens or 0 for output in outputs)
    generated = sum(len(output.outputs[0].token_ids) for output in outputs)
    return _direct("generate", mix, reused, generated, watch, (started, ended))


def _vllm() -> Any:
    import vllm
    import vllm.inputs
    import vllm.sampling_params

    return vllm


def _direct(
    way: str, mix: Mix, reused: int, generated: int, watch: Watch, span: tuple[float, float]
) -> Side:
    offered = mix.prompt_tokens
    return Side(
        way,
        len(mix.prompts),
        span[1] - span[0],
        offered,
        reused,
        offered - reused,
        generated,
        **watch.shares(*span),
    )


def run_fabric(engine: VllmEngine, mix: Mix, home: Path, pg_url: str = "") -> Side:
    """A broker process, a submission, and the loop until everything is journaled; with a database, until all is retired."""
    before = _told(engine)
    with ExitStack() as stack:
        endpoint = stack.enter_context(behind.broker(home))
        producer = stack.enter_context(BrokerClient(endpoint, role="producer"))
        if pg_url:
            stack.enter_context(behind.completion(home, pg_url))
        submit_started = time.perf_counter()
        submit(producer, engine.name, mix)
        submit_s = time.perf_counter() - submit_started
        with BrokerClient(endpoint, role="consumer") as client:
            loop = WorkerLoop(
                engine, client, device="cuda:0", wait=time.sleep, pace=Pace(until_idle=True)
            )
            watch = Watch(lambda: engine.inside, engine.profile.max_batch_size)
            with watch:
                started = time.perf_counter()
                counts = loop.run()
                journaled = ended = time.perf_counter()
                if pg_url:
                    ended = _retired(producer, len(mix.prompts))
        total = producer.status().total.as_json()
    assert counts.ok == counts.sent == total["retired" if pg_url else "computed"], counts
    assert counts.ok == len(mix.prompts), counts
    reused, computed, generated, busy_s = (
        now - then for now, then in zip(_told(engine), before, strict=True)
    )
    seconds = ended - started
    report = counts.as_json(engine.stats, {})
    told = {name: short(report[name]) for name in TOLD}
    return Side(
        "fabric",
        counts.ok,
        seconds,
        mix.prompt_tokens,
        int(reused),
        int(computed),
        int(generated),
        loop={
            **told,
            "busy_share": round(busy_s / seconds, 4),
            "submit_s": round(submit_s, 3),
            "landed_after_s": round(ended - journaled, 3) if pg_url else None,
            "landed_rows": behind.landed_rows(pg_url) if pg_url else None,
        },
        **watch.shares(started, ended),
    )


TOLD = (
    *("leases", "sends", "lease_s", "send_s", "lane_switches", "idle_gaps", "idle_s"),
    *("duplicates", "late", "nacked", "expired", "resends", "failed", "refused"),
    *("padded_tokens", "batch_fill"),
)


def short(value: Any) -> Any:
    """A figure as a table shows it."""
    return round(value, 4) if isinstance(value, float) else value


def _told(engine: VllmEngine) -> tuple[float, float, float, float]:
    """What the engine has counted so far: tokens reused, computed, generated, and its busy seconds."""
    stats = engine.stats
    return stats.reused_tokens, stats.computed_tokens, stats.generated_tokens, stats.busy_s


def _retired(producer: BrokerClient, tasks: int) -> float:
    """When the last of them was seen retired, on the clock of a side."""
    until = time.perf_counter() + LANDING_S
    while (now := time.perf_counter()) < until:
        if producer.status().total.as_json()["retired"] >= tasks:
            return now
        time.sleep(0.02)
    raise StorageFailed(
        f"not all of {tasks} tasks were landed {LANDING_S:.0f} s after the last answer"
    )


def submit(client: BrokerClient, engine: str, mix: Mix) -> None:
    """The whole mix as one submission."""
    rows = range(0, len(mix.prompts), SUBMIT_ROWS)
    batches = [
        task_batch(
            [prompt.tolist() for prompt in mix.prompts[row : row + SUBMIT_ROWS]],
            max_new_tokens=[int(new) for new in mix.new[row : row + SUBMIT_ROWS]],
            source_rows=list(range(row, min(row + SUBMIT_ROWS, len(mix.prompts)))),
        )
        for row in rows
    ]
    tasks, tokens, fingerprint = fingerprint_of(batches)
    header = Submission(
        submission_id=digest({"bench": "supply", "fingerprint": fingerprint}),
        function="generate",
        engine=engine,
        sampling=SAMPLING,
        vocab_size=QWEN_7B_SHAPE["vocab_size"],
        tasks=tasks,
        tokens=tokens,
        fingerprint=fingerprint,
    )
    client.submit(header, batches)


def open_shape(
    cache: Path, quantisation: str, limits: Limits, options: VllmOptions
) -> tuple[VllmEngine, float]:
    """An open engine with random weights in the shape of Qwen2.5-7B, and the seconds it took."""
    try:
        installed = version("vllm")
    except PackageNotFoundError:
        raise MissingDependency("vllm", "vllm", "this benchmark") from None
    name = f"qwen2.5-7b-shape-random-weights@vllm-{quantisation}"
    folder = cache / CHECKPOINTS / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(QWEN_7B_SHAPE)))
    describe(
        folder,
        limits,
        version=f"vllm {installed}",
        weight_quantisation=quantisation,
        kv_quantisation=quantisation,
    )
    engine = VllmEngine(name, read_folder(folder), options)
    started = time.perf_counter()
    engine.open()
    return engine, time.perf_counter() - started


def measure(
    engine: VllmEngine,
    mix: Mix,
    rounds: int,
    home: Path,
    say: Callable[[Side], None],
    pg_url: Callable[[str], str] = lambda name: "",
    *,
    warm: bool = False,
) -> list[Side]:
    """Rounds of both ways on one engine, in turn; a warm-up of both comes before and is not told. It is a full
    batch with its own output lengths: after one of 16 tokens each the first side was still the slowest. pg_url: makes the
    database of a fabric side, "" for none. warm: the engine has just been running full, so only the fabric is warmed up."""
    few, best = mix.first(engine.profile.max_batch_size), mix.best_order()
    if not warm:
        run_direct(engine, few)
        engine.llm.reset_prefix_cache()
    run_fabric(engine, few, home / "warm", pg_url("warm"))
    sides: list[Side] = []
    for number in range(rounds):
        for way in ("direct", "fabric"):
            assert engine.llm.reset_prefix_cache(), "vLLM would not empty its prefix cache"
            if way == "direct":
                sides.append(run_direct(engine, best))
            else:
                sides.append(run_fabric(engine, mix, home / str(number), pg_url(f"round{number}")))
            say(sides[-1])
    return sides


def ratios(sides: Sequence[Side]) -> list[float]:
    """Each round's fabric side over its direct side."""
    found = []
    for round_ in zip(sides[::2], sides[1::2], strict=True):
        by_way = {side.way: side.total_rate for side in round_}
        found.append(by_way["fabric"] / by_way["direct"])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The fabric's cost to a vLLM engine.")
    parser.add_argument("--tasks", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quantisation", choices=("fp8", "none"), default="fp8")
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--step-tokens", type=int, default=16_384)
    parser.add_argument(
        "--steps-ahead", type=int, default=STEPS_AHEAD, help="as the setting of a worker"
    )
    parser.add_argument("--landed", action="store_true", help="end in Postgres, not in the journal")
    parser.add_argument("--home", type=Path, help="folder for journals; default: a temporary one")
    given = parser.parse_args(argv)
    limits = Limits(given.sequences, given.step_tokens, 2048, 4096)
    with tempfile.TemporaryDirectory(prefix="fabric-") as folder, ExitStack() as stack:
        home: Path = (given.home or Path(folder)).resolve()
        options = VllmOptions(steps_ahead=given.steps_ahead)
        engine, load_s = open_shape(home, given.quantisation, limits, options)
        _say({"engine": engine.name, "load_s": round(load_s, 1), **engine.profile.as_json()})
        pg_url: Callable[[str], str] = lambda name: ""  # noqa: E731 - a database is made or none is
        if given.landed:
            server = stack.enter_context(behind.postgres(home))
            pg_url = partial(behind.database, server)
        sides = measure(
            engine,
            draw_mix(given.tasks),
            given.rounds,
            home,
            lambda side: _say(side.as_json()),
            pg_url,
        )
        found = ratios(sides)
        _say({"fabric_over_direct": [round(r, 4) for r in found], "mean": round(np.mean(found), 4)})
        engine.close()
    return 0


def _say(told: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(told, default=float) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FabricError as fault:
        sys.stderr.write(f"{fault}\n")
        sys.exit(fault.exit_code)
