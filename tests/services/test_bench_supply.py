"""The supply benchmark end to end on vLLM's stand-in and a real broker: it counts the same work on both sides."""

from __future__ import annotations

from pathlib import Path

import pytest

from fabric_pipelines.bench.supply import Side, draw_mix, measure, ratios
from fabric_pipelines.records.profile import Profile
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
    assert [side.way for side in sides] == ["direct", "fabric", "fabric", "direct"]
    assert told == sides
    for side in sides:
        assert side.tasks == 150
        assert side.offered_tokens == mix.prompt_tokens
        assert side.reused_tokens + side.computed_tokens == side.offered_tokens
        assert side.generated_tokens == int(mix.new.sum())
        assert side.seconds > 0
    assert all(ratio > 0 for ratio in ratios(sides))


def test_a_ratio_is_the_fabric_over_the_direct_side_of_its_round() -> None:
    def side(way: str, seconds: float) -> Side:
        return Side(way, 1, seconds, 100, 0, 100, 100, None, None, 0.0, 0.0, None)

    sides = [side("direct", 1.0), side("fabric", 2.0), side("fabric", 2.0), side("direct", 2.0)]
    assert ratios(sides) == [0.5, 1.0]
    assert sides[0].total_rate == 200
