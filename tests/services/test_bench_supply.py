"""The supply benchmark end to end on vLLM's stand-in and a real broker: it counts the same work on both sides."""

from __future__ import annotations

from pathlib import Path

import pytest

from fabric_pipelines.bench.supply import Side, draw_mix, measure, ratios, run_fabric
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.testing.scripted_engine import ScriptedEngine
from tests.bench import request_response
from tests.unit.engines.vllm_over_standin import VllmOverStandin


def test_the_mix_is_that_of_the_published_figures() -> None:
    mix = draw_mix(2000)
    lengths = [len(prompt) for prompt in mix.prompts]
    assert (min(lengths), max(lengths)) == (180, 539)
    assert (min(mix.new), max(mix.new)) == (115, 344)
    assert (draw_mix(5).prompts[4] == draw_mix(5).prompts[4]).all()


def test_both_ways_run_the_same_tokens_and_the_last_completion_is_journaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fabric_pipelines.bench.supply.PROMPT_TOKENS", (20, 60))
    monkeypatch.setattr("fabric_pipelines.bench.supply.OUTPUT_TOKENS", (5, 20))
    monkeypatch.setattr("fabric_pipelines.bench.supply.VOCABULARY", (0, 500))
    engine = VllmOverStandin(tmp_path / "tiny", monkeypatch).open()
    engine.profile = Profile(4, 64, 4096, 128)
    mix, told = draw_mix(150), []
    sides = measure(engine, mix, 2, tmp_path / "h", told.append)
    engine.close()
    assert [side.way for side in sides] == ["direct", "fabric", "direct", "fabric"]
    assert told == sides
    for side in sides:
        assert side.tasks == 150
        assert side.offered_tokens == mix.prompt_tokens
        assert side.reused_tokens + side.computed_tokens == side.offered_tokens
        assert side.generated_tokens == int(mix.new.sum())
        assert side.seconds > 0
    assert all(ratio > 0 for ratio in ratios(sides))


def test_a_landed_side_ends_with_every_row_in_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: Database
) -> None:
    monkeypatch.setattr("fabric_pipelines.bench.supply.PROMPT_TOKENS", (20, 60))
    monkeypatch.setattr("fabric_pipelines.bench.supply.OUTPUT_TOKENS", (5, 20))
    monkeypatch.setattr("fabric_pipelines.bench.supply.VOCABULARY", (0, 500))
    engine = VllmOverStandin(tmp_path / "tiny", monkeypatch).open()
    engine.profile = Profile(4, 64, 4096, 128)
    side = run_fabric(engine, draw_mix(40), tmp_path / "h", database.url)
    engine.close()
    assert side.loop["landed_rows"] == side.tasks == 40
    assert 0 <= side.loop["landed_after_s"] <= side.seconds
    assert not any(side.loop[name] for name in ("duplicates", "nacked", "failed", "lane_switches"))


def test_the_best_order_ends_with_the_longest_cap_of_the_last_fiftieth_first() -> None:
    mix = draw_mix(200)
    best = mix.best_order()
    assert best.new[:196].tolist() == mix.new[:196].tolist()
    assert best.new[196:].tolist() == sorted(mix.new[196:].tolist(), reverse=True)
    assert sorted(map(len, best.prompts)) == sorted(map(len, mix.prompts))


def test_a_ratio_is_the_fabric_over_the_direct_side_of_its_round() -> None:
    def side(way: str, seconds: float) -> Side:
        return Side(way, 1, seconds, 100, 0, 100, 100, None, None, 0.0, 0.0, None)

    sides = [side("direct", 1.0), side("fabric", 2.0), side("fabric", 2.0), side("direct", 2.0)]
    assert ratios(sides) == [0.5, 1.0]
    assert sides[0].total_rate == 200


def test_the_ablation_ends_with_the_same_list_through_a_broker(tmp_path: Path) -> None:
    engine = ScriptedEngine(name="scripted@scripted", continuous=True, finish_per_poll=4)
    engine.open()
    requests = request_response.small_mix(40, engine.vocab_size)
    told = [
        request_response.row(engine, requests, way, tmp_path / "h")
        for way in ("3", "supplied", "fabric")
    ]
    assert [one["way"] for one in told] == ["client, 3 connections", "supplied", "fabric"]
    assert [one["answers"] for one in told] == [40] * 3
    assert {one["computed_tokens"] for one in told} == {one["offered_tokens"] for one in told}
    assert len({one["generated_tokens"] for one in told}) == 1
