"""Verdicts on clusters: what the rules say of one measurement, and what of it stands after those before it.

Two pure steps. `judge` goes down the rule table for every cluster; the first rule that is not false decides, and one
that cannot be judged for want of a number says UNKNOWN, never the verdict of a rule below it. `settle` holds on to what
stood: a verdict changes after its rule's own number of measurements in a row, or beyond the rule's second threshold.
Nothing here acts on a cluster, and nothing remembers; the caller keeps what `settle` returns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fabric_pipelines.analytics.readings import Status
from fabric_pipelines.analytics.rules import Condition, RuleTable, Verdict
from fabric_pipelines.analytics.signals import Signals
from fabric_pipelines.errors import SchemaError


@dataclass(frozen=True, slots=True)
class Evidence:
    """One condition as it was found; value is None unless status is OK."""

    signal: str
    value: float | None
    status: str
    sense: str
    threshold: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the rules say of one cluster in one measurement. strong: beyond the rule's second threshold."""

    rule: str
    verdict: Verdict
    needed: int
    strong: bool = False
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """An outcome with the measurement (a generation's number) since which it holds, and the one that `evidence` is of."""

    verdict: Verdict
    rule: str
    since: int
    measured: int
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """stands: the verdict to act on. pending: what the last `seen` measurements in a row said instead, with `needed`
    of them. unknown: the last measurement could not be judged; what stood before is kept under it, not shown."""

    cluster: int
    measurement: int
    stands: Finding
    pending: Finding | None = None
    seen: int = 0
    needed: int = 0
    unknown: Finding | None = None

    @property
    def shown(self) -> Finding:
        return self.unknown or self.stands

    @property
    def verdict(self) -> Verdict:
        return self.shown.verdict

    def __str__(self) -> str:
        """One line for a person: the verdict, its rule and what was found; what is pending after it."""
        said = f"cluster {self.cluster}: {_words(self.shown)}"
        if self.pending is None:
            return said
        return f"{said}; {self.seen} of {self.needed} towards {_words(self.pending)}"

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "cluster": self.cluster,
            "measurement": self.measurement,
            "verdict": self.verdict.value,
            "stands": _finding(self.stands),
        }
        if self.pending is not None:
            found["pending"] = _finding(self.pending)
            found["seen"], found["needed"] = self.seen, self.needed
        if self.unknown is not None:
            found["unknown"] = _finding(self.unknown)
        return found

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Decision:
        """SchemaError for what `to_json` did not write."""
        try:
            pending, unknown = found.get("pending"), found.get("unknown")
            return cls(
                int(found["cluster"]),
                int(found["measurement"]),
                _read(found["stands"]),
                _read(pending) if pending else None,
                int(found.get("seen", 0)),
                int(found.get("needed", 0)),
                _read(unknown) if unknown else None,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as fault:
            raise SchemaError(
                f"not a decision: {fault!r}; a receipt of another version? issue it again"
            ) from fault


def decide(
    table: RuleTable, found: Signals, before: Mapping[int, Decision], measurement: int
) -> list[Decision]:
    """One decision a cluster. before: the last decision on each cluster that was judged earlier, by its number."""
    outcomes = judge(table, found)
    return [
        settle(before.get(cluster), outcome, cluster, measurement)
        for cluster, outcome in enumerate(outcomes)
    ]


def counts(decisions: Sequence[Decision]) -> dict[str, int]:
    """Clusters by the verdict shown, all verdicts named."""
    seen = Counter(each.verdict for each in decisions)
    return {verdict.value: seen[verdict] for verdict in Verdict}


def judge(table: RuleTable, found: Signals) -> list[Outcome]:
    """The outcome of each cluster. A rule is false where one condition is false, whatever the others are; where none is
    false and one has no value, it cannot be judged."""
    outcomes: list[Outcome | None] = [None] * found.clusters
    open_ = np.ones(found.clusters, np.bool_)
    for rule in table.rules:
        false = np.zeros(found.clusters, np.bool_)
        undefined = np.zeros(found.clusters, np.bool_)
        strong = np.full(found.clusters, rule.may_hurry)
        for each in rule.conditions:
            reading = found.readings[each.signal]
            known = reading.status == Status.OK
            false |= known & ~_beyond(reading.value, each.sense, each.threshold)
            false |= ~found.applies.get(each.signal, known | ~known)
            undefined |= ~known
            if each.at_once is not None:
                strong &= known & _beyond(reading.value, each.sense, each.at_once)
        for cluster in np.flatnonzero(open_ & ~false).tolist():
            evidence = tuple(_evidence(found, each, cluster) for each in rule.conditions)
            outcomes[cluster] = (
                Outcome(rule.name, Verdict.UNKNOWN, 1, False, evidence)
                if undefined[cluster]
                else Outcome(
                    rule.name, rule.verdict, rule.consecutive, bool(strong[cluster]), evidence
                )
            )
        open_ &= false
    well = Outcome(table.keep.name, Verdict.KEEP, table.keep.consecutive)
    return [well if each is None else each for each in outcomes]


def settle(before: Decision | None, outcome: Outcome, cluster: int, measurement: int) -> Decision:
    """What stands once `outcome` is known. A cluster that was never judged stands at KEEP: no verdict, no act. UNKNOWN
    is shown at once and ends a row, since what was not measured is not one of "consecutive measurements"; the verdict
    from before it comes back with the next number."""
    now = Finding(outcome.verdict, outcome.rule, measurement, measurement, outcome.evidence)
    if before is None:
        stands = Finding(Verdict.KEEP, "keep", measurement, measurement)
        before = Decision(cluster, measurement, stands)
    if outcome.verdict is Verdict.UNKNOWN:
        first = before.unknown.since if before.unknown else measurement
        return Decision(cluster, measurement, before.stands, unknown=replace(now, since=first))
    if outcome.verdict is before.stands.verdict:
        return Decision(cluster, measurement, replace(now, since=before.stands.since))
    pending, seen = before.pending, 1
    if pending is not None and pending.verdict is outcome.verdict:
        now, seen = replace(now, since=pending.since), before.seen + 1
    if outcome.strong or seen >= outcome.needed:
        return Decision(cluster, measurement, replace(now, since=measurement))
    return Decision(cluster, measurement, before.stands, now, seen, outcome.needed)


def _beyond(value: Any, sense: str, threshold: float) -> Any:
    return value > threshold if sense == "above" else value < threshold


def _evidence(found: Signals, each: Condition, cluster: int) -> Evidence:
    reading = found.readings[each.signal]
    status = Status(int(reading.status[cluster]))
    value = float(reading.value[cluster]) if status is Status.OK else None
    return Evidence(each.signal, value, status.name, each.sense, each.threshold)


def _words(found: Finding) -> str:
    if not found.evidence:
        return found.verdict.value
    said = ", ".join(
        f"{each.signal} {each.status if each.value is None else f'{each.value:.4g}'} "
        f"({each.sense} {each.threshold:g})"
        for each in found.evidence
    )
    return f"{found.verdict.value} by {found.rule} since {found.since}: {said}"


def _finding(found: Finding) -> dict[str, Any]:
    return {
        "verdict": found.verdict.value,
        "rule": found.rule,
        "since": found.since,
        "measured": found.measured,
        "evidence": [
            {
                "signal": each.signal,
                "value": each.value,
                "status": each.status,
                "sense": each.sense,
                "threshold": each.threshold,
            }
            for each in found.evidence
        ],
    }


def _read(found: Mapping[str, Any]) -> Finding:
    return Finding(
        Verdict(found["verdict"]),
        str(found["rule"]),
        int(found["since"]),
        int(found["measured"]),
        tuple(Evidence(**each) for each in found["evidence"]),
    )
