"""The supervisor with real processes: tiny scripts stand where broker and workers do in a fabric."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from fabric_pipelines import supervise
from fabric_pipelines.errors import AlreadyRunning, StartFailed
from fabric_pipelines.settings import Settings, load
from fabric_pipelines.supervise import (
    Backoff,
    ProcessSpec,
    ProcessState,
    Ready,
    child,
    control,
    supervisor,
)
from fabric_pipelines.supervise.ground import forget_words
from fabric_pipelines.supervise.orphans import marked
from fabric_pipelines.supervise.place import Place
from tests.support import send

SAYS_READY = Ready(log_pattern=r"^ready: ")
STAY = "import time; print('ready: here', flush=True); time.sleep(600)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + STAY


def script(name: str, code: str = STAY, **options: object) -> ProcessSpec:
    options = {"ready": SAYS_READY, "stop_timeout_s": 5.0, **options}
    return ProcessSpec(name, (sys.executable, "-S", "-E", "-c", code), **options)  # type: ignore[arg-type]


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    made = load({"home": tmp_path / "home"}, environ={}, folder=tmp_path)
    yield made
    supervise.down(made)
    assert left_over(made) == []
    forget_words(Place.of(made))
    shutil.rmtree(made.runtime_dir, ignore_errors=True)


def start(settings: Settings, *table: ProcessSpec) -> supervise.UpReport:
    return supervise.up(settings, table=table, say=lambda line: None)


def left_over(settings: Settings) -> list[int]:
    return [process.pid for process in marked(Place.of(settings).mark)]


def process(settings: Settings, name: str) -> ProcessState:
    return next(item for item in supervise.state(settings).processes if item.name == name)


def eventually(holds: Callable[[], bool], within_s: float = 60.0) -> None:
    started_s = time.monotonic()
    while not holds():
        assert time.monotonic() - started_s < within_s, "did not happen in time"
        time.sleep(0.01)


def gone(pid: int | None) -> bool:
    assert pid is not None
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_up_returns_when_all_run_and_down_leaves_nothing(settings: Settings) -> None:
    lines: list[str] = []
    table = [script("first"), script("second", depends_on=("first",))]
    report = supervise.up(settings, table=table, say=lines.append)
    assert [item.state for item in report.processes] == ["running", "running"]
    shown = supervise.state(settings)
    assert shown.running
    assert shown.pid == report.pid
    assert "ready: here" in Path(process(settings, "second").log).read_text()
    assert any(line.startswith("second running") for line in lines)
    pids = [item.pid for item in shown.processes]
    assert supervise.down(settings) == ("first", "second")
    assert all(gone(pid) for pid in [*pids, report.pid])
    assert supervise.state(settings) == supervise.SupervisorState(False, None, "", ())
    assert supervise.down(settings) == ()


def test_a_second_up_is_refused_and_says_who_runs(settings: Settings) -> None:
    report = start(settings, script("only"))
    with pytest.raises(AlreadyRunning, match=f"already running, pid {report.pid}"):
        start(settings, script("only"))
    assert process(settings, "only").state == "running"


def test_a_crashed_process_is_started_again_almost_at_once(settings: Settings) -> None:
    start(settings, script("a"), script("b"))
    before = process(settings, "a")
    untouched = process(settings, "b").pid
    send(before.pid)
    eventually(lambda: runs_again(settings, "a", before.pid))
    after = process(settings, "a")
    said = Place.of(settings).own_log.read_text()
    assert "a ended (signal 9 (SIGKILL)); next start in 0.1 s" in said
    assert (after.restarts, after.last_exit) == (1, "signal 9 (SIGKILL)")
    assert process(settings, "b").pid == untouched


def test_five_kills_in_a_row_are_five_restarts(settings: Settings) -> None:
    start(settings, script("a", backoff=Backoff(first_s=0.02)))
    for kills in range(1, 6):
        pid = process(settings, "a").pid
        send(pid)
        eventually(lambda pid=pid: runs_again(settings, "a", pid))  # type: ignore[misc]
        assert process(settings, "a").restarts == kills


def test_killing_the_supervisor_ends_its_processes_and_the_next_up_works(
    settings: Settings,
) -> None:
    report = start(settings, script("a"), script("b", depends_on=("a",)))
    send(report.pid)
    eventually(lambda: all(gone(item.pid) for item in report.processes))
    eventually(lambda: not supervise.state(settings).running)
    assert [item.state for item in supervise.state(settings).processes] == ["stopped", "stopped"]
    again = start(settings, script("a"))
    assert again.pid != report.pid
    assert [item.name for item in again.processes] == ["a"]


def test_what_outlives_a_killed_supervisor_is_ended_by_the_next_up(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "ORPHAN_GRACE_S", 0.5)
    grandchild = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-E', '-c', "
        "'import time; time.sleep(600)'], start_new_session=True); "
    )
    report = start(settings, script("deaf", DEAF), script("parent", grandchild + STAY))
    send(report.pid)
    eventually(lambda: gone(process_of(report, "parent").pid))
    left = left_over(settings)
    assert len(left) == 2
    again = start(settings, script("a"))
    assert not set(left) & set(left_over(settings))
    assert process_of(again, "a").state == "running"


def process_of(report: supervise.UpReport, name: str) -> ProcessState:
    return next(item for item in report.processes if item.name == name)


def test_a_process_that_cannot_start_is_named_with_its_last_log_lines(settings: Settings) -> None:
    broken = script("broken", "import sys; print('the disk is on fire'); sys.exit(3)")
    with pytest.raises(StartFailed, match=r"broken did not start \(exit code 3: ") as caught:
        start(settings, script("a"), broken)
    assert "the disk is on fire" in str(caught.value)
    assert not supervise.state(settings).running
    assert left_over(settings) == []


def test_a_refusal_or_a_missing_program_is_not_tried_again(settings: Settings) -> None:
    with pytest.raises(StartFailed, match="exit code 4"):
        start(settings, script("refused", "import sys; sys.exit(4)", backoff=Backoff(first_s=60)))
    with pytest.raises(StartFailed, match="No such file"):
        start(settings, ProcessSpec("absent", ("/no/such/program",)))


def test_a_process_that_never_gets_ready_is_given_up_by_up(settings: Settings) -> None:
    mute = script("mute", "import time; time.sleep(600)", ready_timeout_s=0.3)
    with pytest.raises(StartFailed, match="not ready within"):
        start(settings, mute)


WAITS = """
import sys, time
from pathlib import Path
from fabric_pipelines.waits import Waits
with Waits(Path(sys.argv[1]), "x") as waits:
    waits.tell("no Postgres answers")
    while not Path(sys.argv[2]).exists():
        time.sleep(0.01)
print("ready: here", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("foreground", [False, True])
def test_what_a_starting_process_waits_for_is_said_while_it_waits(
    settings: Settings, tmp_path: Path, foreground: bool
) -> None:
    lines: list[str] = []
    healed = tmp_path / "healed"

    def say(line: str) -> None:
        lines.append(line)
        if line == "completion waits: no Postgres answers":
            healed.touch()
        if foreground and line == "completion is running":
            # To this thread: threads that other tests left behind would take what is meant for the process.
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    argv = (sys.executable, "-c", WAITS, str(settings.waits_dir), str(healed))
    spec = ProcessSpec("completion", argv, ready=SAYS_READY, stop_timeout_s=5.0)
    supervise.up(settings, table=[spec], say=say, foreground=foreground)
    assert lines.count("completion waits: no Postgres answers") == 1


def test_lines_about_a_wait_go_where_they_are_asked_to(settings: Settings, tmp_path: Path) -> None:
    lines: list[str] = []
    healed = tmp_path / "healed"

    def on_wait(line: str) -> None:
        lines.append(line)
        healed.touch()

    argv = (sys.executable, "-c", WAITS, str(settings.waits_dir), str(healed))
    spec = ProcessSpec("completion", argv, ready=SAYS_READY, stop_timeout_s=5.0)
    others: list[str] = []
    supervise.up(settings, table=[spec], say=others.append, on_wait=on_wait)
    assert lines == ["completion waits: no Postgres answers"]
    assert not [line for line in others if "waits" in line]


def test_who_started_what_runs_is_kept_and_told_to_a_second_up(settings: Settings) -> None:
    supervise.up(settings, table=[script("a")], say=lambda line: None, started_by="quickstart")
    assert supervise.state(settings).started_by == "quickstart"
    with pytest.raises(AlreadyRunning, match=r"started by `fabric quickstart`: stop it with"):
        start(settings, script("a"))
    supervise.down(settings)
    start(settings, script("a"))
    assert supervise.state(settings).started_by == ""


def test_joining_what_another_started_waits_until_it_runs(settings: Settings) -> None:
    report = start(settings, script("a"))
    joined = supervise.join(settings, on_wait=lambda line: None)
    assert (joined.pid, joined.processes) == (report.pid, report.processes)
    supervise.down(settings)
    with pytest.raises(StartFailed, match="the supervisor ended"):
        supervise.join(settings, on_wait=lambda line: None)


def test_processes_stop_in_reverse_order_of_their_dependencies(
    settings: Settings, tmp_path: Path
) -> None:
    ends = tmp_path / "ends"
    code = (
        "import signal, sys, time\n"
        "def end(*_):\n"
        "    open(sys.argv[1], 'a').write(sys.argv[2] + ' ')\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('ready: here', flush=True)\n"
        "time.sleep(600)\n"
    )

    def writer(name: str, *depends_on: str) -> ProcessSpec:
        argv = (sys.executable, "-S", "-E", "-c", code, str(ends), name)
        return ProcessSpec(name, argv, ready=SAYS_READY, depends_on=depends_on)

    start(settings, writer("worker", "broker"), writer("broker", "store"), writer("store"))
    supervise.down(settings)
    assert ends.read_text().split() == ["worker", "broker", "store"]


def test_a_process_deaf_to_its_stop_signal_is_killed_after_its_time(settings: Settings) -> None:
    start(settings, script("deaf", DEAF, stop_timeout_s=0.3))
    pid = process(settings, "deaf").pid
    supervise.down(settings)
    assert gone(pid)


def test_an_ignored_interrupt_is_not_inherited(settings: Settings) -> None:
    code = "import signal; print(signal.getsignal(signal.SIGINT)); " + STAY
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        start(settings, script("a", code))
    finally:
        signal.signal(signal.SIGINT, before)
    assert "default_int_handler" in Path(process(settings, "a").log).read_text()


def test_in_the_foreground_an_interrupt_stops_everything(settings: Settings) -> None:
    code = (
        "import sys\n"
        "from fabric_pipelines import supervise, settings\n"
        "spec = supervise.ProcessSpec('a', (sys.executable, '-S', '-c', 'import time; time.sleep(600)'))\n"
        "supervise.up(settings.load(), foreground=True, table=[spec])\n"
        "print('back')\n"
    )
    environment = {**os.environ, **settings.as_environment()}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE
    ) as attached:
        eventually(lambda: supervise.state(settings).all_running)
        assert supervise.state(settings).pid == attached.pid
        attached.send_signal(signal.SIGINT)
        output, _ = attached.communicate(timeout=90)
    assert output == b"back\n"
    assert attached.returncode == 0


CODE_SERVER = "import signal, time; signal.signal(signal.SIGTERM, {}); time.sleep(600)"
PARENT = """
import subprocess, sys, time
for own_session in (False, True):
    subprocess.Popen([sys.executable, '-S', '-E', '-c', {!r}], start_new_session=own_session)
print('ready: here', flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("answer", ["signal.SIG_DFL", "signal.SIG_IGN"])
def test_what_a_killed_process_had_started_ends_before_it_starts_again(
    settings: Settings, answer: str
) -> None:
    """Dagster's code server under a webserver that was killed: in its session or not, willing or not."""
    parent = PARENT.format(CODE_SERVER.format(answer))
    report = start(settings, script("web", parent, left_grace_s=0.2), script("other"))
    before = process_of(report, "web").pid
    old = [item.pid for item in psutil.Process(before).children()]
    assert len(old) == 2
    send(before)
    eventually(lambda: runs_again(settings, "web", before))
    assert all(gone(pid) for pid in old), "it was started beside what the last one had left"
    new = psutil.Process(process(settings, "web").pid).children()
    assert len(new) == 2
    for item in new:
        item.kill()  # `down` would wait for the deaf ones
    assert process(settings, "other") == process_of(report, "other")
    said = Place.of(settings).own_log.read_text()
    assert "web ended (signal 9 (SIGKILL)) with 2 processes that it had started" in said


def runs_again(settings: Settings, name: str, before: int | None) -> bool:
    now = process(
        settings, name
    )  # read once: between two reads it may be between two lives, without a pid
    return now.state == "running" and now.pid != before


@pytest.mark.parametrize("target", [".", "run/supervisor.lock", "journal", "journal/segment"])
def test_a_home_deleted_under_a_fabric_stops_it_and_the_next_command_says_so(
    settings: Settings, target: str
) -> None:
    (settings.home / "journal").mkdir(parents=True)
    (settings.home / "journal" / "segment").write_bytes(b"x")
    kind = DEAF if target == "journal" else STAY
    report = start(settings, script("a"), script("b", kind, stop_timeout_s=600))
    path = settings.home / target
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    send(report.pid, signal.SIGCHLD)  # stands for its heartbeat of IDLE_S seconds
    eventually(lambda: all(gone(pid) for pid in pids_of(report)))
    assert settings.home.exists() == (target != "."), "what was deleted came back"
    named = path.parent if target == "journal/segment" else path
    sentence = f"{named.resolve()} was deleted or replaced while the fabric ran"
    assert supervise.fallen(settings).startswith(sentence)
    lines: list[str] = []
    supervise.up(settings, table=[script("a")], say=lines.append)
    assert lines[0].startswith(sentence)
    assert supervise.fallen(settings) == ""


def pids_of(report: supervise.UpReport) -> list[int | None]:
    return [report.pid, *(item.pid for item in report.processes)]


def test_the_heartbeat_alone_notices_a_deleted_home(settings: Settings) -> None:
    report = start(settings, script("a"))
    shutil.rmtree(settings.home)
    eventually(lambda: all(gone(pid) for pid in pids_of(report)), within_s=supervisor.IDLE_S + 20)
    assert not settings.home.exists()


def test_a_fabric_that_took_over_a_lost_home_is_left_alone(settings: Settings) -> None:
    first = start(settings, script("a"))
    shutil.rmtree(settings.home)
    second = start(settings, script("a"))  # before the first one's heartbeat
    eventually(lambda: gone(first.pid))
    assert process(settings, "a") == process_of(second, "a")
    assert not gone(process_of(second, "a").pid)


def test_a_deleted_folder_of_logs_is_made_again_at_the_next_start(settings: Settings) -> None:
    before = process_of(start(settings, script("a")), "a").pid
    shutil.rmtree(settings.log_dir)
    send(before)
    eventually(lambda: runs_again(settings, "a", before))
    assert "\nready: here" in text(settings, "a")


def test_in_the_foreground_a_second_interrupt_kills_what_does_not_stop(settings: Settings) -> None:
    code = (
        "import sys\n"
        "from fabric_pipelines import supervise, settings\n"
        "from fabric_pipelines.errors import Interrupted\n"
        f"argv = (sys.executable, '-S', '-c', {DEAF!r})\n"
        "specs = [supervise.ProcessSpec(n, argv, stop_timeout_s=600) for n in 'ab']\n"
        "try: supervise.up(settings.load(), foreground=True, table=specs)\n"
        "except Interrupted as said: print(said)\n"
    )
    environment = {**os.environ, **settings.as_environment()}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
    ) as attached:
        eventually(lambda: all("\nready: here" in text(settings, name) for name in "ab"))
        pids = [item.pid for item in supervise.state(settings).processes]
        attached.send_signal(signal.SIGINT)
        eventually(lambda: process(settings, "a").state == "stopping")
        attached.send_signal(signal.SIGINT)
        output, _ = attached.communicate(timeout=90)
    assert output.startswith("stopped at once: what ran was killed")
    assert output.count("\n") == 1
    assert all(gone(pid) for pid in pids)


def text(settings: Settings, name: str) -> str:
    log = Place.of(settings).log_of(name)
    return log.read_text() if log.exists() else ""


def test_what_a_refused_process_said_is_told_though_it_was_started_again_meanwhile(
    tmp_path: Path,
) -> None:
    """On a busy machine `up` looks only after the next start has begun a new chapter of the log."""
    once = tmp_path / "once"
    code = (
        "import pathlib, sys, time\n"
        f"if pathlib.Path({str(once)!r}).exists(): time.sleep(600)\n"
        f"pathlib.Path({str(once)!r}).touch()\n"
        "print('UsageError: this is what it said')\n"
        "sys.exit(2)\n"
    )
    lines: list[str] = []
    refused = child.Child(script("a", code), tmp_path / "a.log", dict(os.environ), lines.append)
    refused.start(0.0)
    eventually(lambda: refused.step(1.0) is None and bool(refused.start_fault))
    eventually(lambda: refused.step(1e6) is None and refused.state == "starting")
    told = control._start_failed(refused.described())
    refused.kill()
    eventually(refused.reaped)
    assert str(told) == "a did not start: this is what it said"
    assert told.exit_code == 2
