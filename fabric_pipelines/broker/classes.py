"""Classes: what kinds of consumers there are, and which of them are open to a task that others found too large.

A class is what decides whether an engine can take a task at all: engine, fingerprint and the profile's three
resources. The broker filters nothing by length; a runtime that cannot take a task says so, the task moves to a
lane that this class is not served from, and it is dead only when no class is left. A class counts while one of
its sessions is attached and for a while after the last one was lost; one that said goodbye does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fabric_pipelines.records.profile import Profile

PATIENCE_LEASES = 4  # lease times that a class which was lost is waited for

Served = tuple[str, str, str | None]  # class, engine, tenant


def class_of(engine: str, fingerprint: str, profile: Profile) -> str:
    """`window_tokens` is left out: it says how much is fetched ahead, not what fits."""
    limits = f"{profile.max_batch_size}x{profile.max_num_tokens}x{profile.kv_cache_tokens}"
    return f"{engine}#{fingerprint[:12]}/{limits}"


@dataclass(slots=True)
class Roster:
    """Which classes may still take work, and whose (a tenant's, None: everybody's). `patience_s`: how long a lost
    one is waited for."""

    patience_s: float
    _here: dict[str, Served] = field(default_factory=dict)  # by session
    _lost: dict[Served, float] = field(default_factory=dict)  # until when

    def came(self, session: str, kind: str, engine: str, tenant: str | None = None) -> None:
        self._here[session] = (kind, engine, tenant)
        self._lost.pop((kind, engine, tenant), None)

    def left(self, session: str) -> None:
        """It said so: nobody waits for its return."""
        self._here.pop(session, None)

    def lost(self, session: str, now_s: float) -> None:
        """It did not renew: it may be restarting."""
        found = self._here.pop(session, None)
        if found is not None:
            self._lost[found] = now_s + self.patience_s

    def forget(self, now_s: float) -> None:
        """Time passed."""
        if self._lost:
            self._lost = {found: until for found, until in self._lost.items() if until > now_s}

    def known(self, engine: str, tenant: str, *, here_only: bool = False) -> set[str]:
        """Classes of this engine that are here or waited for, and serve that tenant."""
        lost = () if here_only else self._lost
        return {
            kind
            for kind, mine, whose in (*self._here.values(), *lost)
            if mine == engine and whose in (None, tenant)
        }


def is_open(refused_by: int, known: Iterable[str], numbers: Mapping[str, int]) -> bool:
    """Whether one of the `known` classes is not in the set `refused_by` (bits by class number)."""
    return any(kind not in numbers or not refused_by >> numbers[kind] & 1 for kind in known)


def bit_of(kind: str, numbers: Mapping[str, int]) -> int:
    """The class as a set of one; 0 for one that has refused nothing yet."""
    number = numbers.get(kind)
    return 0 if number is None else 1 << number


def members(refused_by: int) -> list[int]:
    """The class numbers in a set."""
    return [number for number in range(refused_by.bit_length()) if refused_by >> number & 1]
