"""The client of request and response, first row of the ablation: never more at the engine than it has connections."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from fabric_pipelines.records.profile import Profile
from fabric_pipelines.testing.scripted_engine import ScriptedEngine
from fabric_pipelines.worker.engines import registry
from tests.bench import request_response
from tests.bench.request_response import GREEDY, Client, Request, row, small_mix, vllm_rows
from tests.unit.engines.vllm_over_standin import VOCAB, VllmOverStandin


def requests(count: int) -> list[Request]:
    return [Request([1 + n % 5] * 4, 3) for n in range(count)]


@pytest.mark.parametrize("continuous", [True, False])
@pytest.mark.parametrize("connections", [1, 3, 8])
def test_so_many_are_at_the_engine_as_there_are_connections_and_in_order(
    connections: int, continuous: bool
) -> None:
    engine = ScriptedEngine(continuous=continuous, profile=Profile(8, 64, 256, 0))
    engine.open()
    client = Client(engine, iter(requests(20)), connections, dict(GREEDY))
    while client.turn() or client.ended < 20:
        assert len(engine.unfinished()) <= connections
    assert client.most_inside == connections
    assert engine.seen == list(range(20))
    assert client.output_tokens == engine.stats.generated_tokens > 0


def test_a_client_that_ends_sends_no_more_and_waits_for_what_is_under_way() -> None:
    engine = ScriptedEngine(continuous=True)
    engine.open()
    client = Client(engine, iter(requests(20)), 4, dict(GREEDY))
    client.turn()
    client.drain()
    assert (client.inside, client.ended, len(engine.seen)) == (0, 4, 4)


@pytest.mark.usefixtures("tiny_known")
def test_each_way_answers_the_same_list_and_more_at_the_door_means_fewer_steps(
    tiny_cache: Path, tmp_path: Path
) -> None:
    """On a real engine that cuts its own steps."""
    engine = registry.open_engine("generate", cache=tiny_cache, threads=1)
    try:
        mix = small_mix(24, engine.capabilities.vocab_size)
        told = [row(engine, mix, way, tmp_path / way) for way in ("1", "4", "supplied")]
    finally:
        engine.close()
    assert [one["answers"] for one in told] == [24] * 3
    assert len({one["computed_tokens"] for one in told}) == 1
    steps = [one["steps"] for one in told]
    assert steps[0] == 24
    assert steps[0] > steps[1] > steps[2] >= len(request_response.OUTPUTS)


def test_before_vllm_its_feeding_is_what_it_was_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def ask(engine: Any, function: Any, *given: Any) -> tuple[int, int, int]:
        asked.append((function.__name__, *given))
        return (100 * len(asked), len(asked), 2)

    monkeypatch.setattr(request_response, "ask", ask)
    monkeypatch.setattr(
        request_response,
        "endless",
        lambda mix: (Request([n % (VOCAB - 10) + 5] * 4, 3) for n in range(10**6)),
    )
    engine = VllmOverStandin(tmp_path / "tiny", monkeypatch).open()
    before = engine.feeding
    told: list[dict[str, Any]] = []
    started = time.process_time()
    vllm_rows(engine, 0.02, 0.05, told.append, connections=(1, 3))
    assert time.process_time() - started < 5
    assert [one["connections"] for one in told] == [1, 3]
    assert all(one["total_tok_s"] > 0 and one["answers_s"] > 0 for one in told)
    assert ("set_ahead", 1, False) in asked, "vLLM as it is"
    assert engine.feeding == before
    assert engine.unfinished() == []
    engine.close()
