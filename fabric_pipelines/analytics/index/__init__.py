"""Search over rows in memory that come and go: exact, inverted file, lattice, behind one door."""

from fabric_pipelines.analytics.index.door import (
    Exact,
    Faiss,
    Inverted,
    Kind,
    Lattice,
    Stats,
    VectorIndex,
)
from fabric_pipelines.analytics.index.quality import Point, Quality
from fabric_pipelines.analytics.index.space import Answer
from fabric_pipelines.analytics.index.traffic import SearchHealth

__all__ = [
    "Answer",
    "Exact",
    "Faiss",
    "Inverted",
    "Kind",
    "Lattice",
    "Point",
    "Quality",
    "SearchHealth",
    "Stats",
    "VectorIndex",
]
