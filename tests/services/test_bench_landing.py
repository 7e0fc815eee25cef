"""The landing benchmark end to end, small: it lands what it says, and our own way keeps its budget of CPU and WAL."""

from __future__ import annotations

from pathlib import Path

import pytest

from fabric_pipelines.bench.landing import governed
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
    monkeypatch.setattr(governed, "FILL_ROWS", 10_000)
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
        assert all(run[kind]["rows_per_s"] > 0 for kind in governed.KINDS)
        assert run["idle"]["transactions"] > 0
    assert found["all"]["idle"]["transactions"] == sum(
        run["idle"]["transactions"] for run in found["runs"]
    )
    classes = found["account"]["classes"]
    assert classes["bulk"]["rows"] > 0
    text = table(report)
    assert "| + HNSW" in text
    assert "share of the rate" in text


def test_an_unknown_part_is_refused(settings: Settings) -> None:
    with pytest.raises(UsageError, match="parts are ways, prices, governor"):
        measure(settings, Options(parts=("wayss",)), lambda line: None)
    assert PARTS == ("ways", "prices", "governor")
