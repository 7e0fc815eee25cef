"""Receipts: issued for a published generation, verified to the last byte, rebuilt to prove it equal."""

from fabric_pipelines.receipts.comparing import Diff, diff
from fabric_pipelines.receipts.issuing import issue
from fabric_pipelines.receipts.quality import measure as measure_quality
from fabric_pipelines.receipts.rebuilding import Rebuild, Verdict, rebuild
from fabric_pipelines.receipts.verification import Verification, verify

__all__ = [
    "Diff",
    "Rebuild",
    "Verdict",
    "Verification",
    "diff",
    "issue",
    "measure_quality",
    "rebuild",
    "verify",
]
