"""Has probed search become worse since the full build? The same questions before and after, and what noise allows.

The rows that are asked are those with the smallest hashes of their ids, so an insert, a delete or a change replaces
that row's question and no other: two generations that share most rows share most questions, and their difference
is as noisy as what moved, not as the sample. New and changed rows are asked as they are now, or a decay that only
they meet would stay unseen.

Recall falls when it is lower by more than DROP_MAX and by more than SIGMAS standard errors of the difference. A
question counts as asked anew, independent of before, when its row is not the same with the same vector or when one
of its K true neighbours, before or after, is not: of a share t of rows that moved, at most min(1, (1 + 2K) t) of the
questions. With n questions and a deviation s of one, the error is s sqrt(2 min(1, (1 + 2K) t) / n): 0.003 for s = 0.2,
1 % moved and 2,000 questions. (Not 2 s sqrt(t / n), as if the ten neighbours were found or missed independently:
docs/rejected.md.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics.search import NO_ID
from fabric_pipelines.ledger import hash64
from fabric_pipelines.shards.shard import Shard

K = 10
QUERIES_MAX, QUERIES_MIN = 2000, 64
PRODUCTS_MAX = 100_000_000_000  # multiplications of one exact search of all questions: some seconds of one core
DROP_MAX = 0.01
SIGMAS = 3.0

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Probed:
    """recall@K of probed against exact search, mean over `questions` live rows; deviation: that of one question;
    renewed: share of the questions that the full build did not hold as they are now."""

    recall: float
    deviation: float
    questions: int
    renewed: float

    @property
    def error(self) -> float:
        """Bound of the standard error of this recall minus that of the full build."""
        anew = min(1.0, (1 + 2 * K) * self.renewed)
        return self.deviation * math.sqrt(2 * anew / self.questions)

    def fell(self, base_recall: float) -> float:
        """By how much, where that is beyond DROP_MAX and noise; else 0."""
        drop = base_recall - self.recall
        return drop if drop > max(DROP_MAX, SIGMAS * self.error) else 0.0


def probed(shard: Shard) -> Probed:
    """Ask the live rows of `shard` with the smallest hashes."""
    ids = shard.stored_ids()
    count = questions(shard.manifest.rows, shard.manifest.dim)
    live = np.flatnonzero(shard.alive)
    places = live[smallest(ids[live], count)]
    if not len(places):
        return Probed(1.0, 0.0, 1, 0.0)
    xq = shard.rows_at(places).vectors
    recall = _recall_of_each(shard.search(xq, K, exact=False).I, shard.search(xq, K).I)
    built = int(
        shard.manifest.offsets()[-1]
    )  # rows of the full build lie before its layers, the dead included
    asked_then = ids[:built][smallest(ids[:built], count)]
    same = (places < built) & np.isin(ids[places], asked_then)
    return Probed(float(recall.mean()), float(recall.std()), len(places), 1 - float(same.mean()))


def as_base(found: Probed) -> str:
    """As manifests and receipts keep it."""
    return f"{found.recall:.4f}"


def questions(rows: int, dim: int) -> int:
    """How many a shard of this size is asked: 2,000, fewer where one exact search would take too long."""
    return min(QUERIES_MAX, max(QUERIES_MIN, PRODUCTS_MAX // max(rows * dim, 1)))


def smallest(ids: Ids, count: int) -> Ids:
    """Places of the `count` ids with the smallest hashes. Of a set without some ids, those of the others stay."""
    keys = hash64(ids)
    if count >= len(keys):
        return np.arange(len(keys), dtype=np.int64)
    return np.argpartition(keys, count)[:count].astype(np.int64)


def _recall_of_each(found: Ids, truth: Ids) -> npt.NDArray[np.float64]:
    hits = ((found[:, :, None] == truth[:, None, :]) & (truth != NO_ID)[:, None, :]).sum((1, 2))
    each: npt.NDArray[np.float64] = hits / np.maximum((truth != NO_ID).sum(1), 1)
    return each
