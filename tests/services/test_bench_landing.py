"""The landing benchmark end to end, small: it lands what it says, and our own way keeps its budget of CPU and WAL."""

from __future__ import annotations

from pathlib import Path

import pytest

from fabric_pipelines.bench.landing import governed, turns
from fabric_pipelines.bench.landing.measure import PARTS, Options, measure, table
from fabric_pipelines.bench.landing.rows import FUNCTIONS, batch
from fabric_pipelines.bench.landing.ways import WAYS
from fabric_pipelines.errors import UsageError
from fabric_pipelines.records.arrow import require_schema
from fabric_pipelines.records.completion import PULLED_SCHEMA
from fabric_pipelines.settings import Settings

BUDGET = {"client_us_per_row": 8.0, "wal_per_copy_byte": 1.2}
ROWS_PER_CPU_S = 45_000


@pytest.fixture
def settings(open_folder: Path) -> Settings:
    return Settings(home=open_folder / "bench")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_its_rows_are_what_completion_pulls(function: str) -> None:
    made = batch(function, 7, 100)
    require_schema(made, PULLED_SCHEMA, "bench rows")
    assert made.column("source_row").to_pylist() == list(range(100, 107))
    assert made.equals(batch(function, 7, 100))


@pytest.mark.slow
def test_every_way_is_measured_or_named_as_missing_and_ours_keeps_its_budget(
    settings: Settings,
) -> None:
    said: list[str] = []
    report = measure(settings, Options(rows=10_000, rounds=1, parts=("ways",)), said.append)
    measured = {row["name"] for row in report["systems"]}
    assert measured | set(report["missing"]) == {way.name for way in WAYS}
    assert measured >= {"fabric, straight", "psycopg executemany"}
    assert all("pip install" in why for why in report["missing"].values())
    ours = report["systems"][0]
    assert (ours["name"], ours["function"]) == ("fabric, straight", "embed")
    assert report["rows_per_cpu_s"] == ours["rows_per_cpu_s"] >= ROWS_PER_CPU_S
    assert ours["copy_bytes_per_row"] > 768
    for key, most in BUDGET.items():
        assert report[key] <= most, key
    assert f"**{ours['rows_per_cpu_s']:,}**" in table(report)
    assert not list(settings.home.iterdir()), "the bench leaves nothing behind"


@pytest.mark.slow
def test_prices_and_the_governors_line_are_printed(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(governed, "FILL_SEGMENTS_MOST", 2)
    monkeypatch.setattr(governed, "SETTLE_S", 0.3)
    options = Options(rows=10_000, rounds=1, runs=2, seconds=1.0, parts=("prices", "governor"))
    report = measure(settings, options, lambda line: None)
    prices = {row["name"]: row for row in report["prices"]}
    assert prices["+ HNSW (m 16, ef 64)"]["multiple"] > 10
    assert (
        prices["+ btree on a random key"]["wal_bytes_per_row"]
        > prices["primary key only"]["wal_bytes_per_row"]
    )
    found = report["governor"]
    assert len(found["runs"]) == 2
    for run in (*found["runs"], found["all"]):
        assert all(run[kind]["rows_per_s"] > 0 for kind in turns.KINDS)
        assert run["idle"]["transactions"] > 0
    assert found["all"]["idle"]["transactions"] == sum(
        run["idle"]["transactions"] for run in found["runs"]
    )
    classes = found["account"]["classes"]
    assert classes["bulk"]["rows"] > 0
    text = table(report)
    assert "| + HNSW" in text
    assert "share of the rate" in text
    assert f"{found['verdict']['both']} of 2 runs**" in text
    assert 0 < found["all"]["idle"]["busy_share"] <= 1


def test_the_floor_takes_a_third_of_its_three_seconds_of_cpu(settings: Settings) -> None:
    """20,000 generated rows within 3 s: a third of one CPU would do, for client and server together."""
    report = measure(settings, Options(rounds=2, parts=("floor",)), lambda line: None)
    found = report["floor"]
    assert len(found["seconds"]) == 2, "and every row of both was counted in the table"
    assert (found["rows"], found["within_s"]) == (20_000, 3.0)
    assert min(found["cpu_s"]) <= found["within_s"] / 3
    assert "20,000 generated rows through completion's loop" in table(report)


def test_the_halves_of_silence_tell_what_the_machine_alone_makes_of_a_ratio() -> None:
    run = turns.Turns(each_ms=[[1.0] * 50, [3.0] * 50, [1.0] * 50, [3.0] * 50])
    assert (run.noise(), turns.Turns(each_ms=[[2.0]]).noise()) == (3.0, 1.0)


@pytest.mark.parametrize(
    ("ratios", "shares", "busy", "expected"),
    [
        ((1.3, 1.31, 0.9), (0.5, 0.9, 0.49), (0.1, 0.2, 0.9), (1, 2, 2, [3])),
        ((2.0,), (0.1,), (0.0,), (0, 0, 0, [])),
    ],
)
def test_the_verdict_counts_runs_that_keep_both_limits_and_names_those_without_quiet(
    ratios: tuple[float, ...],
    shares: tuple[float, ...],
    busy: tuple[float, ...],
    expected: tuple[int, int, int, list[int]],
) -> None:
    lines = [
        {
            "idle": {"busy_share": taken, "noise": 1.2},
            "ungoverned": {"p99_ratio": 3.0},
            "governed": {"p99_ratio": ratio},
            "rate_share": share,
        }
        for ratio, share, taken in zip(ratios, shares, busy, strict=True)
    ]
    said = turns.verdict(lines)
    assert tuple(said[key] for key in ("both", "ratio", "share", "not_quiet")) == expected


def test_an_unknown_part_is_refused(settings: Settings) -> None:
    with pytest.raises(UsageError, match="parts are ways, floor, prices, governor"):
        measure(settings, Options(parts=("wayss",)), lambda line: None)
    assert PARTS == ("ways", "floor", "prices", "governor")
