"""The rule table: ordered rules, each a few conditions on signals and the verdict that follows when all hold.

Read from TOML; decisions.toml beside this file is the default. A name that nothing knows, a rule that can never fire or
a threshold that is no number is refused when the table is read, with the rule, the signal and what may stand there: a
typo must not become a rule that is silent for ever.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from fabric_pipelines.analytics.signals import KNOWN
from fabric_pipelines.errors import SettingsError
from fabric_pipelines.ids import digest

RULES_MAX = 1000
CONSECUTIVE_MAX = 100
SHIPPED = "decisions.toml"


class Verdict(StrEnum):
    """What to do with a cluster. UNKNOWN: a rule that stands before all that hold could not be judged."""

    QUARANTINE = "QUARANTINE"
    REEMBED = "REEMBED"
    DEDUPE = "DEDUPE"
    REBUILD = "REBUILD"
    SPLIT = "SPLIT"
    MERGE = "MERGE"
    REVIEW = "REVIEW"
    KEEP = "KEEP"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class Condition:
    """`signal` is above (or below) `threshold`; beyond `at_once`, if there is one, nothing need be seen again."""

    signal: str
    sense: Literal["above", "below"]
    threshold: float
    at_once: float | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """Fires when every condition holds. `consecutive`: measurements in a row before the verdict changes to this one; at
    the first already where every condition that has an `at_once` is beyond it."""

    name: str
    verdict: Verdict
    conditions: tuple[Condition, ...]
    consecutive: int = 1

    @property
    def may_hurry(self) -> bool:
        return any(each.at_once is not None for each in self.conditions)


@dataclass(frozen=True, slots=True)
class RuleTable:
    """rules in order, the first that is not false decides; `keep` is how often a cluster must look well before a
    verdict is taken back. sha256: of what the table says, not of its text."""

    rules: tuple[Rule, ...]
    keep: Rule
    sha256: str

    def within(self, signals: Collection[str]) -> RuleTable:
        """Of the rules only those that ask for nothing but these; the digest stays that of the whole."""
        told = (rule for rule in self.rules if {c.signal for c in rule.conditions} <= set(signals))
        return replace(self, rules=tuple(told))


def shipped() -> RuleTable:
    source = resources.files("fabric_pipelines.analytics").joinpath(SHIPPED)
    return parse(source.read_text(encoding="utf-8"), SHIPPED)


def load(path: Path | None) -> RuleTable:
    """The table in the file `path`, or the shipped one. SettingsError names the file, the rule and the remedy."""
    if path is None:
        return shipped()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise SettingsError(
            f"the rule table {path} cannot be read ({fault}): point FABRIC_HEALTH_RULES at a TOML file, or unset it"
        ) from fault
    return parse(text, str(path))


def parse(text: str, where: str) -> RuleTable:
    """`where` is what messages call the table."""
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as fault:
        raise SettingsError(f"{where} is not TOML: {fault}") from fault
    _only(found, ("keep_consecutive", "rule"), where)
    entries = found.get("rule", [])
    if not isinstance(entries, list) or not 0 < len(entries) <= RULES_MAX:
        raise SettingsError(f"{where} must have between 1 and {RULES_MAX} tables [[rule]]")
    rules = tuple(_rule(entry, f"{where}, rule {at}") for at, entry in enumerate(entries, 1))
    names = [rule.name for rule in rules]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"{where} has two rules named {name!r}: give each its own name")
    count = _consecutive(found.get("keep_consecutive", 1), f"{where}: keep_consecutive")
    keep = Rule("keep", Verdict.KEEP, (), count)
    return RuleTable(rules, keep, digest(_said(rules, keep)))


def _rule(entry: Any, where: str) -> Rule:
    if not isinstance(entry, Mapping):
        raise SettingsError(f"{where} must be a table")
    name = entry.get("name")
    if not isinstance(name, str) or not name or name == "keep":
        raise SettingsError(f"{where} needs a name of its own, a text other than 'keep'")
    where = f"{where} ({name})"
    _only(entry, ("name", "verdict", "consecutive", "when"), where)
    may = [each.value for each in Verdict if each not in (Verdict.KEEP, Verdict.UNKNOWN)]
    if entry.get("verdict") not in may:
        raise SettingsError(
            f"{where} has verdict {entry.get('verdict')!r}; it must be one of {', '.join(may)}"
        )
    when = entry.get("when")
    if not isinstance(when, list) or not when:
        raise SettingsError(f"{where} needs `when`, a list of conditions that must all hold")
    conditions = tuple(_condition(each, where) for each in when)
    rule = Rule(
        name,
        Verdict(entry["verdict"]),
        conditions,
        _consecutive(entry.get("consecutive", 1), f"{where}: consecutive"),
    )
    _can_fire(rule, where)
    if rule.consecutive == 1 and rule.may_hurry:
        raise SettingsError(
            f"{where} has an at_once that changes nothing, since one measurement is enough: "
            "drop it, or set consecutive to 2 or more"
        )
    return rule


def _condition(entry: Any, where: str) -> Condition:
    if not isinstance(entry, Mapping):
        raise SettingsError(f'{where}: a condition is a table like {{ signal = "dip", above = 1 }}')
    _only(entry, ("signal", "above", "below", "at_once"), where)
    signal = entry.get("signal")
    if signal not in KNOWN:
        near = get_close_matches(str(signal), KNOWN, 1)
        hint = f"did you mean {near[0]!r}?" if near else "docs/analytics.md lists all"
        raise SettingsError(f"{where}: signal {signal!r} is unknown; {hint}")
    where = f"{where}: {signal}"
    if ("above" in entry) == ("below" in entry):
        raise SettingsError(f"{where} needs either `above` or `below`")
    sense: Literal["above", "below"] = "above" if "above" in entry else "below"
    threshold = _number(entry[sense], f"{where}: {sense}")
    if "at_once" not in entry:
        return Condition(signal, sense, threshold)
    at_once = _number(entry["at_once"], f"{where}: at_once")
    if at_once < threshold if sense == "above" else at_once > threshold:
        raise SettingsError(
            f"{where}: at_once is {at_once:g}; it must lie {sense} {threshold:g}, the first threshold"
        )
    return Condition(signal, sense, threshold, at_once)


def _can_fire(rule: Rule, where: str) -> None:
    """No signal is asked to be on both sides of an empty gap."""
    least: dict[str, float] = {}
    most: dict[str, float] = {}
    for each in rule.conditions:
        if each.sense == "above":
            least[each.signal] = max(each.threshold, least.get(each.signal, -math.inf))
        else:
            most[each.signal] = min(each.threshold, most.get(each.signal, math.inf))
    for signal in least.keys() & most.keys():
        if least[signal] >= most[signal]:
            raise SettingsError(
                f"{where}: {signal} cannot be above {least[signal]:g} and below {most[signal]:g}: "
                "the rule would never fire"
            )


def _consecutive(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= CONSECUTIVE_MAX:
        raise SettingsError(
            f"{where} is {value!r}; it must be a whole number from 1 to {CONSECUTIVE_MAX}"
        )
    return value


def _number(value: Any, where: str) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value):
        raise SettingsError(f"{where} is {value!r}; it must be a finite number")
    return float(value)


def _only(entry: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in entry:
        if name not in known:
            raise SettingsError(f"{where} has {name!r}; only {', '.join(known)} may stand there")


def _said(rules: Sequence[Rule], keep: Rule) -> list[Any]:
    """Numbers as text: a digest must not hang on how a float is written."""
    return [
        [
            rule.name,
            rule.verdict.value,
            rule.consecutive,
            [
                [each.signal, each.sense, repr(each.threshold), repr(each.at_once)]
                for each in rule.conditions
            ],
        ]
        for rule in (*rules, keep)
    ]
