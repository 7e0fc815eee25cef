"""Figures as SVG text, for asset pages and reports: numbers in, one small picture out.

Text stays text and paths are rounded, so a figure is a few KB and fits in an event's metadata.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, GREY, RED = "#3567b0", "#8a8f98", "#c2483d"


def _canvas(width: float = 6.0, height: float = 3.0) -> tuple[Figure, Axes]:
    # Imported here: a definitions load should not pay a second for figures nobody draws.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Figure) -> str:
    from matplotlib import rc_context

    sink = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fabric", "font.size": 9}):
        figure.savefig(sink, format="svg", metadata={"Date": None, "Creator": None})
    text = sink.getvalue()
    text = text[text.index("<svg") :]
    return re.sub(r"(\d+\.\d{2})\d+", r"\1", text)


def probe_accuracy(report: Mapping[str, Sequence[float]]) -> str:
    """Accuracy by layer with its interval, above the floors. `report`: columns of probes.report."""
    figure, axes = _canvas()
    layers = report["layer"]
    axes.fill_between(layers, report["low"], report["high"], color=BLUE, alpha=0.15, linewidth=0)
    axes.plot(layers, report["accuracy"], "o-", color=BLUE, label="probe (95 % interval)")
    axes.plot(layers, report["control"], "s--", color=GREY, label="shuffled labels")
    axes.axhline(report["bag_of_words"][0], color=RED, linestyle=":", label="bag of words")
    axes.axhline(report["majority"][0], color="black", linewidth=0.7, label="majority")
    axes.set(xlabel="layer", ylabel="held-out accuracy", ylim=(0, 1.02), xticks=list(layers))
    axes.legend(fontsize=7, loc="lower right", frameon=False)
    return _svg(figure)


def padding_by_lane(lengths: npt.NDArray[np.int64], aligned: npt.NDArray[np.int64]) -> str:
    """Real and padding tokens of each aligned length. `lengths`, `aligned`: one value a task."""
    figure, axes = _canvas()
    lanes = np.unique(aligned)
    real = np.array([lengths[aligned == lane].sum() for lane in lanes])
    total = np.array([(aligned == lane).sum() * lane for lane in lanes])
    names = [str(lane) for lane in lanes]
    axes.bar(names, real, color=BLUE, label="tokens")
    axes.bar(names, total - real, bottom=real, color=RED, label="padding")
    axes.set(xlabel="lane (aligned length)", ylabel="tokens")
    axes.set_title(f"padding {1 - real.sum() / total.sum():.1%}", fontsize=9)
    axes.legend(fontsize=7, frameon=False)
    return _svg(figure)


def similarity_histogram(nearest: npt.NDArray[np.float64], known: npt.NDArray[np.float64]) -> str:
    """Cosine of every row to its nearest other, and where the known near-duplicates lie among them."""
    figure, axes = _canvas()
    edges = np.linspace(min(0.0, float(nearest.min())), 1.0, 31).tolist()
    axes.hist(nearest, edges, color=GREY, label="nearest neighbour of each row")
    axes.hist(known, edges, color=RED, alpha=0.7, label="known near-duplicate pairs")
    axes.set(xlabel="cosine", ylabel="count")
    axes.legend(fontsize=7, loc="upper left", frameon=False)
    return _svg(figure)


def pass_rates(rates: Mapping[str, float]) -> str:
    """Verified pass rate of each generator."""
    figure, axes = _canvas(height=0.35 * len(rates) + 0.8)
    names = list(rates)[::-1]
    axes.barh(names, [rates[name] for name in names], color=BLUE)
    axes.set(xlabel="pass rate", xlim=(0, 1))
    return _svg(figure)


def health_map(values: npt.NDArray[Any], clusters: Sequence[str], metrics: Sequence[str]) -> str:
    """Heat map [clusters, metrics]; each metric is scaled to its own range, an undefined value stays white."""
    figure, axes = _canvas(0.36 * len(metrics) + 1.5, 0.2 * len(clusters) + 1.6)
    grid = np.asarray(values, np.float64)
    finite = np.where(np.isfinite(grid), grid, np.nan)
    usable = np.isfinite(finite).any(axis=0)
    low = np.full(grid.shape[1], 0.0)
    high = np.full(grid.shape[1], 1.0)
    low[usable], high[usable] = np.nanmin(finite[:, usable], 0), np.nanmax(finite[:, usable], 0)
    scaled = (finite - low) / np.where(high > low, high - low, 1.0)
    # one pixel a cell: as shapes the cells alone would be 50 KB
    axes.imshow(scaled, cmap="viridis", vmin=0, vmax=1, aspect="auto", interpolation="none")
    axes.set_xticks(np.arange(len(metrics)), metrics, rotation=60, ha="right", fontsize=7)
    axes.set_yticks(np.arange(len(clusters)), clusters, fontsize=6)
    return _svg(figure)


def norms_by_layer(layers: Sequence[int], norms: Sequence[float]) -> str:
    """Mean norm of the pooled states of each layer."""
    figure, axes = _canvas()
    axes.bar([str(layer) for layer in layers], norms, color=BLUE)
    axes.set(xlabel="layer", ylabel="mean norm")
    return _svg(figure)
