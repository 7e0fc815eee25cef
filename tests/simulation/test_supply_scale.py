"""The figures of `fabric bench supply --scale` do not get worse: what a task takes, and what does not grow with the
backlog. CPU times with room for a busy machine; ratios within one run are the tighter guard."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from fabric_pipelines.bench import supply_scale
from fabric_pipelines.bench.supply_scale import Scale, measure_one


@pytest.fixture(scope="module")
def small() -> Scale:
    return measure_one(1000, leases=500)


@pytest.fixture(scope="module")
def large() -> dict[str, Any]:
    """In a process of its own: memory is measured."""
    command = [sys.executable, "-m", supply_scale.__name__, "--tasks", "1000000", "--leases", "500"]
    found: dict[str, Any] = json.loads(subprocess.check_output(command))
    return found


def test_a_million_tasks_take_little_more_than_36_bytes_each_at_any_moment_of_growth(
    large: dict[str, Any],
) -> None:
    """Ten million take 32; of one million, what the process itself allocates is a fifth."""
    assert 28 <= large["index_bytes"] <= 46
    assert large["index_peak_bytes"] <= 46


def test_a_lease_does_not_cost_more_from_a_thousand_times_the_backlog(
    small: Scale, large: dict[str, Any]
) -> None:
    assert large["lease_median_us"] <= 300, "CPU: twice the target, for a slower machine"
    assert large["lease_median_us"] <= 2 * small.lease_median_us
    assert large["lease_p99_us"] <= 4 * small.lease_p99_us
    assert large["first_lease_ms"] <= 100


def test_a_million_tasks_are_audited_in_a_blink(large: dict[str, Any]) -> None:
    assert large["audit_first_ms"] <= 100


def test_a_restart_reads_a_million_tasks_without_sorting_them(large: dict[str, Any]) -> None:
    assert large["restart_ms"] <= 1000
    assert large["restart_first_lease_ms"] <= 100


def test_the_table_shows_both_ends(small: Scale, large: dict[str, Any]) -> None:
    rows = [{name: getattr(small, name) for name in Scale.__dataclass_fields__}, large]
    text = supply_scale.table({"lease_p99_growth": 1.0, "backlogs": rows})
    assert "| 1,000 | 1 |" in text
    assert f"{large['index_bytes']:.1f} ({large['index_peak_bytes']:.1f})" in text
