"""What has come back: whether a submission is finished, and its landed rows."""

from collections.abc import Callable

import pyarrow as pa
from pydantic import Field

from fabric_pipelines.broker.replies import SubmissionState
from fabric_pipelines.dataplane import results
from resources.broker import BrokerResource
from resources.database import DatabaseResource
from resources.fabric import FabricResource


class CompletionResource(FabricResource):
    broker: BrokerResource
    database: DatabaseResource
    say_every_s: float = Field(
        default=10.0, description="seconds between progress lines of a run that waits; 0: none"
    )
    wait_s: float = Field(default=86_400.0, description="longest wait of a run that waits")

    def state(self, submission_id: str) -> SubmissionState | None:
        return self.broker.submission(submission_id)

    def wait(
        self, submission_id: str, on_progress: Callable[[SubmissionState], None]
    ) -> SubmissionState:
        with self.broker.client() as client:
            return client.wait(submission_id, timeout_s=self.wait_s, on_progress=on_progress)

    def landed(self, function: str, submission_id: str) -> pa.Table:
        """Result rows of one submission, ordered by task id."""
        return results.read(self.database.of(), function=function, submission_id=submission_id)
