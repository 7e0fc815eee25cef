"""Postgres: the one that settings name, or the embedded one."""

from __future__ import annotations

from fabric_pipelines.dataplane import staleness
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.staleness import Staleness
from resources.fabric import FabricResource


class DatabaseResource(FabricResource):
    def of(self) -> Database:
        """A database by URL; it opens a connection for each piece of work and holds none."""
        return Database.of(self.settings())

    def staleness(self, shard: str | None = None) -> list[Staleness]:
        """The database's verdict on every shard, or on one."""
        return staleness.staleness(self.of(), shard)
