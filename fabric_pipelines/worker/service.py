"""The worker process around the loop: order of start, signals, exit code.

Nothing is leased before every fail-closed rule has said yes, in this order: the manifest is whole (read from
files, no device touched), the device is of the engine's kind, the device is free, the opened engine agrees with
its manifest. A failed engine ends the process; whoever supervises it starts the next one.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.clock import SYSTEM_CLOCK
from fabric_pipelines.device import calls
from fabric_pipelines.device.energy import CardMeter, card_id, visible
from fabric_pipelines.errors import DeviceRefused, ManifestRefused, UsageError
from fabric_pipelines.models import contents
from fabric_pipelines.records.manifest import EngineManifest
from fabric_pipelines.settings import Settings, make_runtime_folder
from fabric_pipelines.waits import Waits
from fabric_pipelines.worker.account import WorkerAccount
from fabric_pipelines.worker.device_lock import DeviceLock, device_kind
from fabric_pipelines.worker.engines.door import Engine
from fabric_pipelines.worker.engines.registry import (
    checkpoint_runtime,
    construct_engine,
    engine_folder,
)
from fabric_pipelines.worker.loop import Pace, WorkerLoop
from fabric_pipelines.worker.meter import RunMeter
from fabric_pipelines.worker.profile_probe import Probed, held, keep, kept_profile, place_of, probe
from fabric_pipelines.worker.pulse import Pulse

LOG = logging.getLogger("fabric.worker")
CLOSE_S = (
    10.0  # beyond what an engine's step takes on the way out, and below a supervisor's patience
)


def require_manifest(engine: Engine, device: str) -> None:
    """ManifestRefused unless the nine fields are whole and fit the engine's profile and the device."""
    EngineManifest.from_json(engine.manifest.as_json())
    faults: dict[str, str] = {}
    for name in ("max_batch_size", "max_num_tokens"):
        built, declared = getattr(engine.manifest, name), getattr(engine.profile, name)
        if declared > built:
            faults[name] = f"is {built}, below the profile's {declared}"
    single, cache = engine.manifest.kv_quantisation == "single_pass", engine.profile.kv_cache_tokens
    if single and cache:
        faults["kv_cache_tokens"] = f"must be 0 of a single pass, not {cache}"
    if engine.manifest.world_size != 1:
        faults["world_size"] = f"is {engine.manifest.world_size}, but one device runs one engine"
    kind = device_kind(device)
    if engine.capabilities.device != kind:
        faults["device"] = f"must be {engine.capabilities.device}, not {device}"
    if faults:
        raise ManifestRefused(
            f"engine {engine.name} refused: " + "; ".join(f"{k} {v}" for k, v in faults.items()),
            tuple(faults),
        )


def run_engine(
    name: str,
    settings: Settings,
    *,
    device: str,
    until_idle: bool = False,
    steps_ahead: int | None = None,
) -> dict[str, Any]:
    """The registry's engine `name` as a worker; the exit line's counters. steps_ahead: of this worker instead of the setting,
    UsageError for an engine that has no such thing."""
    if steps_ahead is not None:
        if checkpoint_runtime(name) != "vllm":
            raise UsageError(
                f"engine {name} takes no --steps-ahead: only a vLLM engine (NAME@vllm...) has a scheduler that runs ahead"
            )
        settings = replace(settings, steps_ahead=steps_ahead)
    seen = _seen(device)
    card = _card(seen)
    engine = _constructed(name, settings, device, seen)
    return run_worker(engine, settings, device=device, until_idle=until_idle, card=card)


def probe_engine(name: str, settings: Settings, *, device: str) -> tuple[Probed, Path]:
    """Measure an engine as a worker would run it, alone on its device; the profile found and where it is kept."""
    seen = _seen(device)
    card = _card(seen)
    engine = _constructed(name, settings, device, seen)
    require_manifest(engine, device)
    folder = engine_folder(name, settings.models)
    facts = contents(folder)["facts"]
    layers = facts.get("layers", 0)
    make_runtime_folder(settings.runtime_dir)
    with DeviceLock(device, engine.name, settings.runtime_dir, card):
        engine.open()
        try:
            probed = probe(
                engine,
                device=device,
                vocab_size=facts["vocab_size"],
                layer=layers if isinstance(layers, int) else max(layers),
            )
        finally:
            engine.close()
    return probed, keep(probed, settings.models)


def _seen(device: str) -> str:
    """The card that a CUDA device is here and now, as CUDA_VISIBLE_DEVICES takes it; empty for a processor."""
    return visible(device) if device_kind(device) == "cuda" else ""


def _card(seen: str) -> str:
    """Its id, by which it is locked and its energy is read; empty for a processor."""
    return card_id(seen) if seen else ""


def _constructed(name: str, settings: Settings, device: str, seen: str) -> Engine:
    kind = device_kind(device)
    if kind == "cuda":
        # Before any CUDA library loads: the process then sees one card, the locked one, as its device 0. Numbers are
        # those of NVML, which counts in PCI order and not by speed; vLLM reads a number where there is one.
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        os.environ["CUDA_VISIBLE_DEVICES"] = seen
    return construct_engine(
        name,
        cache=settings.models,
        threads=settings.threads,
        device=kind,
        steps_ahead=settings.steps_ahead,
    )


def run_worker(
    engine: Engine,
    settings: Settings,
    *,
    device: str,
    until_idle: bool = False,
    card: str | None = None,
) -> dict[str, Any]:
    """Run until SIGTERM or SIGINT (or until nothing is ready); returns the counters of the exit line. card: id of the card
    that the engine computes on, None = that of `device`."""
    require_manifest(engine, device)
    if card is None:
        card = _card(_seen(device))
    make_runtime_folder(settings.runtime_dir)
    with (
        DeviceLock(device, engine.name, settings.runtime_dir, card) as lock,
        _opened(engine, settings, device),
        BrokerClient.of(settings, role="consumer", place=lock.place) as client,
        Waits(settings.waits_dir, f"{engine.name} on {device}", say=LOG.warning) as waits,
        WorkerAccount(settings, engine.name, device, say=LOG.warning) as account,
        _card_joules(card) as joules,
    ):
        stop = threading.Event()
        heartbeat_s = min(5.0, settings.lease_ms / 3000)

        def tell(reason: str) -> None:
            waits.tell(reason)
            account.keep(loop.report)

        loop = WorkerLoop(
            engine,
            client,
            device=device,
            wait=partial(_wait, stop),
            tell=tell,
            pace=Pace(
                heartbeat_s=heartbeat_s,
                until_idle=until_idle,
                start_full_s=settings.start_full_ms / 1000,
                stall_s=float(settings.stall_s),
            ),
            meter=RunMeter(joules, calls.read),
        )
        pulse = Pulse(
            lambda: BrokerClient.of(settings, role="consumer", session=client.session),
            last_turn_s=lambda: loop.last_step_s,
            now_s=SYSTEM_CLOCK.monotonic_s,
            heartbeat_s=heartbeat_s,
        )
        with _signals(loop.request_stop, stop), pulse:
            LOG.info("engine %s (%s) runs on %s", engine.name, engine.fingerprint[:12], device)
            loop.run()
        return loop.report()


@contextmanager
def _card_joules(which: str) -> Iterator[Callable[[], float | None]]:
    """What the card has used so far; of a processor, or without NVML, nothing is known."""
    if not which:
        yield lambda: None
        return
    try:
        card = CardMeter(which)
    except DeviceRefused as fault:
        LOG.warning("%s", fault)
        yield lambda: None
        return
    with card:
        yield card.joules


def _wait(wake: threading.Event, seconds: float) -> None:
    """A signal wakes the loop once; left set, it would make a drain spin."""
    if wake.wait(seconds):
        wake.clear()


@contextmanager
def _opened(engine: Engine, settings: Settings, device: str) -> Iterator[None]:
    before = engine.fingerprint
    engine.open()
    try:
        if engine.fingerprint != before:
            raise ManifestRefused(
                f"engine {engine.name} changed its fingerprint when it was opened: "
                "the weights on disk are not those of the manifest",
                ("fingerprint",),
            )
        measured = kept_profile(engine, settings.models, device)
        if measured is not None:
            where = place_of(settings.models, engine.name, device)
            engine.profile = held(measured, engine, where)
            require_manifest(engine, device)
            LOG.info("profile as measured on this hardware: %s", engine.profile.as_json())
        yield
    finally:
        _close(engine)


def _close(engine: Engine) -> None:
    """An engine that still holds tasks may hang in them: it then gets a time to end, and no more."""
    try:
        holds = bool(engine.unfinished())
    except Exception as fault:  # noqa: BLE001 - whatever it says, it must not keep the process
        LOG.warning("%s does not say what it holds: %s", engine.name, fault)
        holds = True
    if not holds:
        engine.close()
        return
    ending = threading.Thread(target=engine.close, name="close", daemon=True)
    ending.start()
    ending.join(CLOSE_S)
    if ending.is_alive():
        LOG.error("%s does not end: the process leaves it behind", engine.name)


@contextmanager
def _signals(request_stop: Callable[[], None], wake: threading.Event) -> Iterator[None]:
    """SIGTERM and SIGINT drain; a second one ends the process as usual (leases then run out)."""
    previous: dict[int, Any] = {}

    def drain(number: int, frame: FrameType | None) -> None:
        request_stop()
        wake.set()
        signal.signal(number, previous[number] or signal.SIG_DFL)

    for name in (signal.SIGTERM, signal.SIGINT):
        previous[name] = signal.signal(name, drain)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler or signal.SIG_DFL)


def log_to_stderr() -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
    )


def print_report(report: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(report, sort_keys=True) + "\n")
    sys.stdout.flush()
