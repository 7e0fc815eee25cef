"""Shards: vectors, ids and columns of one index as immutable generations, built, opened, searched, scrubbed."""

from fabric_pipelines.shards.building import build, janitor
from fabric_pipelines.shards.difference import Difference
from fabric_pipelines.shards.generation import Generation
from fabric_pipelines.shards.judging import Judged, judge, record
from fabric_pipelines.shards.neighbours import Neighbour, neighbours
from fabric_pipelines.shards.opening import open_shard
from fabric_pipelines.shards.recall import Recall, recall_of
from fabric_pipelines.shards.renewal import Audit, Refreshed, audit, refresh
from fabric_pipelines.shards.residence import DeviceShard, Residence
from fabric_pipelines.shards.retention import Pruned, pin, prune, unpin
from fabric_pipelines.shards.scrub import ScrubReport, scrub
from fabric_pipelines.shards.shard import Shard, open_generation
from fabric_pipelines.shards.trial import Trial, trial
from fabric_pipelines.shards.upkeep import build_if_moved

__all__ = [
    "Audit",
    "DeviceShard",
    "Difference",
    "Generation",
    "Judged",
    "Neighbour",
    "Pruned",
    "Recall",
    "Refreshed",
    "Residence",
    "ScrubReport",
    "Shard",
    "Trial",
    "audit",
    "build",
    "build_if_moved",
    "janitor",
    "judge",
    "neighbours",
    "open_generation",
    "open_shard",
    "pin",
    "prune",
    "recall_of",
    "record",
    "refresh",
    "scrub",
    "trial",
    "unpin",
]
