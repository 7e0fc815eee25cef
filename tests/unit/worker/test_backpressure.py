"""The ladder: which rung each signal asks for, how it is counted, how it comes down."""

from __future__ import annotations

import pytest

from fabric_pipelines.worker.backpressure import Ladder, Rung, Signals


@pytest.mark.parametrize(
    ("signals", "rung"),
    [
        (Signals(), Rung.OPEN),
        (Signals(outbox_share=0.24), Rung.OPEN),
        (Signals(outbox_share=0.25), Rung.PREFETCH_OFF),
        (Signals(outbox_share=0.5), Rung.NO_NEW_LANE),
        (Signals(outbox_share=0.75), Rung.HOLD),
        (Signals(outbox_share=1.0), Rung.NACK_UNSTARTED),
        (Signals(engine_busy_s=0.5), Rung.PREFETCH_OFF),
        (Signals(engine_busy_s=3.0), Rung.NO_NEW_LANE),
        (Signals(engine_busy_s=11.0), Rung.HOLD),
        (Signals(engine_busy_s=31.0), Rung.NACK_UNSTARTED),
        (Signals(broker_hold=True), Rung.HOLD),
        (Signals(broker_away=True), Rung.HOLD),
        (Signals(broker_hold=True, outbox_share=1.0), Rung.NACK_UNSTARTED),
        (Signals(stopping=True), Rung.STOP),
    ],
)
def test_each_signal_asks_for_its_rung(signals: Signals, rung: Rung) -> None:
    assert Ladder().observe(signals, 0.0) is rung


def test_the_ladder_climbs_at_once_and_counts_every_rung_it_passes() -> None:
    ladder = Ladder()
    assert ladder.observe(Signals(outbox_share=0.8), 0.0) is Rung.HOLD
    assert ladder.climbed == {
        "prefetch_off": 1,
        "no_new_lane": 1,
        "hold": 1,
        "nack_unstarted": 0,
        "stop": 0,
    }


def test_a_gauge_comes_down_one_rung_per_calm_second() -> None:
    ladder = Ladder(calm_s=1.0)
    ladder.observe(Signals(outbox_share=0.75), 0.0)
    seen = [ladder.observe(Signals(), now) for now in (0.1, 1.2, 2.3, 3.4)]
    assert seen == [Rung.HOLD, Rung.NO_NEW_LANE, Rung.PREFETCH_OFF, Rung.OPEN]


def test_a_signal_at_its_edge_does_not_make_the_ladder_flutter() -> None:
    ladder = Ladder(calm_s=1.0)
    ladder.observe(Signals(outbox_share=0.75), 0.0)
    for tenth in range(1, 50):
        share = 0.75 if tenth % 2 else 0.74
        assert ladder.observe(Signals(outbox_share=share), tenth / 10) is Rung.HOLD
    assert ladder.climbed["hold"] == 1


def test_a_word_counts_only_while_it_is_said() -> None:
    ladder = Ladder(calm_s=1.0)
    assert ladder.observe(Signals(broker_away=True), 0.0) is Rung.HOLD
    assert ladder.observe(Signals(), 0.01) is Rung.OPEN
    ladder.observe(Signals(broker_hold=True, outbox_share=0.3), 0.02)
    assert ladder.observe(Signals(outbox_share=0.3), 0.03) is Rung.PREFETCH_OFF
    assert ladder.climbed["hold"] == 2
