"""Receipts: issued for a published generation, verified to the last byte, rebuilt to prove it equal."""

from fabric_pipelines.receipts.comparing import Diff, diff
from fabric_pipelines.receipts.rebuilding import Rebuild, Verdict, rebuild
from fabric_pipelines.receipts.verification import Verification, verify
from fabric_pipelines.shards.issuing import issue, issue_late
from fabric_pipelines.shards.quality import measure as measure_quality

__all__ = [
    "Diff",
    "Rebuild",
    "Verdict",
    "Verification",
    "diff",
    "issue",
    "issue_late",
    "measure_quality",
    "rebuild",
    "verify",
]
