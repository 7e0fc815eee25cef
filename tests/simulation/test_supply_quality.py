"""The figures of `fabric bench supply` do not get worse: padding, prefix reuse, lane switches, idle slots."""

from __future__ import annotations

from typing import Any

import pytest

from fabric_pipelines.bench import supply_quality, supply_shares


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return supply_quality.measure(documents=800, tasks=60_000)


def test_padding_is_at_most_two_and_a_half_percent(found: dict[str, Any]) -> None:
    padded = found["padding"]
    assert found["padding_waste"] <= 0.025
    assert padded["fixed_64"] > 0.06
    assert padded["powers_of_two"] > 0.25
    assert padded["first_come"] > 0.7


def test_prefix_reuse_is_within_two_hundredths_of_the_bound_of_the_whole_backlog(
    found: dict[str, Any],
) -> None:
    assert [pool["consumers"] for pool in found["consumers"]] == [1, 2, 4]
    assert found["prefix_bound"] - found["prefix_hit_rate"] <= 0.02
    assert found["prefix"]["windows_of_256"] < found["prefix_bound"] - 0.2
    assert found["prefix"]["lanes_by_output_class"] < found["prefix_bound"] - 0.05


def test_long_prompts_reach_their_bound_too(
    found: dict[str, Any],
) -> None:
    rates = found["prefix_long"]
    assert rates["bound"] - rates["whole_backlog"] <= 0.01
    assert rates["windows_of_256"] < rates["bound"] - 0.3


def test_a_lane_is_left_once_when_it_is_walked_and_once_when_its_rest_is(
    found: dict[str, Any],
) -> None:
    padded = found["padding"]
    assert padded["lane_switches"] <= 2 * padded["lanes"]
    assert padded["leases"] <= 60_000 / 64 + padded["lanes"] / 4
    assert all(pool["lane_switches"] == 0 for pool in found["consumers"])


def test_slots_are_busy_but_for_the_end(found: dict[str, Any]) -> None:
    alone, two, _ = found["consumers"]
    assert alone["idle"] <= 0.04
    assert two["idle"] <= 0.08
    assert alone["idle_end"] <= 0.45
    assert two["idle_end"] <= 0.65


def test_everything_was_handed_out_once_and_the_ledger_says_so(found: dict[str, Any]) -> None:
    assert found["differences"] == 0
    assert len(found["consumers"]) == 3


def test_the_table_shows_every_figure(found: dict[str, Any]) -> None:
    text = supply_quality.table(found)
    assert f"{found['padding_waste']:.2%}" in text
    assert f"{found['prefix_bound']:.3f}" in text


@pytest.fixture(scope="module")
def shared() -> dict[str, Any]:
    return supply_shares.measure(tasks=30_000, documents=400)


def test_unlike_profiles_are_both_served_full_until_the_rests_of_the_lanes(
    shared: dict[str, Any],
) -> None:
    small, large = shared["profiles"]
    assert small["tasks"] + large["tasks"] == 30_000
    assert small["full"] >= 0.97
    assert large["full"] >= 0.9
    assert min(small["full_until"], large["full_until"]) >= 0.97
    assert large["fill"] >= 0.9


def test_tenants_take_turns_of_about_a_lease_and_keep_their_prefixes(
    shared: dict[str, Any],
) -> None:
    assert [row["consumers"] for row in shared["tenants"]] == [1, 2, 4]
    for row in shared["tenants"]:
        assert row["gap_leases"] <= 2.0
        assert row["bound"] - row["hit_rate"] <= 0.02
        assert row["differences"] == 0


def test_the_table_of_shares_shows_every_row(shared: dict[str, Any]) -> None:
    text = supply_shares.table(shared)
    assert f"| large | {shared['profiles'][1]['leases']} |" in text
    for row in shared["tenants"]:
        assert f"| {row['gap_leases']:.1f} leases |" in text
