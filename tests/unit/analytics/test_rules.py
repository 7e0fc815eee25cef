"""The rule table: the shipped one is whole, and a bad one is refused with the rule, the signal and a remedy."""

from pathlib import Path

import pytest

from fabric_pipelines.analytics.rules import Verdict, load, parse, shipped
from fabric_pipelines.analytics.signals import KNOWN
from fabric_pipelines.errors import SettingsError

GOOD = """
keep_consecutive = 3
[[rule]]
name = "humps"
verdict = "SPLIT"
consecutive = 2
when = [{ signal = "size", above = 31 }, { signal = "dip", above = 0.05, at_once = 0.1 }]
"""


def rule(body: str) -> str:
    return f'[[rule]]\nname = "humps"\n{body}'


def test_the_shipped_table_gives_every_verdict_that_a_rule_may_give() -> None:
    table = shipped()
    assert {each.verdict for each in table.rules} == set(Verdict) - {Verdict.KEEP, Verdict.UNKNOWN}
    assert {each.signal for one in table.rules for each in one.conditions} <= KNOWN
    assert table.keep.consecutive == 2
    assert load(None) == table


def test_a_table_of_ones_own_says_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(GOOD)
    table = load(tmp_path / "own.toml")
    (humps,) = table.rules
    assert (humps.verdict, humps.consecutive, table.keep.consecutive) == (Verdict.SPLIT, 2, 3)
    assert [(c.signal, c.sense, c.threshold, c.at_once) for c in humps.conditions] == [
        ("size", "above", 31.0, None),
        ("dip", "above", 0.05, 0.1),
    ]


def test_the_digest_is_of_what_the_table_says_and_not_of_its_text() -> None:
    same = GOOD.replace("= 31 ", "= 31.0 ") + "# as before\n"
    assert parse(same, "a").sha256 == parse(GOOD, "b").sha256
    assert parse(GOOD.replace("0.05", "0.06"), "a").sha256 != parse(GOOD, "a").sha256


WHEN = 'when = [{ signal = "dip", above = 1 }]'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("keep_consecutive = 2", "between 1 and 1000 tables"),
        ("= 3", "is not TOML"),
        ("rules = 3\n" + GOOD, "'rules'; only keep_consecutive, rule"),
        (GOOD.replace("= 3\n", "= 0\n"), "keep_consecutive is 0; it must be a whole number from 1"),
        (GOOD + GOOD.partition("3\n")[2], "two rules named 'humps'"),
        ("[[rule]]\nverdict = 'SPLIT'\n" + WHEN, "needs a name"),
        (rule("verdict = 'KEEP'\n" + WHEN), "verdict 'KEEP'; it must be one of QUARANTINE"),
        (rule("verdict = 'SPLT'\n" + WHEN), "rule 1 (humps) has verdict 'SPLT'"),
        (rule("verdict = 'SPLIT'"), "needs `when`"),
        (rule("verdict = 'SPLIT'\nwhen = []"), "needs `when`"),
        (rule("verdict = 'SPLIT'\nwhen = [3]"), "a condition is a table"),
        (GOOD.replace("consecutive = 2", "consecutiv = 2"), "(humps) has 'consecutiv'"),
        (GOOD.replace('"dip"', '"dipp"'), "(humps): signal 'dipp' is unknown; did you mean 'dip'"),
        (GOOD.replace('"dip"', '"zzzzz"'), "docs/analytics.md lists all"),
        (GOOD.replace("above = 0.05", "over = 0.05"), "has 'over'; only signal, above, below"),
        (GOOD.replace("above = 31", "above = 31, below = 9"), "size needs either `above` or"),
        (GOOD.replace("above = 31", "above = '31'"), "size: above is '31'; it must be a finite"),
        (GOOD.replace("above = 31", "above = nan"), "it must be a finite number"),
        (GOOD.replace("above = 31", "above = true"), "it must be a finite number"),
        (GOOD.replace("at_once = 0.1", "at_once = 0.01"), "dip: at_once is 0.01; it must lie above"),
        (GOOD.replace("consecutive = 2", "consecutive = 1"), "at_once that changes nothing"),
        (
            GOOD.replace('"dip", above = 0.05, at_once = 0.1', '"size", below = 31'),
            "size cannot be above 31 and below 31: the rule would never fire",
        ),
    ],
)  # fmt: skip
def test_a_bad_table_is_refused_by_rule_signal_and_remedy(text: str, says: str) -> None:
    with pytest.raises(SettingsError) as refused:
        parse(text, "own.toml")
    assert says in str(refused.value)
    assert str(refused.value).startswith("own.toml")


def test_a_table_that_is_not_there_names_the_variable(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.toml cannot be read .*FABRIC_HEALTH_RULES"):
        load(tmp_path / "none.toml")
