"""What every resource has: the fabric it belongs to."""

from __future__ import annotations

import dagster as dg
from pydantic import Field

from fabric_pipelines.settings import Settings, load


class FabricResource(dg.ConfigurableResource[None]):
    home: str = Field(default="", description="FABRIC_HOME; empty: as settings say")

    def settings(self) -> Settings:
        return load({"home": self.home})
