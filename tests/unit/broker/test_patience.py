"""Patience: whom a producer waits for, how long, and what it says; keepers by a real lock."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from fabric_pipelines.broker.keeper import SUPERVISED, keeper_of
from fabric_pipelines.broker.patience import Patience
from fabric_pipelines.errors import Backpressure, BrokerUnavailable, NotTrusted
from fabric_pipelines.settings import Settings
from fabric_pipelines.supervise.place import Place

AWAY = BrokerUnavailable("no broker answers at x: start one with `fabric up`")


@dataclass
class Hours:
    """A clock that sleeping moves."""

    now_s: float = 100.0
    said: list[str] = field(default_factory=list)
    slept: list[float] = field(default_factory=list)

    def monotonic_s(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds

    def patience(self, limit_s: float = 600, **more: Any) -> Patience:
        clock: Any = self
        return Patience(
            limit_s, self.said.append, clock=clock, sleep=self.sleep, draw=lambda: 0.0, **more
        )


def test_a_broker_that_was_never_there_and_has_no_keeper_is_not_waited_for() -> None:
    hours = Hours()
    with pytest.raises(BrokerUnavailable) as refused:
        hours.patience().wait(AWAY, answered=False)
    assert refused.value is AWAY
    assert (hours.slept, hours.said) == ([], [])


def test_a_broker_with_a_keeper_is_waited_for_until_the_limit_and_each_wait_is_said() -> None:
    hours = Hours()
    patience = hours.patience(keeper=lambda: SUPERVISED)

    def to_the_end() -> None:
        for _ in range(10_000):
            patience.wait(AWAY, answered=False)

    with pytest.raises(BrokerUnavailable) as given_up:
        to_the_end()
    assert 590 < sum(hours.slept) <= 600
    assert len(hours.said) == len(hours.slept) == patience.waits
    assert all(SUPERVISED in line for line in hours.said)
    assert not any("start one" in line for line in hours.said)
    assert f"for 600 s, although {SUPERVISED}: `fabric status`" in str(given_up.value)


def test_a_keeper_that_goes_away_ends_the_waiting() -> None:
    hours, words = Hours(), [SUPERVISED, SUPERVISED, ""]
    patience = hours.patience(keeper=lambda: words.pop(0))
    patience.wait(AWAY, answered=False)
    patience.wait(AWAY, answered=False)
    with pytest.raises(BrokerUnavailable):
        patience.wait(AWAY, answered=False)
    assert len(hours.slept) == 2


def test_a_full_broker_is_waited_for_as_long_as_it_says_whether_it_has_a_keeper_or_not() -> None:
    hours = Hours()
    patience = hours.patience(limit_s=10)
    patience.wait(Backpressure("full", 4.0), answered=False)
    patience.wait(Backpressure("full", 4.0), answered=False)
    with pytest.raises(Backpressure, match="full"):
        patience.wait(Backpressure("full", 4.0), answered=False)
    patience.progressed()
    patience.wait(Backpressure("full", 4.0), answered=False)
    assert hours.slept == [4.0, 4.0, 4.0]


def test_no_wait_goes_past_the_time_that_a_caller_has_left() -> None:
    hours = Hours()
    patience = hours.patience()
    for _ in range(8):
        patience.wait(AWAY, most_s=0.5)
    assert max(hours.slept) == 0.5


def test_an_error_that_says_more_than_away_goes_to_the_caller_as_it_is() -> None:
    untrusted = NotTrusted("renew it")
    with pytest.raises(NotTrusted) as given_up:
        Hours().patience(limit_s=0, keeper=lambda: SUPERVISED).wait(untrusted)
    assert given_up.value is untrusted


def test_a_supervisor_keeps_the_broker_of_its_home_as_long_as_it_holds_its_lock(
    home_settings: Settings,
) -> None:
    place = Place.of(home_settings)
    assert keeper_of(home_settings) == ""
    place.make()
    lock = place.take_lock()
    assert lock is not None
    try:
        assert keeper_of(home_settings) == SUPERVISED
        elsewhere = replace(home_settings, broker_url="grpc+tls://broker.lan:8471")
        assert keeper_of(elsewhere) == ""
    finally:
        os.close(lock)
    assert place.lock_path.exists()
    assert keeper_of(home_settings) == ""
    assert place.locked() is False
