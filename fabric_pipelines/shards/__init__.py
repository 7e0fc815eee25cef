"""Shards: vectors, ids and columns of one index as immutable generations, built, opened, searched, scrubbed."""

from fabric_pipelines.shards.building import build, janitor
from fabric_pipelines.shards.difference import Difference
from fabric_pipelines.shards.generation import Generation
from fabric_pipelines.shards.scrub import ScrubReport, scrub
from fabric_pipelines.shards.shard import Shard, open_generation, open_shard

__all__ = [
    "Difference",
    "Generation",
    "ScrubReport",
    "Shard",
    "build",
    "janitor",
    "open_generation",
    "open_shard",
    "scrub",
]
