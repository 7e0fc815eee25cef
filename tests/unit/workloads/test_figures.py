"""Figures are small SVG texts that say what they were given."""

from __future__ import annotations

import numpy as np

from assets.metadata import figure
from fabric_pipelines.workloads import figures

SIZE_MAX = 30_000  # an event's metadata is one JSON row


def test_every_figure_is_one_small_svg() -> None:
    lengths = np.arange(3, 40, dtype=np.int64)
    drawn = [
        figures.padding_by_lane(lengths, (lengths + 7) // 8 * 8),
        figures.pass_rates({"all": 0.5, "gcd": 1.0}),
        figures.norms_by_layer([8, 16], [1.0, 2.0]),
        figures.similarity_histogram(np.linspace(0, 1, 50), np.array([0.9])),
        figures.health_map(
            np.arange(320.0).reshape(16, 20), [str(n) for n in range(16)], ["metric"] * 20
        ),
        figures.radius_histogram(np.linspace(0, 3, 90)),
        figures.radius_histogram(np.zeros(4)),
        figures.margin_histogram(np.arange(50)),
        figures.cluster_map(
            np.arange(2000.0).reshape(1000, 2), np.ones(1000), np.ones(1000) > 2, np.ones(2)
        ),
        figures.health_map(np.array([[1.0, np.nan], [2.0, np.nan]]), ["0", "1"], ["a", "b"]),
        figures.probe_accuracy(
            {
                name: [0.5, 0.7]
                for name in (
                    "layer",
                    "low",
                    "high",
                    "accuracy",
                    "control",
                    "bag_of_words",
                    "majority",
                )
            }
        ),
    ]
    for svg in drawn:
        assert svg.startswith("<svg")
        assert svg.rstrip().endswith("</svg>")
        assert len(svg) < SIZE_MAX
    assert "lane: aligned length" in drawn[0]


def test_a_figure_of_a_quickstart_is_shown_in_place() -> None:
    """A Dagster page hides Markdown of 1,000 characters and more behind a link."""
    rng = np.random.default_rng(7)
    lengths = rng.integers(4, 80, 800)
    layers = [0, 6, 12, 18, 24, 30]
    report = dict.fromkeys(("low", "high", "accuracy", "control", "bag_of_words"), [0.51] * 6)
    names = ("basic_arithmetic", "calendar_arithmetic", "letter_counting")
    drawn = [
        figures.padding_by_lane(lengths, (lengths + 7) // 8 * 8),
        figures.pass_rates({f"{name}{at}": 0.35 for name in names for at in range(3)}),
        figures.norms_by_layer([8, 16, 30], [1.0, 2.0, 3.0]),
        figures.similarity_histogram(rng.beta(5, 3, 800), rng.beta(9, 1, 40)),
        figures.probe_accuracy({"layer": layers, **report}),
    ]
    sizes = [len(str(figure(svg).value)) for svg in drawn]
    assert max(sizes) <= figures.INLINE_CHARACTERS_MAX, sizes


def test_a_map_draws_clusters_by_their_rows_and_says_what_it_leaves_out() -> None:
    count = figures.CIRCLES_MAX + 7
    places = np.random.default_rng(1).standard_normal((count, 2))
    size = np.arange(count, 0, -1.0)
    size[0] = 4 * size[1]
    odd = np.zeros(count, np.bool_)
    odd[0] = True
    svg = figures.cluster_map(places, size, odd, np.array([0.5, 0.25]))
    assert "7 smaller ones left out" in svg
    assert "50% across, 25% up" in svg
    red = svg[: svg.index(f"stroke='{figures.RED}'")].rpartition("<path")[2]
    assert red.count("M") == 1
    assert "a11 11" in red
    assert svg.count("M") == figures.CIRCLES_MAX


def test_a_sparkline_leaves_a_gap_where_there_is_no_value() -> None:
    assert figures.sparkline(np.array([1.0, np.nan, 2.0])) == "▁ █"


def test_the_same_numbers_draw_the_same_bytes() -> None:
    rates = {"all": 0.25, "gcd": 0.5}
    assert figures.pass_rates(rates) == figures.pass_rates(rates)
