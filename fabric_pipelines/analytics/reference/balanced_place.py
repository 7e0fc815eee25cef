"""Twin of balanced placing: rows bid for lists in rounds, one by one.

In each round every row without a list bids for the nearest centroid whose list has room, ties to the lower list; a list
takes the nearest of its bidders, ties to the lower id, until it is full.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


def balanced_place(rows: F64, ids: I64, centroids: F64, capacity: int) -> I64:
    """List [n] of each row [n, d]; no list has more than `capacity`."""
    labels = np.full(len(rows), -1, np.int64)
    room = [capacity] * len(centroids)
    while (labels < 0).any():
        bids: dict[int, list[tuple[float, int, int]]] = {}
        for row in np.flatnonzero(labels < 0).tolist():
            apart = [
                (float(((rows[row] - centre) ** 2).sum()), number)
                for number, centre in enumerate(centroids)
                if room[number]
            ]
            distance, number = min(apart)
            bids.setdefault(number, []).append((distance, int(ids[row]), row))
        for number, bidders in bids.items():
            for _, _, taken in sorted(bidders)[: room[number]]:
                labels[taken] = number
            room[number] -= min(len(bidders), room[number])
    return labels
