"""What must hold before anything downstream may use an asset, and what is worth a warning.

Blocking: nothing was lost (balance), and the receipt verifies. A failed one stops the run before what follows.
Errors: exact search is exact. Warnings: quality, which a person judges.
"""

from typing import Any

import dagster as dg

from assets.indexes import HEALTH_KEY, NEAR_DUPLICATES_KEY, RECALL_AT, RECEIPT_KEY, SHARD, SHARD_KEY
from assets.lineage import latest, latest_submission, require_latest, results_key
from fabric_pipelines import receipts
from fabric_pipelines.analytics.rules import Verdict
from fabric_pipelines.ledger import ZERO
from fabric_pipelines.shards import recall_of
from fabric_pipelines.workloads import synthetic
from fabric_pipelines.workloads.catalogue import WORKLOADS, Workload
from resources.broker import BrokerResource
from resources.database import DatabaseResource
from resources.shards import ShardsResource

VERIFIER_PASS_RATE_LEAST = (
    0.05  # a 135M model answers few puzzles; below this the prompts are broken
)
FOUND_SHARE_LEAST = 0.95
# copies and what is merely odd are told, and stop nobody
ACTS = frozenset(Verdict) - {Verdict.KEEP, Verdict.DEDUPE, Verdict.REVIEW}


def balance_check(workload: Workload) -> dg.AssetChecksDefinition:
    """Tasks in = retired + dead, the broker's ledger is balanced, and every retired task is a landed row."""

    @dg.asset_check(
        asset=results_key(workload.name),
        name="balance",
        blocking=True,
        description="Nothing was lost: tasks = rows landed + dead letters, and the ledger's balance is 0.",
    )
    def balance(
        context: dg.AssetCheckExecutionContext, broker: BrokerResource
    ) -> dg.AssetCheckResult:
        off = broker.status().total.balance
        lost = open_tasks = dead = submissions = 0
        for partition in workload.partitions:
            ref = latest_submission(context.instance, workload.name, partition)
            found = latest(context.instance, results_key(workload.name), partition)
            if ref is None or found is None or found["submission_id"] != ref.submission_id:
                continue
            state = broker.submission(ref.submission_id)
            submissions += 1
            lost += int(found["tasks_lost"])
            dead += 0 if state is None else state.dead
            open_tasks += ref.tasks if state is None else state.tasks - state.retired - state.dead
        return dg.AssetCheckResult(
            passed=off == ZERO and not lost and not open_tasks,
            metadata={
                "balance_tasks": off.tasks,
                "balance_tokens": off.tokens,
                "balance_fingerprint": str(off.fingerprint),
                "tasks_lost": lost,
                "tasks_open": open_tasks,
                "tasks_dead": dead,
                "submissions": submissions,
            },
        )

    return balance


@dg.asset_check(
    asset=results_key(synthetic.NAME),
    description="Share of puzzles that the verifiers accept; a warning, since it is the model's doing.",
)
def verifier_pass_rate(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
    rate = float(
        require_latest(context.instance, results_key(synthetic.NAME))["verifier_pass_rate"]
    )
    return dg.AssetCheckResult(
        passed=rate >= VERIFIER_PASS_RATE_LEAST,
        severity=dg.AssetCheckSeverity.WARN,
        metadata={"pass_rate": rate, "least": VERIFIER_PASS_RATE_LEAST},
    )


@dg.asset_check(
    asset=RECEIPT_KEY,
    blocking=True,
    description="Files, manifest and source still are what the receipt says.",
)
def receipt_verifies(
    context: dg.AssetCheckExecutionContext, database: DatabaseResource, shards: ShardsResource
) -> dg.AssetCheckResult:
    issued = require_latest(context.instance, RECEIPT_KEY)
    verdict = receipts.verify(database.of(), shards.root, issued["receipt_id"])
    return dg.AssetCheckResult(
        passed=verdict.ok,
        metadata={
            "receipt_id": issued["receipt_id"],
            "differences": dg.MetadataValue.json([str(item) for item in verdict.differences]),
        },
    )


@dg.asset_check(
    asset=SHARD_KEY,
    description="Exact search finds what a float64 brute force over the rows in Postgres finds: recall@10 is 1.",
)
def exact_search_is_exact(
    context: dg.AssetCheckExecutionContext, database: DatabaseResource, shards: ShardsResource
) -> dg.AssetCheckResult:
    built = require_latest(context.instance, SHARD_KEY)
    with shards.open(database.of(), SHARD, built["generation"]) as shard:
        found = recall_of(database.of(), shard, RECALL_AT)
    return dg.AssetCheckResult(
        passed=found.recall == 1.0,
        metadata={
            f"recall_at_{RECALL_AT}": found.recall,
            "queries": found.queries,
            "rows": found.rows,
        },
    )


@dg.asset_check(
    asset=NEAR_DUPLICATES_KEY,
    description="Nearly all verses that repeat each other word for word are among each other's neighbours.",
)
def known_near_duplicates_found(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
    found = require_latest(context.instance, NEAR_DUPLICATES_KEY)
    share = float(found["found_share"])
    return dg.AssetCheckResult(
        passed=share >= FOUND_SHARE_LEAST,
        metadata={"found_share": share, "least": FOUND_SHARE_LEAST},
    )


@dg.asset_check(
    asset=HEALTH_KEY,
    description="No list of the shard asks for an act, and every list could be judged; a warning: a person decides.",
)
def lists_are_sound(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
    found = require_latest(context.instance, HEALTH_KEY)
    verdicts = {name: int(count) for name, count in found["verdicts"].items() if count}
    return dg.AssetCheckResult(
        passed=not any(name in verdicts for name in ACTS),
        severity=dg.AssetCheckSeverity.WARN,
        metadata={
            "verdicts": dg.MetadataValue.json(verdicts),
            "decisions": dg.MetadataValue.json(found["decisions"]),
        },
    )


checks: list[Any] = [
    *(balance_check(workload) for workload in WORKLOADS.values()),
    verifier_pass_rate,
    receipt_verifies,
    exact_search_is_exact,
    known_near_duplicates_found,
    lists_are_sound,
]
