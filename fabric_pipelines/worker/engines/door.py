"""The door: all that the worker loop knows of an engine.

An engine takes leased tasks, runs them on its own terms and hands back completion batches in whatever order
they finish. It reports refusals and failures per task; it raises EngineFailed only when it can go on no longer.
What it hands back is compared with what it was given before it counts (worker.results).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from fabric_pipelines.records.lease import Lease
from fabric_pipelines.records.manifest import EngineManifest
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.worker.engines.agreement import Told
from fabric_pipelines.worker.gaps import Gaps


@dataclass(frozen=True, slots=True)
class Capabilities:
    """kinds: sampling kinds it serves; continuous: refills per finished task (in-flight batching) instead of
    per batch; packed: sequences lie end to end, so nothing is padded; device: "cpu" or "cuda"; vocab_size: token ids are
    below it; dim: numbers of one layer's vector. The last two are what results are compared with, 0 where not known."""

    kinds: frozenset[str]
    continuous: bool
    packed: bool
    device: str
    vocab_size: int = 0
    dim: int = 0


@dataclass(slots=True)
class EngineStats:
    """Token counters since open, apart from each other (offered = reused + computed prefill). steps, fill: of an engine
    that cuts its own, and the sum of the shares of the profile that they took. device_s: of steps, by the card's own clock
    (events before and behind each), 0 where the engine has none; device_gaps: between them."""

    tasks: int = 0
    offered_tokens: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    padded_tokens: int = 0
    steps: int = 0
    fill: float = 0.0
    busy_s: float = 0.0
    device_s: float = 0.0
    device_gaps: Gaps = field(default_factory=Gaps)
    extra: dict[str, float] = field(default_factory=dict)

    def add_step(self, tasks: int, tokens: int, profile: Profile) -> None:
        self.steps += 1
        share = max(tasks / profile.max_batch_size, tokens / profile.max_num_tokens)
        self.fill += min(share, 1.0)


class Engine(Protocol):
    """Life: constructed from files (no device touched) -> open -> submit/poll ... -> close."""

    name: str
    manifest: EngineManifest
    fingerprint: str
    capabilities: Capabilities
    profile: Profile
    stats: EngineStats

    def open(self) -> None:
        """Load weights, touch the device. Raises ManifestRefused on a contradiction with what it finds."""

    def introspect(self) -> Mapping[str, Told]:
        """What the opened engine says of the nine manifest fields; `open` has compared them."""

    def submit(self, lease: Lease) -> None:
        """Take every task of the lease. Never blocks on compute."""

    def poll(self, timeout_s: float) -> list[pa.RecordBatch]:
        """Finished tasks as completion batches (records.completion); waits at most `timeout_s` for the
        first. An engine that computes in the calling thread runs one step here."""

    def unfinished(self) -> list[int]:
        """Task ids submitted and not yet returned by poll."""

    def withdraw_unstarted(self) -> list[int]:
        """Take back tasks that did not start; the loop nacks them."""

    def close(self) -> None:
        """Release everything. Idempotent."""
