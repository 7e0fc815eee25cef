"""`fabric quickstart`: the whole loop once, on this machine, and what came of it on one screen.

Models, then services (only if none run; what it started it stops), then one Dagster run on the persistent
instance that submits every workload before it waits for any, then the receipt verified once more from
outside. Running it again submits nothing twice: ids follow from content, so the broker already has all of it.

Sizes: 48 generations of at most 32 tokens, 160 probe statements, 48 verses for hidden states (6 of each of 8
books), 800 verses for embeddings; about 30,000 tokens in, 1,500 out. They are the defaults of the workloads'
requests, so the same run is what the UI offers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from assets.automation import RANGE_END, RANGE_START
from assets.flow import WAIT_TAG
from fabric_pipelines.workloads.corpus import BOOKS

POLL_S = 0.5
SAMPLES = 10
RUN_TAGS = {
    WAIT_TAG: "true",
    RANGE_START: BOOKS[0],
    RANGE_END: BOOKS[-1],
    "fabric/run": "quickstart",
}


@dataclass(frozen=True, slots=True)
class QuickstartReport:
    """What happened. tokens_per_s: of retired tasks, prompt and output together, from the first task's start to
    the last one's end; padding_waste: share of padded tokens among all that engines computed on;
    seconds: wall time without model_pull_seconds."""

    tasks: int
    retired: int
    dead: int
    balance: int
    tokens_in: int
    tokens_out: int
    rows_landed: int
    vectors: int
    receipt_id: str
    receipt_ok: bool
    recall_at_10: float
    seconds: float
    tokens_per_s: float
    padding_waste: float
    model_pull_seconds: float
    verifier_pass_rate: float
    probe_accuracy: float
    samples: Sequence[Mapping[str, str]]
    paths: Mapping[str, str]
    run_id: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
