"""Real broker processes and real worker processes around a scripted engine: restarts, kills, drains, holds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fabric_pipelines.records.confirmation import Confirmation
from fabric_pipelines.testing.scripted_engine import expected_output
from fabric_pipelines.worker import account
from tests.support import eventually
from tests.support_stage import Stage, stage

LANDED = Confirmation("postgres", {"cluster": "1", "xid": "2", "table": "t"})
PROMPTS = [[1 + n % 40, 2, 3 + n] for n in range(120)]


def ended(worker: subprocess.Popen[str], code: int = 0) -> dict[str, Any]:
    """The counters that a worker prints at its end."""
    out, err = worker.communicate(timeout=90)
    assert worker.returncode == code, err
    report: dict[str, Any] = json.loads(out) if out else {}
    return report


def held(folder: Path, *, after: int) -> dict[str, Any]:
    """A script of an engine that stands still after so many steps, until `go_on`."""
    return {"hold_after": after, "hold_until": str(folder / "go")}


def go_on(folder: Path) -> None:
    (folder / "go").touch()


def expect_every_result(on: Stage) -> None:
    with on.client("completion") as client:
        found = on.pull(client)
    wanted = {row: expected_output(tokens, 4, 49_152) for row, tokens in enumerate(PROMPTS)}
    assert found == wanted


def test_a_worker_computes_everything_once_and_ends_with_its_counters() -> None:
    with stage() as on:
        on.submit(PROMPTS)
        report = ended(on.start_worker(until_idle=True))
        assert on.total()["computed"] == len(PROMPTS)
        assert report["ok"] == report["sent"] == len(PROMPTS)
        assert report["undelivered"] == report["duplicates"] == report["late"] == 0
        assert report["offered_tokens"] == 3 * len(PROMPTS)
        expect_every_result(on)


def test_a_broker_killed_in_mid_run_costs_no_result_and_no_second_run(tmp_path: Path) -> None:
    with stage() as on:
        on.submit(PROMPTS)
        worker = on.start_worker(until_idle=True, script=held(tmp_path, after=5))
        on.reached("computed", 20)
        on.kill_broker()
        on.start_broker()
        go_on(tmp_path)
        report = ended(worker)
        assert on.total()["computed"] == len(PROMPTS)
        assert report["ok"] == len(PROMPTS), "what was finished or running was not run again"
        assert report["reattached"] >= 1
        expect_every_result(on)


def test_sigterm_drains_and_hands_back_what_did_not_start(tmp_path: Path) -> None:
    with stage() as on:
        on.submit(PROMPTS)
        worker = on.start_worker(script=held(tmp_path, after=2), profile=[4, 64, 256, 400])
        on.reached("computed", 8)
        full = eventually(
            lambda: (found := on.total())["leased"] >= 40 and found,
            within_s=60,
            what="its window is full",
        )
        worker.send_signal(signal.SIGTERM)
        eventually(
            lambda: on.total()["leased"] < full["leased"],
            within_s=60,
            what="it hands back what did not start",
        )
        go_on(tmp_path)
        report = ended(worker)
        total = on.total()
        assert total["leased"] == 0
        assert total["computed"] == report["ok"] < len(PROMPTS)
        assert report["nacked"] > 0
        ended(on.start_worker(until_idle=True))
        expect_every_result(on)


def test_a_killed_workers_tasks_come_back_when_its_leases_run_out(tmp_path: Path) -> None:
    with stage(lease_ms=1500) as on:
        on.submit(PROMPTS)
        worker = on.start_worker(script=held(tmp_path, after=2), profile=[4, 64, 256, 400])
        on.reached("computed", 8)
        worker.kill()
        worker.communicate(timeout=60)
        assert on.total()["leased"] > 0
        on.start_worker(script={"step_s": 0.0})
        on.reached("computed", len(PROMPTS))
        expect_every_result(on)


def test_a_failed_engine_ends_its_worker_and_the_next_one_finishes_the_work() -> None:
    with stage(lease_ms=1500) as on:
        on.submit(PROMPTS)
        ended(on.start_worker(script={"fail_at_poll": 4}), code=1)
        assert 0 < on.total()["computed"] < len(PROMPTS)
        on.start_worker()
        on.reached("computed", len(PROMPTS))
        expect_every_result(on)


@pytest.mark.slow
def test_a_task_that_brings_engines_down_is_found_by_halving_and_blamed_alone() -> None:
    with stage(attempts_max=2) as on:
        on.submit(PROMPTS[:16])
        engine = {"until_idle": True, "script": {"poison_rows": [5]}, "profile": [8, 64, 256, 0]}
        for _ in range(12):  # a supervisor would start the next one
            worker = on.start_worker(**engine)
            worker.communicate(timeout=90)
            if worker.returncode == 0:
                break
        with on.client("completion") as client:
            batch = client.pull_computed(rows=100)
        assert batch is not None
        rows = {row["source_row"]: row["status"] for row in batch.to_pylist()}
        assert {row for row, status in rows.items() if status != "ok"} == {5}
        assert len(rows) == 16


def test_a_second_worker_on_a_device_is_refused_with_the_pid_of_the_first() -> None:
    with stage() as on:
        on.submit(PROMPTS[:8])
        first = on.start_worker()
        on.reached("computed", 8)
        second = on.start_worker()
        _, err = second.communicate(timeout=90)
        assert second.returncode == 4
        assert f"pid {first.pid}" in err
        assert "Traceback" not in err
        first.terminate()
        assert ended(first)["ok"] == 8


def test_at_the_high_water_mark_workers_hold_until_results_have_landed() -> None:
    with stage(computed_high_water_tasks=20) as on:
        on.submit(PROMPTS)
        worker = on.start_worker(script={"step_s": 0.01}, profile=[4, 16, 64, 16])
        on.reached("computed", 20)
        eventually(lambda: on.total()["leased"] == 0, within_s=60, what="the worker holds")
        with on.client("completion") as client:
            landed: dict[int, list[int]] = {}

            def land() -> bool:
                batch = client.pull_computed(rows=1000, wait_s=0.2)
                if batch is not None and batch.num_rows:
                    for row in batch.to_pylist():
                        landed[row["source_row"]] = row["output"]
                    client.retire(batch.column("task_id").to_numpy(), LANDED)
                return len(landed) == len(PROMPTS)

            held = on.total()
            assert held["computed"] < 20 + 3 * 16, "work beyond the mark is only what was in hand"
            eventually(land, within_s=60, what="all results are pulled")
        worker.terminate()
        report = ended(worker)
        assert on.total()["retired"] == len(PROMPTS)
        assert report["rungs"]["hold"] >= 1


@pytest.mark.slow
def test_a_worker_that_starts_before_its_broker_waits_for_it() -> None:
    with stage() as on:
        on.submit(PROMPTS[:8])
        on.kill_broker()
        worker = on.start_worker(until_idle=True)
        on.start_broker()
        assert ended(worker)["ok"] == 8


def test_status_shows_what_a_running_worker_counts_and_nothing_of_one_that_ended(
    tmp_path: Path,
) -> None:
    with stage() as on:
        on.submit(PROMPTS)
        worker = on.start_worker(until_idle=True, script=held(tmp_path, after=5))
        on.reached("computed", 20)
        eventually(
            lambda: [row for row in account.read(on.settings) if row["ok"] >= 20],
            within_s=60,
            what="an account",
        )
        shown = subprocess.run(
            [sys.executable, "-m", "fabric_pipelines", "status", "--json"],
            env={**os.environ, **on.settings.as_environment()},
            capture_output=True,
            text=True,
            check=True,
        )
        (row,) = json.loads(shown.stdout)["workers"]
        assert (row["pid"], row["device"]) == (worker.pid, "cpu:0")
        assert row["prompt_tokens"] == 3 * row["ok"]
        assert (row["joules"], row["cuda_calls"]) == (None, None), "no card, and nobody counts"
        go_on(tmp_path)
        report = ended(worker)
        assert report["prompt_tokens"] == 3 * len(PROMPTS)
        assert account.read(on.settings) == []
