"""The broker as a process: kill -9 at any point costs nothing, and nothing is there twice.

A kill shows logic, not durability: the page cache survives it. The crash states of the disk are enumerated in
the journal's own tests.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import pytest

from fabric_pipelines import settings
from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.broker.wire import from_flight_error
from fabric_pipelines.errors import (
    Backpressure,
    BrokerUnavailable,
    CorruptionFound,
    HomeGone,
    NotAttached,
    Refused,
    SchemaError,
    StorageFailed,
    SubmissionConflict,
    TransientError,
    UsageError,
    from_line,
)
from fabric_pipelines.records.submission import Submission
from fabric_pipelines.records.task import column_checksums
from tests.support import eventually
from tests.support_broker import (
    BURIED,
    EMBED,
    LANDED,
    completions,
    ids_of,
    submission_of,
    tasks_of,
)
from tests.support_broker_process import Broker, attach, finish_everything, require_whole

PRODUCER = """
import sys
from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.errors import TransientError
from tests.support_broker import submission_of, tasks_of
batches = [tasks_of([10 + i] * 40, seed=i) for i in range(int(sys.argv[2]))]
while True:
    try:
        with BrokerClient(sys.argv[1], role="producer", timeout_s=5) as client:
            print(client.submit(submission_of(batches, 5), batches).enqueued)
        break
    except TransientError as fault:
        print("again:", fault, file=sys.stderr)
"""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    flags = {"home": tmp_path / "home", "segment_bytes": 1 << 20, "lease_ms": 3_000}
    made = Broker(settings.load(flags, {}, tmp_path))
    made.start()
    yield made
    if made.process is not None:
        made.kill()


@pytest.fixture
def worker(broker: Broker) -> Iterator[BrokerClient]:
    with broker.client("worker", "w") as client:
        attach(client)
        yield client


def submit(broker: Broker, header: Submission, batches: list[pa.RecordBatch]) -> int:
    with broker.client("producer") as client:
        return client.submit(header, batches).enqueued


def test_a_submission_of_another_process_is_there_after_a_kill(broker: Broker) -> None:
    producer = subprocess.run(
        [sys.executable, "-c", PRODUCER, broker.settings.broker_endpoint, "3"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert producer.stdout.split() == ["120"], producer.stderr
    broker.kill()
    broker.start()
    require_whole(broker, 120, finish_everything(broker))


@pytest.mark.parametrize("batches_before_kill", [1, 4, 9])
def test_a_kill_in_the_middle_of_a_submission_loses_and_doubles_nothing(
    broker: Broker, batches_before_kill: int
) -> None:
    batches = [tasks_of([10 + i] * 40, seed=i) for i in range(10)]
    header = submission_of(batches, 1)

    def until_the_kill() -> Iterator[pa.RecordBatch]:
        for i, batch in enumerate(batches):
            if i == batches_before_kill:
                broker.kill()
            yield batch

    with broker.client("producer") as client, pytest.raises(BrokerUnavailable):
        client.submit(header, until_the_kill())
    broker.start()
    with broker.client("producer") as client:
        before = client.submission(header.submission_id)
        assert before is None or not before.closed  # None: not one batch had become durable
        after = client.submit(header, batches)
        assert (after.enqueued, after.closed) == (400, True)
    require_whole(broker, 400, finish_everything(broker))


def test_a_producer_that_lost_the_answer_submits_again_and_nothing_is_doubled(
    broker: Broker,
) -> None:
    """The broker dies at a random moment under a producer that only knows how to retry."""
    producer = subprocess.Popen(
        [sys.executable, "-c", PRODUCER, broker.settings.broker_endpoint, "200"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with broker.client("admin") as client:
        eventually(
            lambda: client.status().total.enqueued.tasks > 400, within_s=60, what="some batches"
        )
    broker.kill()
    broker.start()
    out, errors = producer.communicate(timeout=90)
    assert out.split() == ["8000"], errors
    with broker.client("admin") as client:
        assert client.status().total.ready.tasks == 8000
        assert client.verify().ok


def test_work_in_hand_survives_a_kill_of_the_broker(broker: Broker, worker: BrokerClient) -> None:
    batches = [tasks_of([20] * 30)]
    submit(broker, submission_of(batches), batches)
    first = worker.lease(sequences=10, tokens=1 << 20, kv_tokens=None)
    second = worker.lease(sequences=10, tokens=1 << 20, kv_tokens=None)
    assert first is not None
    assert second is not None
    assert worker.computed(completions(ids_of(first))).accepted == 10
    broker.kill()
    with pytest.raises(BrokerUnavailable):
        worker.renew()
    broker.start()
    with pytest.raises(NotAttached):
        worker.renew()
    assert attach(worker, ids_of(second)) == tuple(sorted(ids_of(second)))
    assert worker.computed(completions(ids_of(second))).accepted == 10
    assert worker.computed(completions(ids_of(first))).duplicates == 10
    require_whole(broker, 30, finish_everything(broker))


def test_a_kill_between_pull_and_retire_brings_the_rows_again(
    broker: Broker, worker: BrokerClient
) -> None:
    batches = [tasks_of([20] * 12)]
    submit(broker, submission_of(batches), batches)
    lease = worker.lease(sequences=12, tokens=1 << 20, kv_tokens=None)
    assert lease is not None
    worker.computed(completions(ids_of(lease)[:6]))
    worker.computed(completions(ids_of(lease)[6:8], "refused"))
    with broker.client("completion", "c") as completion:
        before = completion.pull_computed(rows=100)
        broker.kill()
        broker.start()
        after = completion.pull_computed(rows=100, wait_s=1)
        assert before is not None
        assert after is not None
        assert after.equals(before)
        good = [row["task_id"] for row in after.to_pylist() if row["status"] == "ok"]
        bad = [row["task_id"] for row in after.to_pylist() if row["status"] == "refused"]
        assert completion.retire(good, LANDED) == 6
        assert completion.dead(pa.array(bad), BURIED) == 2
        broker.kill()
        broker.start()
        assert completion.retire(good, LANDED) == 0
        assert completion.pull_computed(rows=100) is None
    with broker.client("admin") as client:
        total = client.status().total
        assert (total.retired.tasks, total.dead.tasks, total.open_tasks) == (6, 2, 4)


def test_leases_of_a_worker_that_died_come_back(broker: Broker, worker: BrokerClient) -> None:
    batches = [tasks_of([20] * 6)]
    submit(broker, submission_of(batches), batches)
    assert worker.lease(sequences=6, tokens=1 << 20, kv_tokens=None) is not None
    require_whole(broker, 6, finish_everything(broker))
    with broker.client("admin") as client:
        assert client.status().counters["expired"] == 6


def test_a_second_broker_on_the_journal_is_refused_by_name(broker: Broker) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "fabric_pipelines.broker"],
        env={**os.environ, **broker.settings.as_environment()},
        capture_output=True,
        text=True,
        timeout=15,
        check=False,
    )
    assert second.returncode == 4
    assert "a broker already runs on journal" in second.stderr
    assert len(second.stderr.splitlines()) == 1
    with broker.client("admin") as client:
        assert client.hello().protocol == 1


def test_a_second_broker_on_the_socket_is_refused_though_its_journal_is_free(
    broker: Broker, tmp_path: Path
) -> None:
    environ = {
        **broker.settings.as_environment(),
        "FABRIC_HOME": str(tmp_path / "other"),
        "FABRIC_BROKER_URL": broker.settings.broker_endpoint,
    }
    second = subprocess.run(
        [sys.executable, "-m", "fabric_pipelines.broker"],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=15,
        check=False,
    )
    assert second.returncode == 4
    assert "another broker listens" in second.stderr


def test_sigterm_ends_cleanly_even_under_an_open_upload(broker: Broker) -> None:
    batches = [tasks_of([10] * 5, seed=i) for i in range(3)]
    gone = threading.Event()

    def held_open() -> Iterator[pa.RecordBatch]:
        yield batches[0]
        gone.wait(10)
        yield batches[1]

    def upload() -> None:
        with broker.client("producer") as client, pytest.raises(TransientError):
            client.submit(submission_of(batches), held_open())

    thread = threading.Thread(target=upload)
    thread.start()
    with broker.client("admin") as client:
        eventually(lambda: client.status().total.enqueued.tasks == 5, within_s=60, what="a batch")
    code, errors = broker.end(signal.SIGTERM)
    gone.set()
    thread.join(10)
    assert (code, errors) == (0, "")
    assert not thread.is_alive()


def test_bad_input_is_refused_with_its_type_and_journals_nothing(broker: Broker) -> None:
    good = [tasks_of([10] * 5)]
    with broker.client("producer") as client:
        before = client.hello().durable_lsn
        small = submission_of(good, 1, vocab_size=3)
        with pytest.raises(SchemaError, match="the vocabulary ends at 2"):
            client.submit(small, good)
        assert client.submission(small.submission_id) is None
        assert client.hello().durable_lsn == before
        header = submission_of(good, 2)
        client.submit(header, good)
        with pytest.raises(SubmissionConflict, match="salt"):
            client.submit(submission_of([tasks_of([9] * 5)], 2), good)
        with pytest.raises(SubmissionConflict, match="declared"):
            client.submit(submission_of([*good, *good], 3), good)


def test_a_submission_that_will_never_be_whole_is_abandoned_and_what_came_of_it_lands(
    broker: Broker,
) -> None:
    batches = [tasks_of([10] * 3), tasks_of([20] * 5, seed=1)]
    wrong = replace(submission_of(batches, 4), fingerprint="ab" * 32)
    with broker.client("producer") as client:
        with pytest.raises(SubmissionConflict, match="nothing of it was taken"):
            client.submit(replace(submission_of(batches[:1], 5), fingerprint="0" * 64), batches[:1])
        assert client.submission(f"{5:064x}") is None
        with pytest.raises(SubmissionConflict, match=r"abandon 0{63}4"):
            client.submit(wrong, batches)
        left = client.submission(wrong.submission_id)
        assert left is not None
        assert (left.enqueued, left.closed) == (3, False)
    told = subprocess.run(
        [sys.executable, "-m", "fabric_pipelines", "broker", "abandon", f"{4:064x}", "--json"],
        env={**os.environ, **broker.settings.as_environment()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    assert (found["enqueued"], found["closed"], found["abandoned"]) == (3, True, True)
    assert len(finish_everything(broker)) == 3
    with broker.client("producer") as client:
        state = client.wait(wrong.submission_id, timeout_s=10)
        assert (state.finished, state.retired) == (True, 3)
        with pytest.raises(SubmissionConflict, match="abandoned with 3 of its 8 tasks"):
            client.submit(wrong, batches)


@pytest.mark.parametrize("sent", [2, 3])
def test_a_producer_whose_submission_is_abandoned_under_way_is_not_told_that_it_is_whole(
    broker: Broker, sent: int
) -> None:
    batches = [tasks_of([10] * 100, seed=at) for at in range(3)]
    header = submission_of(batches, 6)

    def stream(other: BrokerClient) -> Iterator[pa.RecordBatch]:
        yield from batches[:2]
        eventually(lambda: is_taken(other), within_s=10, what="two batches taken")
        other.abandon(header.submission_id)
        yield from batches[2:sent]

    def is_taken(other: BrokerClient) -> bool:
        state = other.submission(header.submission_id)
        return state is not None and state.enqueued == 200

    with broker.client("producer") as client, broker.client("producer") as other:
        with pytest.raises(SubmissionConflict, match=r"abandoned with 200 of its 300 tasks.*salt"):
            client.submit(header, stream(other))
        with pytest.raises(SubmissionConflict, match="abandoned with 200"):
            client._call("close", {"submission_id": header.submission_id})
        assert client.abandon(header.submission_id).enqueued == 200


def test_roles_are_held_to_what_they_may_do(broker: Broker, worker: BrokerClient) -> None:
    batches = [tasks_of([20] * 2)]
    submit(broker, submission_of(batches), batches)
    lease = worker.lease(sequences=2, tokens=1 << 20, kv_tokens=None)
    assert lease is not None
    worker.computed(completions(ids_of(lease)))
    with pytest.raises(Refused, match="'worker' may not settle"):
        worker.retire(ids_of(lease), LANDED)
    with broker.client("completion") as completion, pytest.raises(Refused, match="may not lease"):
        completion.lease(sequences=1, tokens=1, kv_tokens=None)
    with broker.client("stranger") as stranger, pytest.raises(Refused, match="stranger"):
        stranger.hello()


def test_the_producer_waits_until_the_last_task_has_ended(
    broker: Broker, worker: BrokerClient
) -> None:
    batches = [tasks_of([20] * 10, new=0)]
    header = submission_of(batches, sampling=EMBED)
    submit(broker, header, batches)
    with broker.client("producer") as client:
        assert client.wait(header.submission_id, timeout_s=0.1).retired == 0
        finisher = threading.Thread(target=finish_everything, args=(broker,))
        finisher.start()
        seen: list[int] = []
        state = client.wait(
            header.submission_id, timeout_s=20, on_progress=lambda s: seen.append(s.retired)
        )
        finisher.join(20)
    assert state.finished
    assert seen[-1] == 10


def test_a_journal_at_its_mark_refuses_with_a_time_to_retry(broker: Broker) -> None:
    broker.kill()
    low = settings.load(
        {"home": broker.settings.home, "segment_bytes": 1 << 20, "journal_high_water_bytes": 1}, {}
    )
    broker.settings = low
    broker.start()
    batches = [tasks_of([20] * 2)]
    with broker.client("producer") as client, pytest.raises(Backpressure) as refused:
        client.submit(submission_of(batches), batches)
    assert refused.value.retry_after_s > 0


def test_a_journal_that_cannot_be_written_ends_the_process_with_one_sentence(
    broker: Broker,
) -> None:
    assert broker.process is not None
    batches = [tasks_of([20] * 2)]
    with broker.client("producer") as client:
        client.submit(submission_of(batches), batches)
        _, hard = resource.prlimit(broker.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(broker.process.pid, resource.RLIMIT_FSIZE, (0, hard))
        with pytest.raises((StorageFailed, BrokerUnavailable)):
            client.submit(submission_of(batches, 1), batches)
    _, errors = broker.process.communicate(timeout=90)
    assert broker.process.returncode == StorageFailed.exit_code == 1
    assert len(errors.splitlines()) == 1
    assert "stopped while writing" in errors
    broker.start()
    with broker.client("admin") as client:
        assert client.status().total.ready.tasks == 2
        assert client.verify().ok


@pytest.mark.parametrize("how", ["moved", "deleted", "replaced"])
def test_a_home_that_goes_away_under_a_running_broker_ends_it_with_one_sentence(
    broker: Broker, tmp_path: Path, how: str
) -> None:
    assert broker.process is not None
    batches = [tasks_of([20] * 2)]
    submit(broker, submission_of(batches), batches)
    home, aside = broker.settings.home, tmp_path / "aside"
    home.rename(aside)
    if how == "deleted":
        shutil.rmtree(aside)
    elif how == "replaced":
        broker.settings.journal_dir.mkdir(parents=True)
    _, errors = broker.process.communicate(timeout=30)
    assert broker.process.returncode == HomeGone.exit_code == 4
    (line,) = errors.splitlines()
    kind, sentence = from_line(line) or (None, "")
    assert kind is HomeGone
    folder, word = (
        broker.settings.journal_dir,
        "replaced" if how == "replaced" else "moved or deleted",
    )
    assert sentence.startswith(f"{folder} was {word}")
    assert "put the folder back" in sentence
    assert list(tmp_path.glob("home/**/*.segment")) == [], "nothing new begins in its place"
    if how != "deleted":
        shutil.rmtree(home, ignore_errors=True)
        aside.rename(home)
        broker.start()
        with broker.client("admin") as client:
            assert client.status().total.ready.tasks == 2
    broker.process = None if how == "deleted" else broker.process


def test_a_damaged_journal_is_refused_at_start_with_the_code_of_its_kind(broker: Broker) -> None:
    """As `python -m`, as `fabric broker serve`, and by whoever starts it."""
    batches = [tasks_of([20] * 2)]
    submit(broker, submission_of(batches), batches)
    submit(broker, submission_of(batches, 2), batches)
    broker.end(signal.SIGTERM)
    active = min(broker.settings.journal_dir.glob("*.segment"))
    content = bytearray(active.read_bytes())
    content[400] ^= 1
    active.write_bytes(content)
    served = subprocess.run(
        [sys.executable, "-m", "fabric_pipelines", "broker", "serve"],
        env={**os.environ, **broker.settings.as_environment()},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    code, errors = broker.refused()
    assert (served.returncode, code) == (CorruptionFound.exit_code, CorruptionFound.exit_code)
    assert CorruptionFound.exit_code == 4
    assert served.stderr == errors
    (line,) = errors.splitlines()
    kind, sentence = from_line(line) or (None, "")
    assert kind is CorruptionFound
    assert re.match(
        rf"segment {active} is damaged at offset \d+: bytes \d+\.\.\d+, the frame of kind 1 with LSN \d+ were",
        sentence,
    ), sentence


def test_a_refused_start_names_the_rows_that_the_damage_costs(broker: Broker) -> None:
    batches = [tasks_of([20 + at] * 10, seed=at) for at in range(3)]
    header = submission_of(batches)
    submit(broker, header, batches)
    broker.end(signal.SIGTERM)
    active = min(broker.settings.journal_dir.glob("*.segment"))
    content = bytearray(active.read_bytes())
    at = content.index(b'"first_row":10')
    content[at + 600] ^= 1
    active.write_bytes(content)
    code, errors = broker.refused()
    kind, sentence = from_line(errors.splitlines()[-1]) or (None, "")
    assert (kind, code) == (CorruptionFound, 4)
    assert f"rows 10-19 of submission {header.submission_id[:12]}" in sentence, sentence
    assert "10 tasks have their row or outcome there" in sentence
    assert sentence.endswith("submit these rows again")


def raw_upload(broker: Broker, command: bytes, batch: pa.RecordBatch, note: bytes) -> str:
    """What a producer in another language might send; the first answer that is an error."""
    client = flight.FlightClient(broker.settings.broker_endpoint)
    found, faults = "", []
    with client:
        writer, reader = client.do_put(flight.FlightDescriptor.for_command(command), batch.schema)
        try:
            writer.write_with_metadata(batch, note)
            writer.done_writing()
        except (flight.FlightError, pa.ArrowException) as fault:
            faults.append(fault)
        try:
            with writer:
                while (answer := reader.read()) is not None:
                    head = json.loads(bytes(answer))
                    if "error" in head:
                        found = found or f"{head['error']}: {head['message']}"
        except (flight.FlightError, pa.ArrowException) as fault:
            faults.append(fault)
    for fault in (
        () if found else faults
    ):  # a stream that ended while it was written has its error there
        typed = from_flight_error(fault, broker.settings.broker_endpoint)
        found = f"{typed.code}: {typed}"
    return found


@pytest.mark.parametrize(
    ("change", "note", "expected"),
    [
        ({}, {"first_row": 0, "crc32c": [1, 2, 3, 4, 5, 6]}, "SchemaError: .*CRC32C"),
        ({}, {"first_row": -1, "crc32c": None}, "UsageError: .*row -1"),
        ({}, {}, "SchemaError: .*app_metadata"),
        ({"function": 5}, {}, "UsageError: .*function"),
        ({"sampling": {"kind": "generate", "temperature": float("nan")}}, {}, "UsageError"),
        ({"engine": "\ud800"}, {}, "UsageError"),
        ({"sampling": {"kind": "guess"}}, {}, "UsageError: .*kind"),
        ({"surprise": 1}, {}, "UsageError"),
        ({"protocol": 2}, {}, "VersionRefused: .*protocol 2"),
        ({"role": "worker"}, {}, "WrongRole: role 'worker' may not submit"),
    ],
)
def test_a_strange_producer_gets_a_typed_answer_and_the_broker_lives(
    broker: Broker, change: dict[str, Any], note: dict[str, Any], expected: str
) -> None:
    batch = tasks_of([10] * 3)
    header = json.loads(submission_of([batch]).to_json()) | {"protocol": 1, "role": "producer"}
    header |= change
    if note.get("crc32c", ()) is None:
        note = note | {"crc32c": column_checksums(batch)}
    answer = raw_upload(broker, json.dumps(header).encode(), batch, json.dumps(note).encode())
    assert re.match(expected, answer), answer
    with broker.client("admin") as client:
        assert client.status().total.enqueued.tasks == 0


def test_a_batch_larger_than_a_segment_is_cut_by_the_client_or_refused(broker: Broker) -> None:
    batches = [tasks_of([4000] * 100)]
    with broker.client("producer") as client, pytest.raises(UsageError, match="segment"):
        client.submit(submission_of(batches), batches)
    small = [tasks_of([10] * 5)]
    assert submit(broker, submission_of(small, 1), small) == 5


def test_without_a_broker_the_error_says_so(tmp_path: Path) -> None:
    endpoint = f"grpc+unix://{tmp_path / 'none.sock'}"
    with (
        BrokerClient(endpoint, role="producer", timeout_s=2) as client,
        pytest.raises(BrokerUnavailable, match="fabric up"),
    ):
        client.hello()


def test_a_journal_that_lost_acknowledged_work_is_found_out_by_its_client(broker: Broker) -> None:
    """Its folder was put back from an older copy: whole in itself, and not what the client was promised."""
    batches = [tasks_of([20] * 3)]
    folder = broker.settings.journal_dir
    with broker.client("producer") as producer:
        producer.submit(submission_of(batches, 1), batches)
        broker.end(signal.SIGTERM)
        shutil.copytree(folder, folder.with_suffix(".copy"))
        broker.start()
        producer.submit(submission_of(batches, 2), batches)
        broker.kill()
        shutil.rmtree(folder)
        folder.with_suffix(".copy").rename(folder)
        broker.start()
        for _ in range(2):
            with pytest.raises(CorruptionFound, match="acknowledged work was lost"):
                producer.status()
        with pytest.raises(CorruptionFound, match="restore the journal folder"):
            producer.submit(submission_of(batches, 2), batches)
    with broker.client("producer") as stranger:
        assert stranger.submit(submission_of(batches, 2), batches).closed


def test_one_flipped_bit_in_the_last_upload_is_told_after_the_restart_took_its_lsn(
    broker: Broker,
) -> None:
    """The second batch is one frame and one group, killed before anything recorded that it is durable. The restart
    takes it for a torn tail, and its first fact takes the LSN; others go on from there."""
    batches = [tasks_of([20] * 50, seed=at) for at in range(2)]
    folder = broker.settings.journal_dir
    with broker.client("producer") as producer, broker.client("producer") as other:
        header = submission_of(batches, 1)
        head = {**json.loads(header.to_json()), **producer._presented()}
        stream = producer._uploading(json.dumps(head).encode())
        assert producer._require_answer(stream).enqueued == 0
        for at, batch in enumerate(batches):
            stream.send(batch, {"first_row": 50 * at, "crc32c": column_checksums(batch)})
            assert producer._require_answer(stream).enqueued == 50 * (at + 1)
        stream.close()
        told = producer._presented()["acknowledged"]
        broker.kill()
        segment = min(folder.glob("*.segment"))
        content = segment.read_bytes()
        payload = content.rindex(b"1FPF") - 4  # of the last fact
        with segment.open("r+b") as file:
            file.seek(payload + 3_000)
            file.write(bytes([content[payload + 3_000] ^ 1]))
        for mark in range(2, 4):
            broker.start()
            again = [tasks_of([20] * 5, seed=mark)]
            assert other.submit(submission_of(again, mark), again).enqueued == 5
            assert other.hello().durable_lsn > told[1]
            for _ in range(2):
                with pytest.raises(CorruptionFound, match="acknowledged work was lost"):
                    producer.status()
            with pytest.raises(CorruptionFound, match="restore the journal folder"):
                producer.submit(header, batches)
            broker.kill()
        broker.start()
    with broker.client("admin") as admin:
        assert admin.verify().ok


def test_clients_that_lost_nothing_go_on_over_five_kills(broker: Broker) -> None:
    with broker.client("producer") as busy, broker.client("admin") as quiet:
        quiet.hello()
        for mark in range(5):
            batches = [tasks_of([20] * 5, seed=mark)]
            busy.submit(submission_of(batches, mark), batches)
            if mark == 2:
                quiet.status()
            broker.kill()
            broker.start()
            assert busy.submit(submission_of(batches, mark), batches).closed
        assert quiet.status().total.enqueued.tasks == 25
        assert quiet.verify().ok


def test_a_scrub_through_the_socket_names_segment_and_tasks(broker: Broker) -> None:
    batches = [tasks_of([1000] * 100, seed=at) for at in range(6)]
    with broker.client("admin") as admin, broker.client("producer") as producer:
        producer.submit(submission_of(batches, 1), batches)
        report = admin.scrub()
        assert report.ok
        assert report.segments >= 1
        first = min(broker.settings.journal_dir.glob("*.segment"))
        with first.open("r+b") as file:
            file.seek(300_000)
            byte = file.read(1)[0]
            file.seek(300_000)
            file.write(bytes([byte ^ 1]))
        report = admin.scrub()
        assert not report.ok
        (frame,) = report.damaged
        assert frame.segment == str(first)
        assert frame.live > 0
        assert re.fullmatch(r"\d+-\d+", frame.task_ids)
        status = admin.status()
        assert status.fault == "", "all others would go on"
        assert status.journal["withheld_tasks"] == frame.live
        assert first.name in str(status.journal["damaged"])


def test_a_full_broker_is_emptied_and_takes_tasks_again(broker: Broker) -> None:
    broker.kill()
    flags = {
        "home": broker.settings.home,
        "segment_bytes": 1 << 18,
        "journal_high_water_bytes": 1 << 20,
        "checkpoint_bytes": 1 << 19,
        "lease_ms": 5_000,
    }
    broker.settings = settings.load(flags, {})
    broker.start()
    mark = 0
    with broker.client("producer") as producer:
        while taken(producer, *submission_with(mark)):
            mark += 1
        with pytest.raises(Backpressure):
            producer.submit(*submission_with(mark))
        finish_everything(broker)
        last = submission_with(mark)
        eventually(lambda: taken(producer, *last), within_s=60, what="room below the mark")
    with broker.client("admin") as admin:
        status = admin.status()
        assert status.counters["segments_dropped"] >= 1
        assert admin.verify().ok
    broker.kill()
    broker.start()
    with broker.client("admin") as admin:
        assert admin.verify().ok
        assert admin.status().total.enqueued.tasks == 20 * (mark + 1)


def submission_with(mark: int) -> tuple[Submission, list[pa.RecordBatch]]:
    batches = [tasks_of([1000] * 20, seed=mark)]
    return submission_of(batches, mark), batches


def taken(producer: BrokerClient, header: Submission, batches: list[pa.RecordBatch]) -> bool:
    try:
        return producer.submit(header, batches).closed
    except (Backpressure, StorageFailed):
        return False


def test_a_full_disk_lets_acks_and_retirements_through_and_recovers(
    broker: Broker, small_disk: Path
) -> None:
    broker.kill()
    flags = {"home": small_disk / "home", "segment_bytes": 1 << 20, "lease_ms": 5_000}
    broker.settings = settings.load(flags, {})
    broker.start()
    with broker.client("producer") as producer:
        mark = 0
        while taken(producer, *submission_with(mark)):
            mark += 1
        with pytest.raises(StorageFailed, match="full"):
            producer.submit(*submission_with(mark))
        finish_everything(broker)
        again = submission_with(mark)
        eventually(lambda: taken(producer, *again), within_s=60, what="room on the disk")
    with broker.client("admin") as admin:
        assert admin.verify().ok
        assert admin.status().counters["segments_dropped"] >= 1
    broker.kill()
    broker.start()
    with broker.client("admin") as admin:
        assert admin.verify().ok
    broker.kill()
