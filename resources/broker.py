"""The broker, as a producer sees it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import Field

from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.broker.keeper import keeper_of
from fabric_pipelines.broker.patience import Patience
from fabric_pipelines.broker.replies import BrokerStatus, SubmissionState
from fabric_pipelines.workloads.request import Prepared
from resources.fabric import FabricResource

LOG = logging.getLogger("fabric.submit")


class BrokerResource(FabricResource):
    """A client a call: made in the process that uses it, never before a fork."""

    timeout_s: float = Field(default=10.0, description="longest wait for one answer")

    @contextmanager
    def client(self) -> Iterator[BrokerClient]:
        settings = self.settings()
        with BrokerClient.of(settings, role="producer", timeout_s=self.timeout_s) as client:
            yield client

    def submit(self, prepared: Prepared) -> SubmissionState:
        """Durable on return; submitting again changes nothing. A broker that is full or away is waited for."""
        settings = self.settings()
        patience = Patience(settings.room_wait_s, LOG.warning, keeper=lambda: keeper_of(settings))
        with self.client() as client:
            return client.submit(prepared.submission, prepared.batches(), patience=patience)

    def submission(self, submission_id: str) -> SubmissionState | None:
        with self.client() as client:
            return client.submission(submission_id)

    def status(self) -> BrokerStatus:
        with self.client() as client:
            return client.status()
