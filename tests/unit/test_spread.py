"""Tests spread over processes, one of which dies: the run ends, names the test, and no other test is lost or run again."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFTEST = """
def pytest_xdist_make_scheduler(config, log):
    from tests.support_spread import ByFile
    return ByFile(config, log)
"""
TEST = """
import os
import pytest

@pytest.mark.parametrize("number", range({count}))
def test_one(number):
    with open({journal!r}, "a") as journal:
        print("{name}", number, file=journal)
    if ("{name}", number) in {dying}:
        os.kill(os.getpid(), 11)
"""


@pytest.mark.parametrize(
    "dying",
    [
        {("a", 4)},  # its file done
        {("b", 0)},  # at the start of one
        {("e", 1), ("g", 0)},
        {("h", 0)},  # among the last
    ],
)
def test_a_process_that_dies_costs_the_test_it_ran_and_nothing_else(
    tmp_path: Path, dying: set[tuple[str, int]]
) -> None:
    journal = tmp_path / "journal"
    counts = {"a": 5, "b": 4, "c": 3, "d": 2, "e": 2, "f": 1, "g": 1, "h": 1}
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name, count in counts.items():
        text = TEST.format(count=count, journal=str(journal), name=name, dying=dying)
        (tmp_path / f"test_{name}.py").write_text(text)
    command = [
        sys.executable,
        "-X",
        "faulthandler",
        "-m",
        "pytest",
        "-n",
        "2",
        "-p",
        "no:cacheprovider",
        ".",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, check=False,
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    whole = sorted((name, number) for name, count in counts.items() for number in range(count))
    ran = [line.split() for line in journal.read_text().splitlines()]
    assert sorted((name, int(number)) for name, number in ran) == whole
    assert done.returncode == 1
    for name, number in dying:
        assert re.search(
            rf"crashed while running 'test_{name}.py::test_one\[{number}\]'", done.stdout
        )
    assert f"{len(dying)} failed, {len(whole) - len(dying)} passed" in done.stdout
