"""Shards: vectors, ids and columns of one index as immutable generations, built, opened, searched, scrubbed."""

from fabric_pipelines.shards.building import build, janitor
from fabric_pipelines.shards.difference import Difference
from fabric_pipelines.shards.generation import Generation
from fabric_pipelines.shards.recall import Recall, recall_of
from fabric_pipelines.shards.renewal import Audit, Refreshed, audit, refresh
from fabric_pipelines.shards.scrub import ScrubReport, scrub
from fabric_pipelines.shards.shard import Shard, open_generation, open_shard
from fabric_pipelines.shards.upkeep import build_if_moved

__all__ = [
    "Audit",
    "Difference",
    "Generation",
    "Recall",
    "Refreshed",
    "ScrubReport",
    "Shard",
    "audit",
    "build",
    "build_if_moved",
    "janitor",
    "open_generation",
    "open_shard",
    "recall_of",
    "refresh",
    "scrub",
]
