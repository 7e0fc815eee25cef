"""Vector shards of this fabric: where they lie, and how one is opened."""

from __future__ import annotations

from pathlib import Path

from fabric_pipelines.analytics.rules import RuleTable, load
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.shards import Shard, open_shard
from resources.fabric import FabricResource


class ShardsResource(FabricResource):
    @property
    def root(self) -> Path:
        return self.settings().shards_dir

    @property
    def kept(self) -> int:
        """How many of the newest generations of a shard keep their bytes."""
        return self.settings().shard_generations_kept

    def rules(self) -> RuleTable:
        """The rule table that clusters are judged by. SettingsError for a bad one."""
        given = self.settings().health_rules
        return load(Path(given) if given else None)

    def open(
        self, database: Database, name: str, generation: int | None = None, *, device: str = "cpu"
    ) -> Shard:
        """A reader of one generation; use it as a context manager."""
        return open_shard(database, self.root, name, generation, device=device)
