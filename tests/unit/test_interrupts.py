"""Ctrl-C at any moment of a `fabric` process: one sentence at most, exit code 130, never a trace.

Each moment is a program that says where it is and then waits for the signal, so nothing depends on speed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fabric_pipelines import interrupts

TREE = Path(__file__).parents[2]
HERE = "sys.stdout.write('here\\n'); sys.stdout.flush(); time.sleep(600)\n"
HEAD = "import sys, time\nfrom fabric_pipelines.interrupts import CTRL_C\nCTRL_C.install()\n"
UNWINDS = (
    HEAD
    + "CTRL_C.begin()\n"
    + f"try:\n  {HERE}"
    + "except KeyboardInterrupt:\n  {}\n"
)  # fmt: skip


def interrupted(
    *command: str, times: int = 1, path: Path = TREE, at: str = "here\n", ignored: bool = False
) -> tuple[int, str, str]:
    """Exit code, what stood on stdout beside the `here` lines, and stderr; one SIGINT at each line `at`."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if ignored else None
    try:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(path), str(TREE)))},
        )
    finally:
        if ignored:
            signal.signal(signal.SIGINT, before)
    assert process.stdout is not None
    for _ in range(times):
        assert process.stdout.readline() == at
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_while_the_program_loads_it_is_one_sentence(tmp_path: Path, package: str) -> None:
    """A package on the path that stops in its import stands for a slow disk."""
    (tmp_path / f"{package}.py").write_text(f"import sys, time\n{HERE}")
    command = ("-m", "fabric_pipelines", "models", "pull", "all-minilm-l6-v2")
    assert interrupted(*command, path=tmp_path) == (130, "", f"{interrupts.BEFORE}\n")


def test_the_installed_command_starts_where_the_handler_is_set() -> None:
    content = (TREE / "pyproject.toml").read_text()
    assert '\nfabric = "fabric_pipelines.__main__:main"\n' in content


def test_what_a_command_imports_first_is_still_before_its_work(tmp_path: Path) -> None:
    (tmp_path / "dagster.py").write_text(f"import sys, time\n{HERE}")
    command = ("-m", "fabric_pipelines", "--home", str(tmp_path / "home"), "quickstart")
    assert interrupted(*command, path=tmp_path) == (130, "", f"{interrupts.BEFORE}\n")
    assert not (tmp_path / "home").exists()


def test_the_first_one_unwinds_a_command_and_the_second_does_not_wait() -> None:
    program = UNWINDS.format(HERE)
    assert interrupted("-c", program, times=2) == (130, "", f"{interrupts.AT_ONCE}\n")


def test_the_second_one_lets_go_of_what_outlives_the_process_even_if_that_fails() -> None:
    program = (
        HEAD
        + "CTRL_C.begin()\n"
        + "def fails(): raise OSError('gone')\n"
        + "def tells(): sys.stdout.write('let go\\n'); sys.stdout.flush()\n"
        + "try:\n"
        + "  with CTRL_C.letting_go(fails), CTRL_C.letting_go(tells):\n"
        + f"    try: {HERE}"
        + f"    except KeyboardInterrupt: {HERE}"
        + "finally: sys.stdout.write('unwound')\n"
    )
    assert interrupted("-c", program, times=2) == (130, "let go\n", f"{interrupts.AT_ONCE}\n")


def test_whoever_was_told_how_it_ended_is_told_nothing_more() -> None:
    program = UNWINDS.format("CTRL_C.told(); sys.stderr.write('stopped\\n'); " + HERE)
    assert interrupted("-c", program, times=2) == (130, "", "stopped\n")


def test_when_all_is_done_the_output_is_whole() -> None:
    program = (
        HEAD
        + "import os\n"
        + "CTRL_C.begin()\n"
        + "sys.stdout.write('result ')\n"
        + "CTRL_C.over()\n"
        + "os.write(1, b'here\\n')\n"  # past the stream: what it still holds would be lost
        + "time.sleep(600)\n"
    )
    found = interrupted("-c", program, at="result here\n")
    assert found == (130, "", f"{interrupts.AFTER}\n")


def test_the_interpreters_end_is_too_late_to_change_the_exit_code() -> None:
    """What the interpreter frees last runs after its signal handlers are gone."""
    program = (
        HEAD
        + "import os, signal\n"
        + "class Last:\n"
        + "  def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT, write=os.write):\n"
        + "    kill(pid, number)\n"
        + "    write(1, b'alive')\n"
        + "sys.last = Last()\n"
        + "sys.exit(7)\n"
    )
    assert interrupted("-c", program, times=0) == (7, "alive", "")


def test_an_ignored_interrupt_stays_ignored() -> None:
    program = HEAD + "import signal\nsys.stdout.write(str(signal.getsignal(signal.SIGINT)))\n"
    code, out, _ = interrupted("-c", program, times=0, ignored=True)
    assert (code, out) == (0, "1")
