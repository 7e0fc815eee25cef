"""Verdicts: the first rule that is not false decides, what is undefined says UNKNOWN, and nothing flaps."""

import json
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric_pipelines.analytics.csr import group
from fabric_pipelines.analytics.decisions import Decision, Outcome, counts, decide, judge, settle
from fabric_pipelines.analytics.health import measure
from fabric_pipelines.analytics.readings import Reading, Status
from fabric_pipelines.analytics.rules import Verdict, parse, shipped
from fabric_pipelines.analytics.signals import Signals, signals
from fabric_pipelines.errors import SchemaError

TABLE = parse(
    """
keep_consecutive = 2
[[rule]]
name = "bad"
verdict = "QUARANTINE"
when = [{ signal = "contradicted", above = 0 }]
[[rule]]
name = "humps"
verdict = "SPLIT"
consecutive = 3
when = [{ signal = "size", above = 10 }, { signal = "dip", above = 0.1, at_once = 0.2 }]
[[rule]]
name = "copies"
verdict = "DEDUPE"
when = [{ signal = "exact_duplicate_fraction", above = 0.02 }]
""",
    "test",
)
NAN = float("nan")


def one(
    size: float = 50, dip: float = 0.0, copies: float = 0.0, status: Status = Status.OK
) -> Signals:
    """Signals of one cluster; `status` is that of dip."""
    values = {
        "contradicted": (0.0, Status.OK),
        "size": (size, Status.OK),
        "dip": (dip if status is Status.OK else NAN, status),
        "exact_duplicate_fraction": (copies, Status.OK),
    }
    readings = {
        name: Reading(np.array([value]), np.array([code], np.uint8))
        for name, (value, code) in values.items()
    }
    return Signals(1, readings, {})


def after(*measurements: Signals) -> Decision:
    before: Mapping[int, Decision] = {}
    for number, found in enumerate(measurements, 1):
        before = {0: decide(TABLE, found, before, number)[0]}
    return before[0]


def test_the_first_rule_that_fires_decides() -> None:
    (outcome,) = judge(TABLE, one(dip=0.15, copies=0.5))
    assert (outcome.rule, outcome.verdict, outcome.needed) == ("humps", Verdict.SPLIT, 3)
    assert [(e.signal, e.value, e.threshold) for e in outcome.evidence] == [
        ("size", 50.0, 10.0),
        ("dip", 0.15, 0.1),
    ]


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.OK])
def test_a_rule_without_its_number_is_unknown_and_hides_what_comes_below(status: Status) -> None:
    decision = after(one(status=status, copies=0.5))
    assert decision.verdict is Verdict.UNKNOWN
    assert decision.shown.rule == "humps"
    assert [(e.signal, e.value, e.status) for e in decision.shown.evidence][1] == (
        "dip",
        None,
        status.name,
    )


def test_a_condition_that_is_false_settles_a_rule_whatever_the_others_are() -> None:
    assert after(one(size=5, status=Status.U_SIZE)).verdict is Verdict.KEEP


def test_a_question_that_does_not_arise_is_not_an_unknown_answer() -> None:
    found = one(status=Status.U_CONTEXT)
    asked = Signals(1, found.readings, {"dip": np.array([False])})
    assert after(asked).verdict is Verdict.KEEP


def test_a_verdict_waits_for_its_rules_own_number_of_measurements() -> None:
    humps = one(dip=0.15)
    twice = after(humps, humps)
    assert twice.verdict is Verdict.KEEP
    assert twice.pending is not None
    assert (twice.pending.verdict, twice.seen, twice.needed) == (Verdict.SPLIT, 2, 3)
    assert twice.pending.since == 1
    thrice = after(humps, humps, humps)
    assert (thrice.verdict, thrice.shown.since, thrice.pending) == (Verdict.SPLIT, 3, None)


def test_beyond_the_second_threshold_one_measurement_is_enough() -> None:
    assert after(one(dip=0.25)).verdict is Verdict.SPLIT


def test_one_good_measurement_does_not_take_a_verdict_back() -> None:
    strong = one(dip=0.25)
    assert after(strong, one()).verdict is Verdict.SPLIT
    assert after(strong, one(), one()).verdict is Verdict.KEEP


def test_unknown_shows_at_once_keeps_what_stood_and_ends_the_row() -> None:
    humps, strong, unknown = one(dip=0.15), one(dip=0.25), one(status=Status.SKIPPED_BUDGET)
    assert after(strong, unknown).verdict is Verdict.UNKNOWN
    assert after(strong, unknown, humps).verdict is Verdict.SPLIT
    assert after(humps, humps, unknown, humps).verdict is Verdict.KEEP


outcomes = st.sampled_from(
    [
        Outcome("keep", Verdict.KEEP, 2),
        Outcome("humps", Verdict.SPLIT, 3),
        Outcome("humps", Verdict.SPLIT, 3, strong=True),
        Outcome("partner", Verdict.MERGE, 2),
        Outcome("labels", Verdict.REBUILD, 1),
        Outcome("humps", Verdict.UNKNOWN, 1),
    ]
)


@given(st.lists(outcomes, max_size=40))
def test_what_stands_changes_only_after_the_rules_number_in_a_row(seen: list[Outcome]) -> None:
    """Against a plain reading of the sequence: no change but at the end of a long enough row, or by a strong one; and a
    row that is long enough always changes it."""
    decision: Decision | None = None
    for at, outcome in enumerate(seen):
        stood = decision.stands.verdict if decision else Verdict.KEEP
        decision = settle(decision, outcome, 0, at)
        row = 0
        while row <= at and seen[at - row].verdict is outcome.verdict:
            row += 1
        unknown = outcome.verdict is Verdict.UNKNOWN
        due = not unknown and (outcome.strong or row >= outcome.needed)
        assert decision.stands.verdict is (outcome.verdict if due else stood)
        assert (decision.verdict is Verdict.UNKNOWN) == unknown
        assert Decision.from_json(json.loads(json.dumps(decision.to_json()))) == decision


@given(st.lists(st.booleans(), min_size=2, max_size=60))
def test_a_metric_that_swings_around_its_threshold_does_not_flap(high: list[bool]) -> None:
    """Changes are at most one for every `keep_consecutive` measurements, and none without a row of equal ones."""
    verdicts, decision = [Verdict.KEEP], None
    for at, beyond in enumerate(high):
        (outcome,) = judge(TABLE, one(dip=0.15 if beyond else 0.05))
        decision = settle(decision, outcome, 0, at)
        verdicts.append(decision.verdict)
    changes = sum(a is not b for a, b in pairwise(verdicts))
    assert changes <= len(high) // 2
    if all(a != b for a, b in pairwise(high)):
        assert changes == 0


def test_a_decision_of_another_form_is_refused() -> None:
    with pytest.raises(SchemaError, match="not a decision"):
        Decision.from_json({"cluster": 0, "measurement": 1, "stands": {"verdict": "AWAY"}})


def test_a_store_measured_without_a_past_is_judged_without_unknowns() -> None:
    """What compares with an earlier measurement does not arise; an empty cluster has no numbers at all."""
    rng = np.random.default_rng(3)
    labels = np.repeat([0, 1, 3], 40)
    rows = rng.standard_normal((4, 24))[labels] * 3 + rng.standard_normal((120, 24))
    csr, _ = group(rows.astype(np.float32), labels, np.arange(120), 4)
    rows_of = csr.rows / np.linalg.norm(csr.rows, axis=1, keepdims=True)
    table = measure(rows_of, csr.indptr, csr.ids, metric="cosine")
    decisions = decide(shipped(), signals(table), {}, 1)
    assert [each.verdict.value for each in decisions] == ["KEEP", "KEEP", "UNKNOWN", "KEEP"]
    assert decisions[2].shown.evidence[0].status == "U_SIZE"
    assert counts(decisions)["KEEP"] == 3
