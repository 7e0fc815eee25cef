"""Before the first lease: manifest, profile and device must agree; a long step keeps its leases."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from fabric_pipelines.errors import BrokerUnavailable, ManifestRefused, UsageError
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.settings import Settings
from fabric_pipelines.testing.scripted_engine import ScriptedEngine
from fabric_pipelines.worker import service
from fabric_pipelines.worker.loop import Pace
from fabric_pipelines.worker.profile_probe import keep, probe
from fabric_pipelines.worker.pulse import Pulse
from fabric_pipelines.worker.service import _opened, require_manifest, run_worker
from tests.support import eventually


def test_a_whole_manifest_that_fits_profile_and_device_is_accepted() -> None:
    engine = ScriptedEngine()
    require_manifest(engine, "cpu:0")
    assert not engine.opened, "reading a manifest touches no device"


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_batch_size", 2), ("max_num_tokens", 32), ("world_size", 2), ("version", "")],
)
def test_a_manifest_that_contradicts_is_refused_with_the_fields_name(
    field: str, value: object
) -> None:
    engine = ScriptedEngine(profile=Profile(4, 64, 256, 64))
    engine.manifest = replace(engine.manifest, **{field: value})
    with pytest.raises(ManifestRefused) as refusal:
        require_manifest(engine, "cpu:0")
    assert field in refusal.value.fields
    assert field in str(refusal.value)


def test_an_engine_on_a_device_of_another_kind_is_refused(home_settings: Settings) -> None:
    engine = ScriptedEngine()
    with pytest.raises(ManifestRefused, match="must be cpu, not cuda:0"):
        run_worker(engine, home_settings, device="cuda:0")
    assert not engine.opened


def test_a_worker_computes_on_the_card_that_it_locks(
    home_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With CUDA_VISIBLE_DEVICES set beforehand: its second card, and not its first under the other's lock."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    monkeypatch.setattr(service, "card_id", lambda entry: f"GPU-{entry}")
    seen: list[str] = []

    def construct(name: str, **more: object) -> ScriptedEngine:
        seen.extend(os.environ[key] for key in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"))
        return ScriptedEngine()

    def run(engine: object, settings: object, *, card: str, **more: object) -> dict[str, str]:
        return {"card": card}

    monkeypatch.setattr(service, "construct_engine", construct)
    monkeypatch.setattr(service, "run_worker", run)
    told = service.run_engine("x@vllm", home_settings, device="cuda:1")
    assert seen == ["6", "PCI_BUS_ID"]
    assert told == {"card": "GPU-6"}


def test_steps_ahead_are_the_setting_s_or_this_worker_s_own(
    home_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def construct(name: str, **more: object) -> ScriptedEngine:
        asked.append(more["steps_ahead"])
        return ScriptedEngine()

    monkeypatch.setattr(service, "construct_engine", construct)
    monkeypatch.setattr(service, "run_worker", lambda *given, **more: {})
    set_to_three = replace(home_settings, steps_ahead=3)
    service.run_engine("x@vllm", home_settings, device="cpu:0")
    service.run_engine("x@vllm", set_to_three, device="cpu:0")
    service.run_engine("x@vllm", set_to_three, device="cpu:0", steps_ahead=1)
    assert asked == [2, 3, 1]


@pytest.mark.parametrize(
    ("engine", "steps", "says"),
    [
        ("x@vllm", 0, "setting steps_ahead is 0; it must be a whole number from 1 to 8"),
        ("x@vllm", 9, "setting steps_ahead is 9"),
        ("x@ctranslate2-int8", 3, "x@ctranslate2-int8 takes no --steps-ahead"),
    ],
)
def test_steps_ahead_that_no_engine_runs_are_refused_before_one_is_constructed(
    home_settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    steps: int,
    says: str,
) -> None:
    monkeypatch.delattr(service, "construct_engine")
    with pytest.raises(UsageError, match=says):
        service.run_engine(engine, home_settings, device="cpu:0", steps_ahead=steps)


def test_the_first_batch_waits_as_long_as_the_setting_says(
    home_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    paces: list[Pace] = []

    def loop(*given: object, pace: Pace, **more: object) -> None:
        paces.append(pace)
        raise BrokerUnavailable("seen enough")

    monkeypatch.setattr(service, "WorkerLoop", loop)
    for settings in (home_settings, replace(home_settings, start_full_ms=0)):
        with pytest.raises(BrokerUnavailable, match="seen enough"):
            run_worker(ScriptedEngine(), settings, device="cpu:0")
    assert [pace.start_full_s for pace in paces] == [2.0, 0.0]


def test_an_engine_whose_fingerprint_changes_on_opening_leases_nothing(
    home_settings: Settings, tmp_path: Path
) -> None:
    class Changeling(ScriptedEngine):
        def open(self) -> None:
            super().open()
            self.fingerprint = "f" * 64

    engine = Changeling()
    with pytest.raises(ManifestRefused, match="changed its fingerprint"):
        run_worker(engine, home_settings, device="cpu:0")
    assert not engine.opened, "a refused engine is closed again"
    assert engine.seen == []


def test_a_measured_profile_is_declared_and_one_beyond_the_manifest_is_refused(
    home_settings: Settings, tmp_path: Path
) -> None:
    settings = replace(home_settings, models=tmp_path)  # the usual model cache is the user's own
    engine = ScriptedEngine()
    engine.open()
    found = probe(engine, device="cpu:0", vocab_size=100, layer=1)
    keep(found, settings.models)
    fresh = ScriptedEngine()
    with _opened(fresh, settings, "cpu:0"):
        assert fresh.profile == found.profile
    keep(replace(found, profile=Profile(4, 999, 256, 64)), settings.models)
    with (
        pytest.raises(ManifestRefused, match="max_num_tokens is 64, below the profile's 999"),
        _opened(ScriptedEngine(), settings, "cpu:0"),
    ):
        pytest.fail("a profile beyond the manifest was taken")


@pytest.mark.parametrize(
    ("engine", "changed", "field"),
    [
        ("generate", {"max_batch_size": 5}, "max_batch_size"),
        ("generate", {"max_num_tokens": 65}, "max_num_tokens"),
        ("generate", {"window_tokens": 8 * 64 + 1}, "window_tokens"),
        ("generate", {"kv_cache_tokens": 0}, "kv_cache_tokens"),
        ("embed", {"kv_cache_tokens": 10**9}, "kv_cache_tokens"),
    ],
)
def test_each_number_of_a_kept_profile_that_no_probe_gave_is_refused_by_name(
    home_settings: Settings, tmp_path: Path, engine: str, changed: dict[str, int], field: str
) -> None:
    """The cache and the window were taken as they stood there: a single pass of 10^9 tokens of cache ran."""
    settings = replace(home_settings, models=tmp_path)
    own = Profile(4, 64, 0 if engine == "embed" else 256, 64)

    def made() -> ScriptedEngine:
        return ScriptedEngine(kind=engine, profile=own)

    first = made()
    first.open()
    found = probe(first, device="cpu:0", vocab_size=100, layer=1)
    kept = replace(Profile(4, 64, first.profile.kv_cache_tokens, 8 * 64), **changed)
    path = keep(replace(found, profile=kept), settings.models)
    with (
        pytest.raises(ManifestRefused, match=rf"{path}.*{field} is.*fabric engine probe") as no,
        _opened(made(), settings, "cpu:0"),
    ):
        pytest.fail("a profile that promises more was taken")
    assert no.value.fields == (field,)


def test_a_card_with_less_free_memory_than_at_the_probe_declares_what_it_opened_with(
    home_settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = replace(home_settings, models=tmp_path)
    engine = ScriptedEngine()
    engine.open()
    keep(probe(engine, device="cpu:0", vocab_size=100, layer=1), settings.models)
    tight = ScriptedEngine(profile=Profile(4, 64, 200, 64))
    with _opened(tight, settings, "cpu:0"):
        assert tight.profile.kv_cache_tokens == 200
    assert "kv_cache_tokens 256, and scripted@scripted opened with 200" in caplog.text


def test_a_single_pass_declares_no_cache() -> None:
    engine = ScriptedEngine(kind="embed", profile=Profile(4, 64, 256, 64))
    with pytest.raises(ManifestRefused, match="kv_cache_tokens must be 0 of a single pass"):
        require_manifest(engine, "cpu:0")


class Beats:
    """Counts renewals; the first `failures` of them find no broker."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.count = 0
        self.threads: set[int] = set()

    def renew(self) -> None:
        self.count += 1
        self.threads.add(threading.get_ident())
        if self.count <= self.failures:
            raise BrokerUnavailable("no broker")


def test_a_long_step_keeps_its_leases_through_a_client_of_its_own_thread() -> None:
    beats = Beats(failures=1)
    with Pulse(
        lambda: beats, last_turn_s=lambda: 0.0, now_s=lambda: 10.0, heartbeat_s=0.01, stall_s=60
    ):
        eventually(lambda: beats.count >= 3, within_s=60, what="three renewals")
    assert beats.threads != {threading.get_ident()}
    assert len(beats.threads) == 1


@pytest.mark.parametrize(("age_s", "needed"), [(0.5, False), (5.0, True), (61.0, False)])
def test_the_pulse_beats_only_for_a_loop_that_is_busy_and_not_for_one_that_is_stuck(
    age_s: float, needed: bool
) -> None:
    pulse = Pulse(Beats, last_turn_s=lambda: 0.0, now_s=lambda: age_s, heartbeat_s=1, stall_s=60)
    assert pulse.is_needed() is needed
