"""One card for all GPU tests, and an account of what truly ran on it; the kernels' sources on the CPU beside it.

Without a card the tests skip and say why; FABRIC_REQUIRE_GPU=1 turns that into a failure, also when not one
of them passed. FABRIC_GPU_REPORT=path writes device, cubin digests, launches and outcomes as JSON. Tests of kernels take
`card` and run twice: on the host stand-in, which needs g++ (CI must have it) and is never counted as a card, and on a card.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fabric_pipelines.device.card import Card
from fabric_pipelines.device.cubins import read_manifest
from fabric_pipelines.device.gpu import Gpu
from fabric_pipelines.errors import DeviceRefused, MissingDependency
from fabric_pipelines.testing.host_gpu import HostGpu

ROOT = Path(__file__).parents[2]
REQUIRED = os.environ.get("FABRIC_REQUIRE_GPU") == "1"
COMPILER_REQUIRED = os.environ.get("FABRIC_REQUIRE_PARITY") == "1"  # set in CI
OUTCOMES: Counter[str] = Counter()
HOST_OUTCOMES: Counter[str] = Counter()
HOST_LAUNCHES: Counter[str] = Counter()
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


@pytest.fixture(scope="session")
def host() -> Iterator[HostGpu]:
    """Compiled once per version of a source, into the build folder that git does not keep."""
    try:
        card = HostGpu(ROOT / "cuda", ROOT / "build" / "host_cuda")
    except MissingDependency as fault:
        if COMPILER_REQUIRED:
            pytest.fail(f"FABRIC_REQUIRE_PARITY=1, and kernels cannot run on the CPU: {fault}")
        pytest.skip(str(fault))
    yield card
    HOST_LAUNCHES.update(card.launches)


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def card(request: pytest.FixtureRequest) -> Card:
    found: Card = request.getfixturevalue("host" if request.param == "host" else "gpu")
    return found


def _counter(nodeid: str) -> Counter[str] | None:
    """Where an outcome counts: a run on the host is none on a card."""
    if "tests/gpu/" not in nodeid:
        return None
    return HOST_OUTCOMES if re.search(r"\[(.*-)?host(-.*)?\]$", nodeid) else OUTCOMES


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    counter = _counter(report.nodeid)
    if counter is None:
        return
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        counter[report.outcome] += 1


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
    terminalreporter.write_line(
        f"host stand-in (no card): {HOST_OUTCOMES['passed']} passed, {HOST_OUTCOMES['failed']} failed, "
        f"{HOST_OUTCOMES['skipped']} skipped; {HOST_LAUNCHES.total()} launches of "
        f"{len(HOST_LAUNCHES)} kernels compiled as C++"
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
