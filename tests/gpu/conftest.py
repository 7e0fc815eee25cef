"""One card for all GPU tests, and an account of what truly ran on it.

Without a card the tests skip and say why; FABRIC_REQUIRE_GPU=1 turns that into a failure, also when not one
of them passed. FABRIC_GPU_REPORT=path writes device, cubin digests, launches and outcomes as JSON.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fabric_pipelines.device.cubins import read_manifest
from fabric_pipelines.device.gpu import Gpu
from fabric_pipelines.errors import DeviceRefused, MissingDependency

REQUIRED = os.environ.get("FABRIC_REQUIRE_GPU") == "1"
OUTCOMES: Counter[str] = Counter()
CARD: dict[str, object] = {}
LAUNCHES: Counter[str] = Counter()


@pytest.fixture(scope="session")
def gpu() -> Iterator[Gpu]:
    try:
        card = Gpu()
    except (DeviceRefused, MissingDependency) as fault:
        if REQUIRED:
            pytest.fail(f"FABRIC_REQUIRE_GPU=1, and there is no usable card: {fault}")
        pytest.skip(str(fault))
    CARD.update(card.identity.as_json())
    with card:
        yield card
    LAUNCHES.update(card.launches)


def _is_gpu_test(nodeid: str) -> bool:
    return "tests/gpu/" in nodeid


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not _is_gpu_test(report.nodeid):
        return
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        OUTCOMES[report.outcome] += 1


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if REQUIRED and OUTCOMES["passed"] == 0 and session.testscollected:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    path = os.environ.get("FABRIC_GPU_REPORT")
    if path:
        Path(path).write_text(json.dumps(_account(), indent=1) + "\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    account = _account()
    launched = sum(LAUNCHES.values())
    terminalreporter.write_line(
        f"gpu: {OUTCOMES['passed']} passed, {OUTCOMES['failed']} failed, {OUTCOMES['skipped']} skipped "
        f"on {CARD.get('name', 'no card')}; {launched} launches of {len(LAUNCHES)} kernels"
    )
    for name, count in account["launches"].items():  # type: ignore[attr-defined]
        terminalreporter.write_line(f"gpu:   {name:<24}{count:>8}")


def _account() -> dict[str, object]:
    arch = CARD.get("architecture")
    digests = {c.family: c.sha256 for c in read_manifest().cubins if c.arch == arch}
    return {
        "device": dict(CARD),
        "cubins": digests,
        "outcomes": dict(OUTCOMES),
        "launches": dict(sorted(LAUNCHES.items())),
    }
