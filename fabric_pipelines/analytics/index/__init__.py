"""Search over rows in memory that come and go: exact, inverted file, lattice, faiss's and cuVS's indexes, behind one door."""

from fabric_pipelines.analytics.index.door import Stats, VectorIndex
from fabric_pipelines.analytics.index.kinds import (
    Cagra,
    Exact,
    Faiss,
    Inverted,
    IvfPq,
    Kind,
    Lattice,
)
from fabric_pipelines.analytics.index.quality import Point, Quality, RecallShort
from fabric_pipelines.analytics.index.space import Answer
from fabric_pipelines.analytics.index.traffic import SearchHealth

__all__ = [
    "Answer",
    "Cagra",
    "Exact",
    "Faiss",
    "Inverted",
    "IvfPq",
    "Kind",
    "Lattice",
    "Point",
    "Quality",
    "RecallShort",
    "SearchHealth",
    "Stats",
    "VectorIndex",
]
