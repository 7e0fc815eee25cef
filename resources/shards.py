"""Vector shards of this fabric, and the receipts that prove them."""

from __future__ import annotations

from pathlib import Path

from resources.fabric import FabricResource


class ShardsResource(FabricResource):
    @property
    def root(self) -> Path:
        return self.settings().shards_dir
