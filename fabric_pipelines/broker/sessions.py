"""Sessions: a consumer that is attached now, and the limits that all of them live under. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

from fabric_pipelines.broker.classes import class_of
from fabric_pipelines.broker.lanes import Lane
from fabric_pipelines.errors import SettingsError
from fabric_pipelines.records.profile import Profile


@dataclass(frozen=True, slots=True)
class Limits:
    lease_s: float = 30.0
    attempts_max: int = 3
    computed_high_water: int = 100_000
    merge_waste: float = 0.06  # padding that a batch of several draining lanes may have, as a share

    def __post_init__(self) -> None:
        if not 1 <= self.attempts_max <= 255:
            raise SettingsError(f"attempts_max is {self.attempts_max}; it must be in 1..255")
        if self.lease_s <= 0:
            raise SettingsError(f"lease_ms is {self.lease_s * 1000:g}; it must be positive")
        if not 0 <= self.merge_waste < 1:
            raise SettingsError(f"merge_waste is {self.merge_waste}; it must be in [0, 1)")


@dataclass(slots=True)
class Session:
    """A consumer that is attached now; with `tenant` it gets that one's tasks only. place: what its process holds alone
    (a device), "" for nothing. `call` numbers its attaches and leases: one that comes again gets the
    same lease again instead of a second one that nobody hears of, one that comes late changes nothing."""

    name: str
    engine: str
    engine_fingerprint: str
    device: str
    profile: Profile
    deadline_s: float
    lane: Lane | None = None
    call: int = -1
    last_lease: int = 0
    tenant: str | None = None
    kind: str = ""  # its class of consumers
    held_back: str = ""
    place: str = ""
    lanes: dict[str, Lane] = field(default_factory=dict)  # where it is with each tenant

    def __post_init__(self) -> None:
        self.kind = class_of(self.engine, self.engine_fingerprint, self.profile)
