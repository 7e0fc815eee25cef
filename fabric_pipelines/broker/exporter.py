"""Exporter: the broker's figures for Prometheus, on loopback, asked for at each scrape and kept nowhere.

Every number comes from the owner itself, in one question, so that what is scraped adds up: the states of
`fabric_broker_tasks` balance in every scrape. A broker that is ending answers with `fabric_broker_up 0` alone.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fabric_pipelines.broker.credits import Credits
from fabric_pipelines.broker.desk import Desk, Rank
from fabric_pipelines.broker.replies import BrokerStatus
from fabric_pipelines.errors import FabricError, StorageFailed
from fabric_pipelines.ledger import Ledger

ADDRESS = "127.0.0.1"
PREFIX = "fabric_broker_"
HELP = {
    "enqueued": "Tasks that became durable in this life of the broker.",
    "leases": "Leases given.",
    "leased_tasks": "Tasks in them.",
    "lane_switches": "Leases from another lane than the session's last.",
    "duplicates": "Rows and reports that came again and changed nothing.",
    "late_acks": "Reports of work that had been given to somebody else.",
    "expired": "Tasks whose lease was not renewed.",
    "nacked": "Tasks that were handed back.",
    "claimed": "Tasks that a session still held after a restart.",
    "reusable_tokens": "Prompt tokens leased behind a prompt that they share.",
    "offered_tokens": "Prompt tokens leased.",
    "padded_tokens": "Padding of leased batches.",
    "computed_padded_tokens": "Padding that workers reported.",
    "closed_unproven": "Submissions closed without their fingerprint being compared.",
    "abandoned": "Submissions given up before they were whole.",
    "fsyncs": "Syncs of the journal.",
    "clock_steps_back": "Times that the system's clock stepped back by more than a second.",
}


class Refusals:
    """Requests that ended in an error, by the error's code. Safe in any thread."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def note(self, fault: FabricError) -> None:
        with self._lock:
            self._counts[fault.code] += 1

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


@dataclass(frozen=True, slots=True)
class Door:
    """What the servers of one broker share: memory for uploads, and what they refused."""

    credits: Credits = field(default_factory=Credits)
    refusals: Refusals = field(default_factory=Refusals)


class Figures(Collector):
    def __init__(self, desk: Desk, door: Door) -> None:
        self._desk, self._door = desk, door

    def describe(self) -> list[Metric]:
        """Nothing: to register must not ask the owner."""
        return []

    def collect(self) -> Iterator[Metric]:
        try:
            status, high_water = self._desk.ask(
                lambda owner: (owner.status(), owner.journal_high_water),
                Rank.QUESTION,
                durable=False,
            ).result()
        except FabricError:
            yield _gauge("up", "Whether the broker answers.", 0)
            return
        yield _gauge("up", "Whether the broker answers.", 1)
        yield from _ledger(status.total)
        yield from _journal(status.journal, high_water)
        yield from _state(status)
        for name, count in status.counters.items():
            text = HELP.get(name, f"{name.replace('_', ' ').capitalize()}.")
            yield CounterMetricFamily(PREFIX + name, text, value=count)
        yield from self._at_the_door()

    def _at_the_door(self) -> Iterator[Metric]:
        refused = CounterMetricFamily(
            PREFIX + "refusals", "Requests that ended in an error, by its code.", labels=["code"]
        )
        for code, count in sorted(self._door.refusals.counts().items()):
            refused.add_metric([code], count)
        yield refused
        room = self._door.credits
        yield _gauge("upload_bytes", "Memory of uploads that are not durable yet.", room.held)
        yield _gauge("upload_bytes_max", "Most that it may be.", room.total)


def _ledger(total: Ledger) -> Iterator[Metric]:
    states = [name for name in Ledger.__dataclass_fields__ if name != "enqueued"]
    for unit in ("tasks", "tokens"):
        family = GaugeMetricFamily(
            f"{PREFIX}{unit}", f"Prompt {unit} in the log, by state.", labels=["state"]
        )
        for state in states:
            family.add_metric([state], getattr(getattr(total, state), unit))
        yield family
        value = getattr(total.balance, unit)
        yield _gauge(f"balance_{unit}", "What the states do not add up to; 0, always.", value)


def _journal(journal: dict[str, Any], high_water: int) -> Iterator[Metric]:
    yield _gauge("journal_bytes", "Bytes of the log on this disk.", journal["bytes"])
    yield _gauge("journal_high_water_bytes", "Above it new tasks are refused.", high_water)
    yield _gauge("journal_durable_lsn", "Last frame that is durable.", journal["durable_lsn"])
    yield _gauge(
        "journal_damaged_frames",
        "Frames that scrubbing or a read found.",
        journal["damaged_frames"],
    )
    yield _gauge(
        "journal_withheld_tasks",
        "Tasks whose row or outcome lies in such a frame.",
        journal["withheld_tasks"],
    )
    if "segments" in journal:
        yield _gauge("journal_segments", "Segment files in use.", journal["segments"])


def _state(status: BrokerStatus) -> Iterator[Metric]:
    leased = sum(consumer["leased"] for consumer in status.consumers)
    yield _gauge("consumers", "Sessions that are attached.", len(status.consumers))
    yield _gauge("consumers_leased_tasks", "Open tasks of those.", leased)
    yield _gauge("lanes", "Lanes that were ever opened.", len(status.lanes))
    yield _gauge("submissions", "Submissions that are known.", status.submissions)
    yield _gauge("hold", "1 while nothing is leased because results wait.", int(status.hold))
    yield _gauge("draining", "1 while new tasks are refused for good.", int(status.draining))
    yield _gauge("fault", "1 once leasing stopped for good.", int(bool(status.fault)))


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


@dataclass(frozen=True, slots=True)
class Exporter:
    """The endpoint, until `close`."""

    server: Any
    thread: threading.Thread

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def export(desk: Desk, door: Door, port: int) -> Exporter:
    """Serve http://127.0.0.1:<port>/metrics. StorageFailed if the port is taken."""
    registry = CollectorRegistry()
    registry.register(Figures(desk, door))
    try:
        server, thread = start_http_server(port, addr=ADDRESS, registry=registry)
    except OSError as fault:
        raise StorageFailed(
            f"the broker's metrics cannot be served on {ADDRESS}:{port} ({fault.strerror}): set "
            "FABRIC_METRICS_PORT to a port that is free, or to 0 for none"
        ) from fault
    return Exporter(server, thread)
