"""The probe declares what it saw: the smallest budget near the best rate, a window that lasts, for this hardware only."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from fabric_pipelines.errors import EngineFailed, StorageFailed, UsageError
from fabric_pipelines.records.lease import Lease
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.testing.scripted_engine import ScriptedEngine
from fabric_pipelines.worker import profile_probe
from fabric_pipelines.worker.profile_probe import hardware, keep, kept_profile, probe


@dataclass
class CostedEngine(ScriptedEngine):
    """Busy as long as `cost_s(tokens of a step)` says, without waiting for it; steps are cut by its profile."""

    cost_s: Callable[[int], float] = lambda tokens: 0.001 + tokens / 1e5
    budgets: list[int] = field(default_factory=list)

    def submit(self, lease: Lease) -> None:
        super().submit(lease)
        budget = self.profile.max_num_tokens
        self.budgets.append(budget)
        waiting = sum(len(tokens) for tokens in lease.tasks.column("tokens").to_pylist())
        while waiting > 0:
            step = min(waiting, budget)
            self.stats.busy_s += self.cost_s(step)
            waiting -= step


def costed(cost_s: Callable[[int], float], **more: Any) -> CostedEngine:
    engine = CostedEngine(
        kind="embed", profile=Profile(64, 1024, 0, 64), cost_s=cost_s, max_input_len=512, **more
    )
    engine.open()
    return engine


def probed(engine: CostedEngine) -> profile_probe.Probed:
    """The processor is as busy as the engine says it is."""
    cpu_s = lambda: engine.stats.busy_s  # noqa: E731
    return probe(engine, device="cpu:0", vocab_size=100, layer=1, cpu_s=cpu_s)


def test_the_smallest_budget_within_three_percent_of_the_best_is_declared() -> None:
    """A step costs 1 ms and 10 us a token: 512 tokens reach 0.84 of the limit, 1,024 reach 0.91."""
    engine = costed(lambda tokens: 1e-3 + tokens * 1e-5)
    found = probed(engine)
    assert [row.max_num_tokens for row in found.rows] == [32, 64, 128, 256, 512, 1024]
    assert found.profile.max_num_tokens == 1024
    flat = costed(lambda tokens: 1e-5 + tokens * 1e-5)  # from 32 on it makes no difference
    assert probed(flat).profile.max_num_tokens == 32


def test_steps_whose_cost_grows_with_their_square_end_the_search() -> None:
    engine = costed(lambda tokens: 1e-3 + tokens * 1e-5 + tokens**2 * 1e-7)
    found = probed(engine)
    best = max(found.rows, key=lambda row: row.tokens_per_s)
    assert found.profile.max_num_tokens <= best.max_num_tokens < 512
    assert found.rows[-1].max_num_tokens < 1024, "a step that is a fifth slower ends the search"


def test_the_window_lasts_while_the_broker_is_asked_within_its_bounds() -> None:
    quick = probed(costed(lambda tokens: tokens * 1e-7)).profile
    assert quick.window_tokens == 8 * quick.max_num_tokens
    slow = probed(costed(lambda tokens: tokens * 1e-1)).profile
    assert slow.window_tokens == slow.max_num_tokens
    middle = probed(costed(lambda tokens: tokens * 1e-2 / 4)).profile  # 400 tokens a second
    assert middle.window_tokens == 200


def test_a_continuous_engine_keeps_the_budget_that_it_was_opened_with() -> None:
    engine = costed(lambda tokens: tokens * 1e-4, continuous=True)
    found = probed(engine)
    assert [row.max_num_tokens for row in found.rows] == [1024]
    assert set(engine.budgets) == {1024}
    assert found.profile.window_tokens == 5000


def test_on_a_processor_cpu_time_decides_and_on_a_card_the_engines_own() -> None:
    """By its own word every step costs alike; by CPU time a step costs 1 ms and 10 us a token."""
    for device, budget in (("cpu:0", 1024), ("cuda:0", 32)):
        engine = costed(lambda tokens: tokens * 1e-5)
        spent = [0.0]
        real = engine.cost_s

        def cost(tokens: int, spent: list[float] = spent, real: Any = real) -> float:
            spent[0] += 1e-3 + tokens * 1e-5
            return float(real(tokens))

        engine.cost_s = cost
        clock = lambda spent=spent: spent[0]  # noqa: E731
        found = probe(engine, device=device, vocab_size=100, layer=1, cpu_s=clock)
        assert found.profile.max_num_tokens == budget


def test_every_budget_is_measured_in_every_round_and_ids_never_repeat() -> None:
    engine = costed(lambda tokens: tokens * 1e-5)
    probed(engine)
    assert engine.budgets.count(64) == 1 + profile_probe.ROUNDS
    assert len(set(engine.seen)) == len(engine.seen)


def test_an_engine_that_does_not_answer_well_is_not_probed() -> None:
    engine = costed(lambda tokens: tokens * 1e-5)
    engine.script.failed_rows = frozenset({0})
    with pytest.raises(EngineFailed, match="cannot be probed"):
        probed(engine)


def test_a_profile_is_kept_for_this_engine_on_this_hardware_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = costed(lambda tokens: 1e-5 + tokens * 1e-5)
    assert kept_profile(engine, tmp_path, "cpu:0") is None
    found = probed(engine)
    path = keep(found, tmp_path)
    assert kept_profile(engine, tmp_path, "cpu:0") == found.profile
    assert kept_profile(engine, tmp_path, "cpu:1") is None
    told = json.loads(path.read_text())
    path.write_text(json.dumps({**told, "hardware": "another processor"}))
    assert kept_profile(engine, tmp_path, "cpu:0") is None
    keep(replace(found, fingerprint="f" * 64), tmp_path)
    assert kept_profile(engine, tmp_path, "cpu:0") is None


def test_a_damaged_profile_is_one_sentence_with_the_remedy(tmp_path: Path) -> None:
    engine = costed(lambda tokens: 1e-5 + tokens * 1e-5)
    path = keep(probed(engine), tmp_path)
    told = json.loads(path.read_text())
    for content in ("{", "[]", json.dumps({**told, "profile": {"max_batch_size": 1}})):
        path.write_text(content)
        with pytest.raises(UsageError, match="run `fabric engine probe scripted@scripted` again"):
            kept_profile(engine, tmp_path, "cpu:0")


def test_something_else_in_the_place_of_a_profile_is_one_sentence(tmp_path: Path) -> None:
    """It was a raw IsADirectoryError."""
    engine = costed(lambda tokens: 1e-5 + tokens * 1e-5)
    found = probed(engine)
    path = keep(found, tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(UsageError, match=rf"{path} cannot be read \(Is a directory\): remove it"):
        kept_profile(engine, tmp_path, "cpu:0")
    with pytest.raises(StorageFailed, match=rf"cannot be kept in {path} \(Is a directory\)"):
        keep(found, tmp_path)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_profile_of_another_fingerprint_is_said_and_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = costed(lambda tokens: 1e-5 + tokens * 1e-5)
    path = keep(replace(probed(engine), fingerprint="f" * 64), tmp_path)
    assert kept_profile(engine, tmp_path, "cpu:0") is None
    assert f"the profile kept in {path} is of another fingerprint and not used" in caplog.text
    assert "run `fabric engine probe scripted@scripted` again" in caplog.text


def test_hardware_names_the_processor_or_the_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hardware("cpu:0").endswith(" cores")
    assert hardware("cuda:99") == "unknown card"
