"""Figures as SVG text, for asset pages and reports: numbers in, one small picture out.

A Dagster page shows Markdown in place only below 1,000 characters and hides the rest behind a link, so these are
drawn by hand, in whole pixels and with one path a series: matplotlib's smallest file is 6 KB. The heat map
cannot be so small; it stays behind the link, and its figures stand beside it as a table with `sparkline`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

INLINE_CHARACTERS_MAX = 999  # of Markdown: what an asset page shows without a click
BLUE, GREY, RED = "#36b", "#778", "#c43"
LEFT, TOP, WIDTH, HEIGHT = 34, 16, 250, 90  # the plot area
BOTTOM = TOP + HEIGHT
DIGIT = 5  # advance of one digit at the page's 9 px
CIRCLES_MAX = 500  # of a map: 25 KB
BLOCKS = "▁▂▃▄▅▆▇█"


def probe_accuracy(report: Mapping[str, Sequence[float]]) -> str:
    """Accuracy by layer with its interval, above the floors. `report`: columns of probes.report."""
    layers = list(report["layer"])
    across = [round(x) for x in np.linspace(LEFT + 8, LEFT + WIDTH - 8, len(layers))]

    def height(share: float) -> int:
        return round(BOTTOM - share * HEIGHT)

    ends = zip(across, report["low"], report["high"], strict=True)
    interval = "".join(f"M{x} {height(low)}V{height(high)}" for x, low, high in ends)
    found = [height(share) for share in report["accuracy"]]
    control = [height(share) for share in report["control"]]
    words = height(report["bag_of_words"][0])
    return _page(
        BOTTOM + 26,
        _axes("0", "1"),
        _path(interval, "#bcd", "stroke-width='6'"),
        _path(_line(across, control), GREY),
        _path(f"M{LEFT} {words}h{WIDTH}", RED),
        _path(_line(across, found), BLUE),
        _ticks(across, [f"{layer:g}" for layer in layers]),
        _text(LEFT + WIDTH // 2, BOTTOM + 23, "layer"),
        _text(LEFT, 10, "held-out accuracy"),
        _text(130, 10, "probe, 95 %", BLUE),
        _text(192, 10, "shuffled", GREY),
        _text(238, 10, "word bag", RED),
    )


def padding_by_lane(lengths: npt.NDArray[np.int64], aligned: npt.NDArray[np.int64]) -> str:
    """Real and padding tokens of each aligned length. `lengths`, `aligned`: one value a task."""
    lanes = np.unique(aligned)
    real = np.array([lengths[aligned == lane].sum() for lane in lanes])
    total = np.array([(aligned == lane).sum() * lane for lane in lanes])
    most = int(total.max())
    pitch = WIDTH / len(lanes)
    across = [round(LEFT + pitch * (at + 0.5)) for at in range(len(lanes))]
    bar = max(2, min(24, int(pitch * 0.7)))
    heights = [round(HEIGHT * share) for share in total / most]
    inner = [round(HEIGHT * share) for share in real / most]
    every = -(-len(lanes) // 12)  # at most a dozen labels
    return _page(
        BOTTOM + 26,
        _axes("0", f"{most:,}"),
        _path(_bars(across, heights, bar), fill=RED),
        _path(_bars(across, inner, bar), fill=BLUE),
        _ticks(across[::every], [str(lane) for lane in lanes[::every]]),
        _text(LEFT + 80, BOTTOM + 23, "lane: aligned length"),
        _text(LEFT, 10, "tokens", BLUE),
        _text(LEFT + 40, 10, f"padding {1 - real.sum() / total.sum():.1%}", RED),
    )


def similarity_histogram(nearest: npt.NDArray[np.float64], known: npt.NDArray[np.float64]) -> str:
    """Cosine of every row to its nearest other, and where the known near-duplicates lie among them."""
    edges = np.linspace(min(0.0, float(nearest.min())), 1.0, 26)
    rows = np.histogram(nearest, edges)[0]
    pairs = np.histogram(known, edges)[0]
    most = int(max(rows.max(), pairs.max(), 1))
    ends = [f"{edges[0]:.1g}", f"{(edges[0] + 1) / 2:.2g}", "1"]
    return _page(
        BOTTOM + 26,
        _axes("0", f"{most:,}"),
        _path(_steps(rows / most), GREY, fill="#ccd"),
        _path(_steps(pairs / most), RED),
        _ticks([LEFT, LEFT + WIDTH // 2, LEFT + WIDTH], ends),
        _text(LEFT + 110, BOTTOM + 23, "cosine"),
        _text(LEFT, 10, "rows, by nearest neighbour", GREY),
        _text(170, 10, "known near-duplicates", RED),
    )


def radius_histogram(radii: npt.NDArray[np.float64]) -> str:
    """Distances of rows to the mean of their cluster."""
    most = float(radii.max(initial=0.0)) or 1.0
    rows = np.histogram(radii, 25, (0, most))[0]
    return _page(
        BOTTOM + 26,
        _axes("0", f"{max(int(rows.max()), 1):,}"),
        _path(_steps(rows / max(int(rows.max()), 1)), GREY, fill="#ccd"),
        _ticks([LEFT, LEFT + WIDTH // 2, LEFT + WIDTH], ["0", f"{most / 2:.3g}", f"{most:.3g}"]),
        _text(LEFT + 70, BOTTOM + 23, "distance to the cluster's mean"),
        _text(LEFT, 10, "rows"),
    )


def margin_histogram(rows: npt.NDArray[np.int64]) -> str:
    """Rows [bins] by margin from -1 to 1: below 0 another cluster's mean is nearer than their own."""
    most = max(int(rows.max(initial=0)), 1)
    middle = LEFT + WIDTH // 2
    return _page(
        BOTTOM + 26,
        _axes("0", f"{most:,}"),
        _path(_steps(rows / most), GREY, fill="#ccd"),
        _path(f"M{middle} {TOP}V{BOTTOM}", RED),
        _ticks([LEFT, middle, LEFT + WIDTH], ["-1", "0", "1"]),
        _text(LEFT + 110, BOTTOM + 23, "margin"),
        _text(LEFT, 10, "rows"),
        _text(LEFT + 30, 10, "nearer to another mean", RED),
    )


def cluster_map(
    places: npt.NDArray[np.float64],
    size: npt.NDArray[np.float64],
    odd: npt.NDArray[np.bool_],
    share: npt.NDArray[np.float64],
) -> str:
    """Clusters at places [K, 2] as circles whose area is their rows, `odd` ones in red; the largest CIRCLES_MAX of them. share:
    of the variance between clusters that each axis holds."""
    shown = np.argsort(-size, kind="stable")[:CIRCLES_MAX]
    shown = shown[size[shown] > 0]
    reach = float(np.abs(places[shown]).max(initial=0.0)) or 1.0
    half = WIDTH // 2
    at = np.rint(half + (half - 12) * places[shown] / reach).astype(int)
    radius = np.maximum(np.rint(11 * np.sqrt(size[shown] / size.max(initial=1.0))), 1).astype(int)
    circles = [
        (bool(red), f"M{LEFT + x - r} {TOP + WIDTH - y}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 -{2 * r} 0")
        for (x, y), r, red in zip(at.tolist(), radius.tolist(), odd[shown].tolist(), strict=True)
    ]  # fmt: skip
    left_out = int((size > 0).sum()) - len(shown)
    more = f", {left_out:,} smaller ones left out" if left_out else ""
    return _page(
        TOP + WIDTH + 20,
        _path("".join(step for red, step in circles if not red), BLUE),
        _path("".join(step for red, step in circles if red), RED),
        _text(LEFT, 10, f"means of clusters{more}"),
        _text(LEFT + 190, 10, "not KEEP", RED),
        _text(
            LEFT, TOP + WIDTH + 14, f"{share[0]:.0%} across, {share[1]:.0%} up of their variance"
        ),
    )


def pass_rates(rates: Mapping[str, float]) -> str:
    """Verified pass rate of each generator."""
    row, left, full = 13, 140, 150
    bars = [(row * at + 3, round(full * rate)) for at, rate in enumerate(rates.values())]
    names = "".join(_span(4, row, f"{name} {rate:.0%}") for name, rate in rates.items())
    return _page(
        row * len(rates) + 6,
        f"<text>{names}</text>",
        _path("".join(f"M{left} {y}h{width}v9h-{width}z" for y, width in bars), fill=BLUE),
    )


def norms_by_layer(layers: Sequence[int], norms: Sequence[float]) -> str:
    """Mean norm of the pooled states of each layer."""
    most = max(*norms, 1e-9)
    across = [round(x) for x in np.linspace(LEFT + 20, LEFT + WIDTH - 20, len(layers))]
    return _page(
        BOTTOM + 26,
        _axes("0", f"{most:,.0f}" if most >= 100 else f"{most:.3g}"),
        _path(_bars(across, [round(HEIGHT * norm / most) for norm in norms], 20), fill=BLUE),
        _ticks(across, [str(layer) for layer in layers]),
        _text(LEFT + WIDTH // 2 - 10, BOTTOM + 23, "layer"),
        _text(LEFT, 10, "mean norm of the pooled states"),
    )


def health_map(values: npt.NDArray[Any], clusters: Sequence[str], metrics: Sequence[str]) -> str:
    """Heat map [metrics, clusters]; each metric is scaled to its own range, an undefined value stays white."""
    # Imported here: a definitions load should not pay a second for a figure nobody draws.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.22 * len(metrics) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    # one pixel a cell: as shapes the cells alone would be 50 KB
    image = axes.imshow(
        _scaled(values).T, cmap="viridis", vmin=0, vmax=1, aspect="auto", interpolation="none"
    )
    axes.set_yticks(np.arange(len(metrics)), metrics, fontsize=8)
    axes.set_xticks(np.arange(len(clusters)), clusters, fontsize=8)
    axes.set_xlabel("cluster", fontsize=8)
    bar = figure.colorbar(image, ticks=[0, 1], fraction=0.03, pad=0.02)
    bar.ax.set_yticklabels(["least", "greatest"], fontsize=8)
    sink = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fabric"}):
        figure.savefig(sink, format="svg", metadata={"Date": None, "Creator": None})
    text = sink.getvalue()
    return re.sub(r"(\d+\.\d{2})\d+", r"\1", text[text.index("<svg") :])


def sparkline(values: npt.NDArray[Any]) -> str:
    """One block a value, scaled to the row's own range; a space where there is none."""
    scaled = _scaled(np.asarray(values, np.float64)[:, None])[:, 0]
    return "".join(
        BLOCKS[min(int(value * len(BLOCKS)), len(BLOCKS) - 1)] if np.isfinite(value) else " "
        for value in scaled
    )


def _scaled(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Each column over its own range, 0 to 1; NaN where it is not finite."""
    grid = np.asarray(values, np.float64)
    finite = np.where(np.isfinite(grid), grid, np.nan)
    usable = np.isfinite(finite).any(axis=0)
    low = np.full(grid.shape[1], 0.0)
    high = np.full(grid.shape[1], 1.0)
    low[usable], high[usable] = np.nanmin(finite[:, usable], 0), np.nanmax(finite[:, usable], 0)
    scaled: npt.NDArray[np.float64] = (finite - low) / np.where(high > low, high - low, 1.0)
    return scaled


def _page(height: int, *parts: str) -> str:
    """Grey words on no ground: readable in the light and in the dark theme."""
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{LEFT + WIDTH + 20}' height='{height}' "
        f"fill='{GREY}' style='font:9px sans-serif'>{''.join(parts)}</svg>"
    )


def _axes(least: str, most: str) -> str:
    """Both axes, and the two ends of the upright one."""
    return (
        _path(f"M{LEFT} {TOP}V{BOTTOM}h{WIDTH}", GREY)
        + _text(2, BOTTOM, least)
        + _text(2, TOP + 7, most)
    )


def _path(steps: str, stroke: str = "", more: str = "", *, fill: str = "none") -> str:
    line = f" stroke='{stroke}'" if stroke else ""
    return f"<path d='{steps}' fill='{fill}'{line}{' ' * bool(more)}{more}/>"


def _text(x: int, y: int, words: str, colour: str = "") -> str:
    fill = f" fill='{colour}'" if colour else ""
    return f"<text x='{x}' y='{y}'{fill}>{words}</text>"


def _span(x: int, down: int, words: str) -> str:
    return f"<tspan x='{x}' dy='{down}'>{words}</tspan>"


def _ticks(across: Sequence[int], names: Sequence[str]) -> str:
    """Labels under the lying axis as one element: SVG takes a position for every character."""
    places = [
        str(round(x - DIGIT * len(name) / 2) + DIGIT * at)
        for x, name in zip(across, names, strict=True)
        for at in range(len(name))
    ]
    return f"<text x='{' '.join(places)}' y='{BOTTOM + 11}'>{''.join(names)}</text>"


def _line(across: Sequence[int], down: Sequence[int]) -> str:
    return "M" + "L".join(f"{x} {y}" for x, y in zip(across, down, strict=True))


def _bars(across: Sequence[int], heights: Sequence[int], width: int) -> str:
    return "".join(
        f"M{x - width // 2} {BOTTOM}v-{height}h{width}v{height}" * bool(height)
        for x, height in zip(across, heights, strict=True)
    )


def _steps(shares: npt.NDArray[np.float64]) -> str:
    """Outline of a histogram over the plot area."""
    pitch = WIDTH // len(shares)
    tops = "".join(f"V{round(BOTTOM - HEIGHT * share)}h{pitch}" for share in shares)
    return f"M{LEFT} {BOTTOM}{tops}V{BOTTOM}"
