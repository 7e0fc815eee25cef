"""Which opening of a journal something was acknowledged in: an LSN alone is taken again by whoever comes next."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Life:
    """One opening. opens: its number, from 1; opened_us: when, microseconds since 1970, which tells it from one of
    the same number after an older copy was put back; after: last LSN that was kept of the lives before it."""

    opens: int
    opened_us: int
    after: int

    @property
    def name(self) -> str:
        return f"{self.opens}-{self.opened_us}"
