"""Postgres: the one that settings name, or the embedded one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fabric_pipelines.dataplane.database import Database, database_url
from resources.fabric import FabricResource


class DatabaseResource(FabricResource):
    @contextmanager
    def open(self) -> Iterator[Database]:
        yield Database(database_url(self.settings()))
