"""The completion process: `python -m fabric_pipelines.completion`, settings from FABRIC_* and fabric.toml.

Prints one ready line once broker and database know each other. SIGTERM or SIGINT: what is in hand is
landed and retired if the other sides answer, the rest is handed back. A terminal fault ends it with that
error's exit code, and whoever supervises it decides.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import ExitStack
from types import FrameType

from fabric_pipelines import settings as settings_module
from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.completion.account import Account
from fabric_pipelines.completion.receive import Receiver
from fabric_pipelines.completion.text import Decoder
from fabric_pipelines.dataplane.database import Database, database_url
from fabric_pipelines.dataplane.governor import limits_of
from fabric_pipelines.dataplane.lake import Lake
from fabric_pipelines.dataplane.proof import require_landed
from fabric_pipelines.dataplane.valve import Valve
from fabric_pipelines.dataplane.watch import Watch
from fabric_pipelines.dataplane.writer import Writer
from fabric_pipelines.errors import FabricError, as_line, storage_failed
from fabric_pipelines.settings import Settings, make_runtime_folder
from fabric_pipelines.waits import Waits

TICK_S = 0.1


def valve_of(settings: Settings) -> Valve:
    return Valve(
        limits_of(
            floor=settings.write_rate_floor_bytes,
            most=settings.write_rate_most_bytes,
            lag_bytes=settings.replication_lag_bytes,
        )
    )


def database_of(settings: Settings) -> Database:
    return Database(database_url(settings), application="fabric completion")


def receiver_of(settings: Settings, valve: Valve) -> Receiver:
    database = database_of(settings)

    def register(journal_id: str, incarnation: int, retired: int) -> None:
        database.migrate()
        if database.register_incarnation(journal_id, incarnation, retired=retired):
            _say(
                f"journal {journal_id} and database {database.identity.database_id} now know each other"
            )

    decode, lake = Decoder(settings.models), Lake.of(settings)
    # two for bulk, of which the governor may use one or both, and one for what must not wait
    target, *more = (
        Writer(database, decode=decode, lake=lake, elastic=bulk) for bulk in (True, True, False)
    )
    return Receiver(
        open_source=lambda: BrokerClient.of(settings, role="completion"),
        target=target,
        more_targets=more,
        gate=valve,
        elastic=True,
        register=register,
        require_landed=lambda source, journal: require_landed(database, source, journal),
        say=_say,
    )


def run(receiver: Receiver, account: Account, waits: Waits) -> None:
    """Until SIGTERM or SIGINT."""
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGINT, ask)
    ready = False
    try:
        while not asked:
            account.keep()
            pause_s = receiver.step()
            waits.tell(receiver.waits_for)
            if not pause_s and not ready:
                ready = True
                sys.stdout.write(f"completion ready, process {os.getpid()}\n")
                sys.stdout.flush()
            resume_s = time.monotonic() + pause_s
            while not asked and (left_s := resume_s - time.monotonic()) > 0:
                time.sleep(min(left_s, TICK_S))
    finally:
        receiver.close()


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def main() -> int:
    settings = settings_module.load()
    make_runtime_folder(settings.runtime_dir)
    valve = valve_of(settings)
    receiver = receiver_of(settings, valve)
    account = Account(settings, receiver, valve, _say)
    watch = Watch(database_of(settings), valve)
    with ExitStack() as stack:
        stack.callback(account.close)
        stack.callback(watch.close)
        watch.start()
        waits = stack.enter_context(Waits(settings.waits_dir, "completion", say=_say))
        run(receiver, account, waits)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FabricError as problem:
        _say(as_line(problem))
        sys.exit(problem.exit_code)
    except OSError as problem:
        failed = storage_failed(problem)
        _say(as_line(failed))
        sys.exit(failed.exit_code)
