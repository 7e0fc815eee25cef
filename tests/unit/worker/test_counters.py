"""What a run tells of itself: shares of what they say, null where nobody counts, told while it runs and when it ends."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from fabric_pipelines.device.calls import KINDS, Calls
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.settings import Settings, make_runtime_folder
from fabric_pipelines.telemetry import account_in_words
from fabric_pipelines.testing.scripted_broker import ScriptedBroker
from fabric_pipelines.testing.scripted_engine import ScriptedEngine
from fabric_pipelines.worker import account
from fabric_pipelines.worker.engines.door import EngineStats
from fabric_pipelines.worker.gaps import Gaps
from fabric_pipelines.worker.loop import Pace, WorkerLoop
from fabric_pipelines.worker.meter import SETTLED_S, RunMeter
from fabric_pipelines.worker.throughput import Throughput
from tests.unit.worker.test_loop import Hand, tasks, worker


def counted(ours: int, engine: int) -> Calls:
    return Calls(dict.fromkeys(KINDS, ours), dict.fromkeys(KINDS, engine))


def test_a_gap_is_counted_by_its_length_bounds_included() -> None:
    gaps = Gaps()
    for seconds in (0.0, 0.0001, 0.00011, 0.05, 0.1, 10.0, 11.0):
        gaps.add(seconds)
    told = gaps.as_json()
    assert told.pop("seconds") == pytest.approx(21.15021)
    assert told == {
        "up_to_0.0001_s": 2,
        "up_to_0.001_s": 1,
        "up_to_0.01_s": 0,
        "up_to_0.1_s": 2,
        "up_to_1_s": 0,
        "up_to_10_s": 1,
        "longer": 1,
    }
    assert gaps.count == 7


def test_shares_are_of_what_they_say_and_of_nothing_they_are_zero() -> None:
    empty = Throughput().as_json(EngineStats(), {})
    for name in ("prefix_hit_share", "padding_share", "batch_fill", "busy_share"):
        assert empty[name] == 0.0, name
    assert empty["device_busy_share"] is None, "an engine without a clock of its card knows nothing"
    stats = EngineStats(
        offered_tokens=1000, reused_tokens=250, computed_tokens=750, padded_tokens=250, busy_s=8.0
    )
    stats.device_s = 6.0
    profile = Profile(max_batch_size=4, max_num_tokens=100, kv_cache_tokens=0, window_tokens=100)
    for step in ((1, 50), (3, 10), (1, 400)):  # by tokens, by places, and a head that is too long
        stats.add_step(*step, profile)
    told = Throughput(prompt_tokens=400, output_tokens=100, seconds=10.0).as_json(stats, {})
    assert told["prefix_hit_share"] == told["padding_share"] == 0.25
    assert (told["busy_share"], told["device_busy_share"]) == (0.8, 0.6)
    assert (told["prompt_tokens_per_s"], told["output_tokens_per_s"]) == (40.0, 10.0)
    assert told["batch_fill"] == pytest.approx((0.5 + 0.75 + 1.0) / 3)


def test_tokens_are_of_outcomes_that_are_ok_and_gaps_keep_their_lengths() -> None:
    broker = ScriptedBroker(tasks(8))
    engine = ScriptedEngine()
    engine.script.failed_rows = frozenset({0, 3})
    loop, _ = worker(engine, broker)
    loop.run()
    report = loop.report()
    assert report["ok"] == 6
    assert report["prompt_tokens"] == 6 * 8
    assert 6 * 2 <= report["output_tokens"] <= 6 * 4
    lengths = dict(report["idle_gap_lengths"])
    assert lengths.pop("seconds") == pytest.approx(report["idle_s"])
    assert sum(lengths.values()) == report["idle_gaps"] >= 1


@pytest.mark.parametrize("count", [1, 40])
def test_batch_fill_of_a_continuous_engine_is_the_share_of_places_over_time(count: int) -> None:
    engine = ScriptedEngine(continuous=True, profile=Profile(4, 4096, 100_000, 4096))
    loop, _ = worker(engine, ScriptedBroker(tasks(count)))
    loop.run()
    fill = loop.report()["batch_fill"]
    assert fill == pytest.approx(0.25) if count == 1 else 0.7 < fill <= 1.0


# ---- energy and calls


def test_calls_of_a_settled_run_are_told_apart_from_those_of_its_start() -> None:
    seen = iter([counted(5, 50), counted(7, 90), counted(7, 94)])
    joules = iter([1000.0, 1250.0])
    meter = RunMeter(lambda: next(joules), lambda: next(seen))
    for running_s in (0.0, 0.5, SETTLED_S, 2.0):  # looked at once, when it settles
        meter.turn(running_s)
    told = meter.as_json(tokens=5000)
    assert (told["joules"], told["tokens_per_joule"]) == (250.0, 20.0)
    assert told["cuda_calls"] == counted(2, 44).as_json()
    assert told["cuda_calls_settled"] == counted(0, 4).as_json()


def test_what_nobody_counts_is_null() -> None:
    meter = RunMeter(lambda: None, lambda: None)
    meter.turn(2.0)
    assert set(meter.as_json(10).values()) == {None}
    short = RunMeter(lambda: 1.0, lambda: counted(0, 0))
    short.turn(0.5)
    told = short.as_json(10)
    assert told["cuda_calls_settled"] is None, "a run that never settled proves nothing"
    assert told["tokens_per_joule"] is None, "nothing was used that could be counted"


def test_a_run_settles_a_second_after_its_engine_was_first_given_work() -> None:
    class Noted:
        def __init__(self) -> None:
            self.turns: list[float] = []

        def turn(self, running_s: float) -> None:
            self.turns.append(running_s)

        def as_json(self, tokens: int) -> dict[str, object]:
            return {"joules": tokens}

    engine, hand, meter = ScriptedEngine(), Hand(), Noted()
    engine.open()
    broker = ScriptedBroker(tasks(6), away=True)
    loop = WorkerLoop(engine, broker, device="cpu:0", wait=hand.wait, clock=hand.clock,
                      pace=Pace(until_idle=True), meter=meter)  # fmt: skip
    while hand.now < 5:
        loop.step()
    assert set(meter.turns) == {0.0}, "it waited for its broker all the time"
    broker.restart()
    loop.run()
    assert 0 < meter.turns[-1] < hand.now - 5
    report = loop.report()
    assert report["joules"] == report["prompt_tokens"] + report["output_tokens"] > 0


# ---- told while it runs


def test_the_account_of_a_worker_is_read_while_it_lives(home_settings: Settings) -> None:
    home_settings.home.mkdir()
    make_runtime_folder(home_settings.runtime_dir)
    report = {
        **Throughput(prompt_tokens=1200, output_tokens=300, seconds=2.0).as_json(EngineStats(), {}),
        **RunMeter(lambda: None, lambda: None).as_json(1500),
    }
    assert account.read(home_settings) == []
    with account.WorkerAccount(home_settings, "model@scripted", "cpu:0") as kept:
        kept.keep(lambda: report)
        kept.keep(lambda: pytest.fail("once a second is enough"))
        (seen,) = account.read(home_settings)
        assert (seen["engine"], seen["device"], seen["pid"]) == (
            "model@scripted",
            "cpu:0",
            os.getpid(),
        )
        assert seen["prompt_tokens"] == 1200
        assert account.summary(seen).startswith("600 tokens a second in, 150 out; engine busy 0 %")
        assert "joule" not in account.summary(seen)
        assert account.summary({**seen, "tokens_per_joule": 30.0}).endswith(", 30.0 tokens a joule")
        (text,) = account.folder_of(home_settings).glob("*.prom")
        assert "fabric_worker_cpu_0_prompt_tokens 1200.0\n" in text.read_text()
        (path,) = account.folder_of(home_settings).glob("*.json")
        path.write_text(json.dumps({**seen, "pid": 2**22 + 1}))
        assert account.read(home_settings) == [], "a worker that is gone"
    assert list(account.folder_of(home_settings).iterdir()) == []


@pytest.mark.parametrize(
    "written", ["", "{", "[]", "null", '{"pid": "1"}', "[" * 100_000, "\x00" * 40]
)
def test_what_cannot_be_read_is_no_account(home_settings: Settings, written: str) -> None:
    make_runtime_folder(home_settings.runtime_dir)
    folder = account.folder_of(home_settings)
    folder.mkdir()
    (folder / "cpu-0.json").write_text(written)
    assert account.read(home_settings) == []


def test_an_account_of_another_version_is_one_sentence() -> None:
    for facts in ({"pid": 1}, {"pid": 1, "device_busy_share": "much"}):
        told = account_in_words(facts, account.summary)
        assert told == "runs another version of this program: `fabric down`, then `fabric up`"
        assert account.name(facts) == "an engine on its device"


def test_a_disk_that_takes_no_account_is_said_once(home_settings: Settings) -> None:
    said: list[str] = []
    elsewhere = replace(home_settings, home=home_settings.home / "gone")
    with account.WorkerAccount(elsewhere, "model@scripted", "cpu:0", say=said.append) as kept:
        for _ in range(3):
            kept._kept._written_s = float("-inf")
            kept.keep(dict)
    (line,) = said
    assert "cannot be written (No such file or directory); the work goes on" in line
