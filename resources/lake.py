"""The lake: Parquet under a content address, in a folder or an S3 bucket."""

from __future__ import annotations

import pyarrow as pa
from fabric_pipelines.dataplane.lake import Artifact, Lake

from resources.fabric import FabricResource


class LakeResource(FabricResource):
    def put(self, name: str, table: pa.Table) -> Artifact:
        return Lake(self.settings().lake_url).put(name, table)

    def table(self, uri: str) -> pa.Table:
        return Lake(self.settings().lake_url).read(uri)
