"""The lake: Parquet under a content address, in a folder or an S3 bucket, noted in Postgres."""

import pyarrow as pa

from fabric_pipelines.dataplane.lake import Artifact, Lake, record
from resources.database import DatabaseResource
from resources.fabric import FabricResource


class LakeResource(FabricResource):
    database: DatabaseResource

    def put(self, name: str, table: pa.Table) -> Artifact:
        artifact = Lake.of(self.settings()).put(name, table)
        record(self.database.of(), artifact)
        return artifact

    def table(self, uri: str) -> pa.Table:
        """Checked against the digest in its name."""
        return Lake.of(self.settings()).read_table(uri)
