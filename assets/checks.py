"""What must hold before anything downstream may use an asset, and what is worth a warning.

Blocking: nothing was lost (balance), and the receipt verifies. A failed one stops the run before what follows.
Errors: exact search is exact. Warnings: quality, which a person judges.
"""

from typing import Any

import dagster as dg

from assets.lineage import latest, latest_submission, require_latest, results_key
from fabric_pipelines.workloads import synthetic
from fabric_pipelines.workloads.catalogue import WORKLOADS, Workload
from resources.broker import BrokerResource

VERIFIER_PASS_RATE_LEAST = 0.05  # a 135M model answers few puzzles; below this the prompts are broken


def balance_check(workload: Workload) -> dg.AssetChecksDefinition:
    """Tasks in = retired + dead, the broker's ledger is balanced, and every retired task is a landed row."""

    @dg.asset_check(
        asset=results_key(workload.name),
        name="balance",
        blocking=True,
        description="Nothing was lost: tasks = rows landed + dead letters, and the ledger's balance is 0.",
    )
    def balance(context: dg.AssetCheckExecutionContext, broker: BrokerResource) -> dg.AssetCheckResult:
        total = broker.status().total
        off = {name: total[f"balance_{name}"] for name in ("tasks", "tokens", "fingerprint")}
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
            passed=not (any(off.values()) or lost or open_tasks),
            metadata={
                "balance_tasks": off["tasks"],
                "balance_tokens": off["tokens"],
                "balance_fingerprint": str(off["fingerprint"]),
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
    rate = float(require_latest(context.instance, results_key(synthetic.NAME))["verifier_pass_rate"])
    return dg.AssetCheckResult(
        passed=rate >= VERIFIER_PASS_RATE_LEAST,
        severity=dg.AssetCheckSeverity.WARN,
        metadata={"pass_rate": rate, "least": VERIFIER_PASS_RATE_LEAST},
    )


checks: list[Any] = [*(balance_check(workload) for workload in WORKLOADS.values()), verifier_pass_rate]
