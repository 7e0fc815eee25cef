"""The governor against scripted signals: which lever moves when, who waits, and what it does when it is blind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric_pipelines.dataplane.governor import (
    MOVES,
    SILENCE_S,
    TICK_S,
    Governor,
    Limits,
    limits_of,
)
from fabric_pipelines.dataplane.pressure import KINDS, Bounds, Latencies, Signals, judge, p90
from fabric_pipelines.dataplane.prices import SURCHARGES, cost_bytes, multiple, prior

CALM = Signals(0.1, 5, 100, 0, 0)
FULL = replace(CALM, wal_since_redo=1.2)
PLANNED = replace(CALM, wal_since_redo=0.99)
BLOCKED = replace(CALM, lock_waiters=3)
SINK, ROW_BYTES = "fabric.embed", 1_000


class Machine:
    """A governor with a clock of its own, and bulk that always has more to write."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.now_s = 0.0
        self.governor = Governor(limits or Limits(rate_start=16e6), 0.0)

    def bulk(self, rows: int | None = None) -> float:
        """Land one bulk transaction as soon as it may run; returns how long it waited."""
        waited = 0.0
        while wait_s := self.governor.wait_s(self.now_s):
            self.now_s += wait_s
            waited += wait_s
        rows = rows or self.governor.rows
        leave = self.governor.admit(SINK, rows, rows * ROW_BYTES, self.now_s, bulk=True)
        self.governor.settle(
            leave,
            rows=rows,
            size=rows * ROW_BYTES,
            wal_bytes=round(rows * ROW_BYTES * 1.1),
            commit_ms=5.0,
        )
        return waited

    def tick(self, signals: Signals | None, *, working: bool = True) -> None:
        """Half a second, in which bulk takes all that it is given."""
        end_s = self.now_s + TICK_S
        while working and (wait_s := self.governor.wait_s(self.now_s)) + self.now_s < end_s:
            if wait_s:
                self.now_s += wait_s
            else:
                self.bulk()
        self.now_s = max(self.now_s, end_s)
        for _ in range(20 if working else 0):
            self.governor.probed(5.0, loaded=True)
        self.governor.observe(signals, self.now_s)


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = Machine()
    yield made
    assert made.governor.in_flight == 0


def test_bulk_gets_exactly_the_rate_however_it_is_cut(machine: Machine) -> None:
    machine.governor.observe(CALM, 0.0)
    spent = machine.governor.classes["bulk"]
    machine.bulk(5_000)
    machine.now_s += machine.governor.wait_s(machine.now_s)
    began_s, before = machine.now_s, spent.cost_bytes
    for rows in (500, 5_000, 1_200, 50, 3_000, 777):
        machine.bulk(rows)
        machine.governor._heard_s = machine.now_s  # signals keep coming
    machine.now_s += machine.governor.wait_s(machine.now_s)
    rate = (spent.cost_bytes - before) / (machine.now_s - began_s)
    assert rate == pytest.approx(machine.governor.rate, rel=0.05)


def test_the_first_lever_is_the_transactions_size_the_second_the_writers_the_third_the_rate(
    machine: Machine,
) -> None:
    governor = machine.governor
    governor.rows, governor.writers, rate = 5_000, 2, governor.rate
    seen = []
    for _ in range(6):
        machine.tick(BLOCKED, working=False)
        seen.append((governor.rows, governor.writers, round(governor.rate / rate, 2)))
    assert seen == [
        (2_500, 2, 1.0),
        (1_250, 2, 1.0),
        (1_000, 2, 1.0),
        (1_000, 1, 1.0),
        (1_000, 1, 0.8),
        (1_000, 1, 0.64),
    ]


@pytest.mark.parametrize(
    "signals",
    [
        FULL,
        replace(CALM, replication_lag_bytes=100 << 20),
        replace(CALM, checkpoints_requested=6),
    ],
)
def test_too_many_bytes_lower_the_rate_at_once(machine: Machine, signals: Signals) -> None:
    machine.tick(CALM, working=False)
    rows, rate = machine.governor.rows, machine.governor.rate
    machine.tick(signals, working=False)
    assert (machine.governor.rows, machine.governor.rate) == (rows, pytest.approx(rate * 0.8))


def test_the_rate_doubles_until_the_first_pressure_and_then_grows_by_steps(
    machine: Machine,
) -> None:
    governor, limits = machine.governor, machine.governor.limits
    machine.tick(CALM)
    assert governor.rate == limits.rate_start * 2
    machine.tick(FULL, working=False)
    pressed = governor.rate
    assert pressed == pytest.approx(limits.rate_start * 2 * 0.8)
    machine.tick(CALM)
    assert governor.rate == pytest.approx(pressed + limits.step)


@pytest.mark.parametrize(("written", "cut_from"), [(60e6, 60e6), (10e6, 50e6), (0, 100e6)])
def test_a_rate_that_nobody_reached_is_cut_from_what_was_written_but_at_most_in_half(
    machine: Machine, written: float, cut_from: float
) -> None:
    """Cut from the nominal rate, bulk below it would not notice, and each calm tick would take a part of the cut back."""
    governor = machine.governor
    machine.tick(CALM, working=False)
    governor.rate = 100e6
    machine.tick(CALM, working=False)
    leave = governor.admit(SINK, 0, 0, machine.now_s, bulk=True)
    governor.settle(leave, rows=0, size=0, wal_bytes=round(written * TICK_S), commit_ms=None)
    machine.tick(FULL, working=False)
    assert governor.rate == pytest.approx(cut_from * governor.limits.backoff)


def test_the_rate_doubles_only_once_enough_was_heard_beside_it(machine: Machine) -> None:
    governor, rates = machine.governor, []
    for _ in range(6):
        machine.bulk()
        governor.latencies.loaded.extend([5.0] * 10)
        governor.throttled = True
        machine.tick(CALM, working=False)
        rates.append(governor.rate / governor.limits.rate_start)
    assert rates == [1, 2, 2, 4, 4, 8]


def test_a_rate_that_nobody_uses_does_not_grow(machine: Machine) -> None:
    for _ in range(10):
        machine.tick(CALM, working=False)
    assert machine.governor.rate == machine.governor.limits.rate_start


def test_transactions_grow_again_after_a_calm_while_and_then_a_second_writer_comes(
    machine: Machine,
) -> None:
    governor = machine.governor
    for _ in range(4 * governor.limits.calm_ticks):
        machine.tick(CALM, working=False)
    assert (governor.rows, governor.writers) == (1_000, 1), "nothing ran that could have pressed"
    for _ in range(4 * governor.limits.calm_ticks):
        machine.bulk()
        governor.throttled = False
        machine.tick(CALM, working=False)
    assert (governor.rows, governor.writers) == (5_000, 2)
    assert [governor.moves[name] for name in ("larger", "more_writers")] == [3, 1]


def test_what_was_measured_before_a_move_presses_no_second_time(machine: Machine) -> None:
    latencies, machine.governor.rows = machine.governor.latencies, 2_000
    latencies.idle.extend([5.0] * 20)
    latencies.loaded.extend([50.0] * 20)
    for _ in range(5):
        machine.tick(CALM, working=False)
    assert machine.governor.moves["smaller"] == 1
    assert machine.governor.moves["slower"] == 0


def test_while_the_watcher_listens_no_bulk_begins(machine: Machine) -> None:
    governor = machine.governor
    governor.hush(machine.now_s + 0.3)
    assert 0 < governor.wait_s(machine.now_s) <= 0.01
    governor.hush(machine.now_s)
    assert governor.wait_s(machine.now_s) == 0
    machine.tick(CALM, working=False)
    assert governor.moves["faster"] == 0, "a gate that was closed on purpose is no want of rate"


def test_without_signals_for_five_seconds_bulk_falls_to_the_floor_and_starts_again_from_below(
    machine: Machine,
) -> None:
    governor, limits = machine.governor, machine.governor.limits
    machine.tick(CALM)
    machine.now_s += SILENCE_S - TICK_S
    assert governor.effective_rate(machine.now_s) > limits.rate_floor
    machine.tick(None)
    machine.tick(None)
    assert governor.blind(machine.now_s)
    assert governor.effective_rate(machine.now_s) == limits.rate_floor
    governor.observe(Signals(), machine.now_s)
    assert governor.blind(machine.now_s), "an answer without a single signal is none"
    governor.observe(CALM, machine.now_s)
    assert governor.effective_rate(machine.now_s) == limits.rate_start / 2
    assert governor.moves["restarts"] == 1


def test_at_the_floor_rate_a_landing_waits_for_what_the_last_one_cost(machine: Machine) -> None:
    machine.now_s = SILENCE_S + 1
    machine.bulk(1_000)
    cost = machine.governor.classes["bulk"].cost_bytes
    room = machine.governor.limits.rate_floor * TICK_S
    expected_s = (cost - room) / machine.governor.limits.rate_floor
    assert machine.bulk(1_000) == pytest.approx(expected_s, rel=0.01)


def test_the_regular_class_never_waits_and_bulk_makes_room_for_it(machine: Machine) -> None:
    governor = machine.governor
    while not governor.wait_s(machine.now_s):
        machine.bulk(5_000)
    before_s = governor.wait_s(machine.now_s)
    leave = governor.admit("fabric.dead_letters", 100, 50_000, machine.now_s, bulk=False)
    governor.settle(leave, rows=100, size=50_000, wal_bytes=60_000, commit_ms=3.0)
    assert governor.wait_s(machine.now_s) > before_s
    assert (governor.classes["regular"].transactions, governor.classes["regular"].rows) == (1, 100)
    assert 3.0 not in governor.latencies.own


def test_what_the_server_says_replaces_the_prior(machine: Machine) -> None:
    governor = machine.governor
    governor.built_of(SINK, ("hnsw",))
    dear = governor.price(SINK).row_cost(ROW_BYTES)
    machine.bulk(1_000)
    price = governor.price(SINK)
    assert price.wal_per_byte == pytest.approx(1.1)
    assert price.row_cost(ROW_BYTES) < dear
    governor.built_of(SINK, ("hnsw",))
    assert governor.price(SINK).measured == 1, "the same parts keep what was learnt"
    governor.built_of(SINK, ())
    assert governor.price(SINK).measured == 0


def test_a_replay_is_refunded_and_teaches_nothing(machine: Machine) -> None:
    governor = machine.governor
    leave = governor.admit(SINK, 5_000, 5_000_000, 0.0, bulk=True)
    in_debt = governor.wait_s(0.0)
    governor.settle(leave, rows=0, size=5_000_000, wal_bytes=300, commit_ms=1.0)
    assert in_debt > 0
    assert governor.wait_s(0.0) == 0
    assert governor.price(SINK).wal_per_byte is None


def test_a_transaction_that_came_to_nothing_stays_charged(machine: Machine) -> None:
    governor = machine.governor
    governor.withdraw(governor.admit(SINK, 5_000, 5_000_000, 0.0, bulk=True))
    assert governor.wait_s(0.0) > 0


def test_the_operators_numbers_bound_the_rate() -> None:
    limits = limits_of(floor=2_000_000, most=8_000_000, lag_bytes=1)
    machine = Machine(limits)
    for _ in range(10):
        machine.tick(CALM)
    assert machine.governor.rate == 8e6
    for _ in range(30):
        machine.tick(FULL, working=False)
    assert machine.governor.rate == 2e6
    assert limits.bounds.replication_lag_bytes == 1


def test_its_account_has_every_name_from_the_start() -> None:
    account = Machine().governor.as_json(0.0)
    assert set(account["pressures"]) == set(KINDS)
    assert set(account["moves"]) == set(MOVES)
    assert set(account["classes"]) == {"bulk", "regular"}
    assert account["signals"]["wal_since_redo"] is None


@given(
    st.lists(
        st.tuples(st.sampled_from([CALM, FULL, BLOCKED, None]), st.booleans(), st.floats(0.5, 9.0)),
        max_size=60,
    )
)
def test_whatever_it_hears_its_levers_stay_within_their_limits(script: list[tuple]) -> None:  # type: ignore[type-arg]
    machine = Machine()
    governor, limits = machine.governor, machine.governor.limits
    for signals, working, gap_s in script:
        machine.now_s += gap_s - 0.5
        machine.tick(signals, working=working)
        assert limits.rate_floor <= governor.effective_rate(machine.now_s) <= limits.rate_most
        assert limits.rows_least <= governor.rows <= limits.rows_most
        assert 1 <= governor.writers <= limits.writers_most
        assert governor.in_flight == 0


# ---- pressure


def _latencies(idle: float, loaded: float = 0.0, own: float = 0.0) -> Latencies:
    made = Latencies()
    made.idle.extend([idle] * 20)
    made.loaded.extend([loaded] * 20)
    made.own.extend([own] * 20)
    return made


@pytest.mark.parametrize(
    ("now", "latencies", "expected"),
    [
        (CALM, _latencies(5.0, 6.0, 10.0), ()),
        (FULL, _latencies(5.0), ("wal_since_redo",)),
        (replace(CALM, wal_buffers_full=100 + 257), Latencies(), ("wal_buffers_full",)),
        (replace(CALM, wal_buffers_full=0), Latencies(), ()),  # statistics were reset
        (CALM, _latencies(5.0, 8.0), ("foreground",)),
        (CALM, _latencies(5.0, 5.0, 25.0), ("commit",)),
        (PLANNED, _latencies(5.0), ()),  # the server spreads a checkpoint until then
        (CALM, _latencies(0.1, 0.5), ()),  # half a millisecond is nobody's trouble
        (Signals(), _latencies(5.0, 50.0), ("foreground",)),
    ],
)
def test_each_pressure_is_told_by_its_name(
    now: Signals, latencies: Latencies, expected: tuple[str, ...]
) -> None:
    assert judge(CALM, now, latencies, Bounds()) == expected


def test_without_idle_probes_no_latency_is_called_high() -> None:
    latencies = Latencies()
    latencies.loaded.extend([500.0] * 20)
    assert judge(None, CALM, latencies, Bounds()) == ()


def test_p90_is_a_value_that_was_seen() -> None:
    assert p90([]) is None
    assert p90([3.0]) == 3.0
    assert p90([float(number) for number in range(1, 11)]) == 9.0


# ---- prices


def test_an_index_that_burns_cpu_is_dear_though_it_logs_little() -> None:
    assert multiple(("hnsw",), 1_000) > 20
    assert 1 < multiple(("btree",), 1_000) < multiple(("gin",), 1_000) < 3
    assert multiple(("btree", "gin"), 1_000) > multiple(("btree",), 1_000)


def test_an_access_method_that_nobody_measured_is_taken_for_a_dear_one() -> None:
    assert multiple(("bloom",), 1_000) > multiple(("btree",), 1_000)


def test_a_price_follows_the_server_and_forgets_the_prior() -> None:
    price = prior(("btree",))
    for _ in range(20):
        price.learn(1_000, 1_000_000, 3_000_000)
    assert price.wal_per_byte == pytest.approx(3.0)
    assert price.row_cost(1_000) == pytest.approx(cost_bytes(3_000, price.cpu_us))
    price.learn(3, 3_000, 90_000)
    assert price.wal_per_byte == pytest.approx(3.0), "three rows say nothing about a row"


def test_every_surcharge_costs_something() -> None:
    assert all(item.cpu_us > 0 and item.wal_bytes > 0 for item in SURCHARGES.values())
