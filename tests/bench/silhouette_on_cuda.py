"""The exact silhouette of every cluster on a card, beside torch with the same metric on the same card.

    python -m tests.bench.silhouette_on_cuda [ROWSxDIMxCLUSTERS ...] [--rounds 5] [--device cuda] [--json PATH]

Squared Euclidean distances, rows on the card beforehand on all sides, one answer a cluster. torch does it twice: by pairs, which
is what everybody writes (a block of rows against all rows, distances summed by cluster), and by moments, which is our own way
(a mean squared distance to a cluster is that to its mean and the cluster's spread). Ours is
`measure(only=["silhouette"], backend="cuda")` without its upload, which is told apart: all sides are timed from rows on
the card to numbers on the host. Sides take turns; medians of rounds; the ratio is torch's time over ours. Ten answers of ours
must be the same bytes. `--device cpu` rehearses it where there is no card, ours on the CPU too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fabric_pipelines.analytics import health
from fabric_pipelines.analytics.health import measure

SHAPES = ("20000x128x50", "200000x384x1000", "500000x768x2000")
BLOCK_VALUES = 1 << 28  # of a block of distances: 1 GiB
PAIRS_MOST = 4e14  # multiply-adds by pairs: seconds, not minutes
REPEATS = 10


def draw(rows: int, dim: int, clusters: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(rows)
    share = rng.lognormal(0.0, 0.7, clusters)
    sizes = np.maximum(2, np.floor(share / share.sum() * rows)).astype(np.int64)
    sizes[0] += rows - sizes.sum()
    indptr = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    centre = rng.standard_normal((clusters, dim), dtype=np.float32)
    drawn = rng.standard_normal((rows, dim), dtype=np.float32)
    drawn += np.repeat(centre, sizes, axis=0)
    return drawn, indptr


def by_pairs(torch: Any, rows: Any, owner: Any, size: Any) -> Any:
    """[K] means, each pair of rows visited. f32 products, which cancel in rows near each other as they do for everybody."""
    count, clusters = len(rows), len(size)
    norm2 = (rows * rows).sum(1)
    score = torch.empty(count, device=rows.device, dtype=torch.float64)
    step = max(1, BLOCK_VALUES // count)
    for start in range(0, count, step):
        block = slice(start, min(start + step, count))
        apart = norm2[block, None] + norm2 - 2.0 * (rows[block] @ rows.T)
        sums = torch.zeros(len(apart), clusters, device=rows.device)
        sums.index_add_(1, owner, apart.clamp_(min=0.0))
        score[block] = _scores(torch, sums.double(), owner[block], size)
    return _means(torch, score, owner, size)


def by_moments(torch: Any, rows: Any, owner: Any, size: Any) -> Any:
    """[K] means from the clusters' means and spreads."""
    count, clusters = len(rows), len(size)
    means = torch.zeros(clusters, rows.shape[1], device=rows.device).index_add_(0, owner, rows)
    means /= size[:, None].float()
    radius2 = ((rows - means[owner]) ** 2).sum(1).double()
    within = torch.zeros(clusters, device=rows.device, dtype=torch.float64)
    within.index_add_(0, owner, radius2)
    norm2, means2 = (rows * rows).sum(1), (means * means).sum(1)
    score = torch.empty(count, device=rows.device, dtype=torch.float64)
    step = max(1, BLOCK_VALUES // clusters)
    for start in range(0, count, step):
        block = slice(start, min(start + step, count))
        apart = norm2[block, None] + means2 - 2.0 * (rows[block] @ means.T)
        sums = (apart.clamp_(min=0.0).double() + within / size) * size
        own = owner[block]
        sums[torch.arange(len(own), device=own.device), own] = (
            size[own] * radius2[block] + within[own]
        )
        score[block] = _scores(torch, sums, own, size)
    return _means(torch, score, owner, size)


def _scores(torch: Any, sums: Any, own: Any, size: Any) -> Any:
    """Of rows, from the sums of their squared distances to each cluster."""
    here = torch.arange(len(own), device=own.device)
    inside = sums[here, own] / (size[own] - 1).clamp(min=1)
    means = sums / size
    means[here, own] = float("inf")
    nearest = means.min(1).values
    score = (nearest - inside) / torch.maximum(nearest, inside)
    return torch.where(size[own] > 1, score, torch.zeros_like(score))


def _means(torch: Any, score: Any, owner: Any, size: Any) -> Any:
    total = torch.zeros(len(size), device=score.device, dtype=torch.float64)
    return (total.index_add_(0, owner, score) / size).cpu().numpy()


def ours(rows: Any, indptr: Any, device: str) -> tuple[Any, float, float]:
    """(values, seconds from rows on the card, seconds of the upload)."""
    begin = time.perf_counter()
    table = measure(
        rows, indptr, np.arange(len(rows), dtype=np.int64), metric="l2", only=["silhouette"],
        backend="cuda" if device == "cuda" else "cpu",
    )  # fmt: skip
    spent, opening = time.perf_counter() - begin, table.pass_seconds["open"]
    assert (table.readings["silhouette"].status == health.Status.OK).all()
    return table.readings["silhouette"].value, spent - opening, opening


def compare(torch: Any, shape: str, rounds: int, device: str) -> dict[str, Any]:
    count, dim, clusters = map(int, shape.split("x"))
    rows, indptr = draw(count, dim, clusters)
    there = torch.from_numpy(rows).to(device)
    size = torch.from_numpy(np.diff(indptr)).to(device)
    owner = torch.repeat_interleave(torch.arange(clusters, device=device), size)
    sides: dict[str, Callable[..., Any]] = {"torch by moments": by_moments}
    if float(count) * count * dim <= PAIRS_MOST:
        sides["torch by pairs"] = by_pairs
    seconds: dict[str, list[float]] = {name: [] for name in ("ours", *sides)}
    found: dict[str, Any] = {}
    opened = []
    for at in range(rounds + 1):  # the first loads kernels and is not counted
        value, spent, opening = ours(rows, indptr, device)
        found["ours"] = value
        took = {"ours": spent}
        for name, side in sides.items():
            begin = time.perf_counter()
            found[name] = side(torch, there, owner, size)  # ends on the host, so the card is done
            took[name] = time.perf_counter() - begin
        if at:
            opened.append(opening)
            for name, spent in took.items():
                seconds[name].append(spent)
    same = {ours(rows, indptr, device)[0].tobytes() for _ in range(REPEATS)}
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "shape": shape,
        "upload_s": statistics.median(opened),
        "seconds": middle,
        "least": {name: min(values) for name, values in seconds.items()},
        "greatest": {name: max(values) for name, values in seconds.items()},
        "over_ours": {name: middle[name] / middle["ours"] for name in sides},
        "largest_difference": {
            name: float(np.abs(found[name] - found["ours"]).max()) for name in sides
        },
        "byte_equal_of": [REPEATS, len(same)],
    }


def table(lines: Sequence[dict[str, Any]]) -> str:
    text = "| rows x dim x clusters | side | median, least-greatest ms | times ours | difference |\n|---|---|---|---|---|\n"
    for line in lines:
        for name, spent in line["seconds"].items():
            over = f"{line['over_ours'][name]:.1f}" if name in line["over_ours"] else ""
            apart = f"{line['largest_difference'][name]:.1e}" if over else ""
            low, high = line["least"][name], line["greatest"][name]
            text += (
                f"| {line['shape']} | {name} | {1e3 * spent:.1f}, {1e3 * low:.1f}-{1e3 * high:.1f} | "
                f"{over} | {apart} |\n"
            )
        runs, answers = line["byte_equal_of"]
        text += f"| {line['shape']} | upload, told apart | {1e3 * line['upload_s']:.1f} | | {runs} runs, {answers} answer(s) |\n"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    import torch  # a peer: never installed by us

    torch.backends.cuda.matmul.allow_tf32 = False  # the same precision on all sides
    lines = []
    for shape in given.shapes:
        lines.append(compare(torch, shape, given.rounds, given.device))
        sys.stdout.write(table(lines[-1:]))
        sys.stdout.flush()
    if given.json:
        given.json.write_text(json.dumps({"device": given.device, "lines": lines}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
