"""The broker's door for other machines: mutual TLS, and the certificate alone says who calls.

Everything here runs a real broker process and real TLS connections on loopback; a host of another name would change
the name in the certificate, nothing else.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fabric_pipelines import settings
from fabric_pipelines.broker import certificates
from fabric_pipelines.broker import client as client_module
from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.broker.transport import CIPHERS_VARIABLE, Credentials
from fabric_pipelines.clock import Clock
from fabric_pipelines.errors import (
    BrokerUnavailable,
    FabricError,
    NotTrusted,
    SettingsError,
    UsageError,
    WrongRole,
    WrongTenant,
)
from fabric_pipelines.supervise.table import free_port
from tests.support_broker import LANDED, completions, ids_of, submission_of, tasks_of
from tests.support_broker_process import Broker, Served, attach, credentials_of, served_settings

CLIENTS = ("consumer", "completion", "admin", "acme/producer", "beta/producer", "acme/consumer")
BATCHES = [tasks_of([20] * 4)]


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("papers")
    certificates.make(folder, hosts=["127.0.0.1"], clients=CLIENTS)
    return folder


@pytest.fixture
def served(tmp_path: Path, papers: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    # what a careless shell might have: suites that are no good any more
    monkeypatch.setenv(CIPHERS_VARIABLE, "ECDHE-ECDSA-AES128-SHA:ECDHE-RSA-AES128-SHA")
    endpoint = f"grpc+tls://127.0.0.1:{free_port('127.0.0.1', 18_471)}"
    broker = Broker(served_settings(tmp_path / "home", papers, endpoint))
    broker.start()
    yield Served(broker, papers, endpoint)
    if broker.process is not None:
        broker.kill()


def test_work_passes_through_mutual_tls_from_a_submission_to_its_retirement(served: Served) -> None:
    header = submission_of(BATCHES, tenant="acme")
    with (
        served.remote("acme-producer") as producer,
        served.remote("consumer") as worker,
        served.remote("completion") as completion,
        served.remote("admin") as admin,
    ):
        assert producer.submit(header, BATCHES).closed
        attach(worker)
        lease = worker.lease(sequences=8, tokens=1 << 20, kv_tokens=None)
        assert lease is not None
        worker.computed(completions(ids_of(lease)))
        rows = completion.pull_computed(rows=10, wait_s=5)
        assert completion.retire(rows.column("task_id"), LANDED) == 4
        assert admin.status().total.retired.tasks == 4
        assert admin.verify().differences == []


@pytest.mark.parametrize(
    ("certificate", "call", "allowed"),
    [
        ("consumer", lambda c: c.retire([1], LANDED), "completion"),
        (
            "consumer",
            lambda c: c.submit(submission_of(BATCHES, tenant="acme"), BATCHES),
            "producer",
        ),
        ("consumer", lambda c: c.verify(), "admin"),
        ("acme-producer", lambda c: c.lease(sequences=1, tokens=1, kv_tokens=None), "consumer"),
        ("acme-producer", lambda c: c.pull_computed(rows=1), "completion"),
        ("acme-producer", lambda c: c.drain(), "admin"),
        ("completion", lambda c: c.nack([1], reason="no"), "consumer"),
        ("admin", lambda c: c.retire([1], LANDED), "completion"),
    ],
)
def test_a_certificate_opens_only_what_its_role_may_do(
    served: Served, certificate: str, call: Any, allowed: str
) -> None:
    """The client declares the role that would be right: what it declares counts for nothing."""
    with served.remote(certificate, role=allowed) as client, served.remote("admin") as admin:
        before = admin.hello().durable_lsn
        with pytest.raises(WrongRole, match=rf"fabric://.* may not \w+: only .*{allowed}"):
            call(client)
        assert admin.hello().durable_lsn == before


def test_a_tenant_that_claims_anothers_lane_is_refused_and_nothing_is_written(
    served: Served,
) -> None:
    mine, other = submission_of(BATCHES, 1, tenant="acme"), submission_of(BATCHES, 2, tenant="beta")
    with (
        served.remote("acme-producer") as acme,
        served.remote("beta-producer") as beta,
        served.remote("admin") as admin,
    ):
        beta.submit(other, BATCHES)
        before = admin.hello().durable_lsn
        for attempt in (
            lambda: acme.submit(submission_of(BATCHES, 3, tenant="beta"), BATCHES),
            lambda: acme.submit(other, BATCHES),
            lambda: acme.submission(other.submission_id),
            lambda: acme._call("close", {"submission_id": other.submission_id}),
        ):
            with pytest.raises(WrongTenant, match="FABRIC_TENANT=acme"):
                attempt()
        assert admin.hello().durable_lsn == before
        acme.submit(mine, BATCHES)
        assert [row["lane"].partition("/")[0] for row in acme.status().lanes] == ["acme"]
        assert acme.status().total.enqueued.tasks == 4
        assert admin.status().total.enqueued.tasks == 8


def test_a_tenants_worker_gets_and_claims_only_that_tenants_tasks(served: Served) -> None:
    with (
        served.remote("acme-producer") as acme,
        served.remote("beta-producer") as beta,
        served.remote("acme-consumer", session="w") as own,
        served.remote("consumer", session="w") as common,
    ):
        acme.submit(submission_of(BATCHES, 1, tenant="acme"), BATCHES)
        beta.submit(submission_of(BATCHES, 2, tenant="beta"), BATCHES)
        attach(common)
        attach(own)
        taken: list[int] = []
        while (lease := own.lease(sequences=8, tokens=1 << 20, kv_tokens=None)) is not None:
            taken += ids_of(lease)
        assert len(taken) == 4
        left = common.lease(sequences=8, tokens=1 << 20, kv_tokens=None)
        assert left is not None
        assert not set(ids_of(left)) & set(taken)
        common.nack(ids_of(left), reason="given back")
        assert attach(own, [*taken, *ids_of(left)]) == tuple(sorted(taken))
        assert own.computed(completions(ids_of(left))).accepted == 0


def test_two_tenants_with_one_session_name_do_not_speak_for_each_other(served: Served) -> None:
    with (
        served.remote("acme-producer") as acme,
        served.remote("acme-consumer", session="w") as own,
        served.remote("consumer", session="w") as common,
    ):
        acme.submit(submission_of(BATCHES, 1, tenant="acme"), BATCHES)
        attach(own)
        lease = own.lease(sequences=8, tokens=1 << 20, kv_tokens=None)
        assert lease is not None
        attach(common)  # holds nothing, which gives back what it held: nothing of the other's
        common.detach()
        assert own.computed(completions(ids_of(lease))).accepted == 4


def handshake(
    served: Served,
    *,
    version: ssl.TLSVersion,
    suites: str = "",
    certificate: str = "consumer",
) -> str:
    """The suite of a connection over which the server really speaks HTTP/2, "" if it will not."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(served.papers / "ca.pem")
    if certificate:
        files = (served.papers / f"{certificate}.{end}" for end in ("pem", "key"))
        context.load_cert_chain(*files)
    context.minimum_version = context.maximum_version = version
    if suites:
        context.set_ciphers(suites)
    context.set_alpn_protocols(["h2"])
    port = int(served.endpoint.rpartition(":")[2])
    with (
        suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=5) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as wrapped,
    ):
        if wrapped.recv(
            64
        ):  # in TLS 1.3 the client's certificate is judged after its handshake ended
            name, *_ = wrapped.cipher() or ("",)
            return name
    return ""


@pytest.mark.parametrize(
    ("version", "suites", "taken"),
    [
        (ssl.TLSVersion.TLSv1_2, "ECDHE-ECDSA-AES128-SHA:@SECLEVEL=0", ""),
        (ssl.TLSVersion.TLSv1_2, "ECDHE-ECDSA-AES128-SHA256:@SECLEVEL=0", ""),
        (ssl.TLSVersion.TLSv1_2, "ECDHE-ECDSA-AES256-SHA384:@SECLEVEL=0", ""),
        (ssl.TLSVersion.TLSv1_2, "ECDHE-ECDSA-AES128-GCM-SHA256", "ECDHE-ECDSA-AES128-GCM-SHA256"),
        (ssl.TLSVersion.TLSv1_2, "ECDHE-ECDSA-AES256-GCM-SHA384", "ECDHE-ECDSA-AES256-GCM-SHA384"),
        (ssl.TLSVersion.TLSv1_3, "", "TLS_AES_"),
    ],
)
def test_only_suites_with_authenticated_encryption_are_taken_whatever_the_shell_says(
    served: Served, version: ssl.TLSVersion, suites: str, taken: str
) -> None:
    found = handshake(served, version=version, suites=suites)
    assert found.startswith(taken) if taken else found == ""


CARELESS = """
import sys
import pyarrow.flight as flight
from pathlib import Path
from fabric_pipelines.broker.transport import prove_strong
papers = Path(sys.argv[1])
ca, chain, key = ((papers / name).read_bytes() for name in ("ca.pem", "broker.pem", "broker.key"))
server = flight.FlightServerBase(
    "grpc+tls://127.0.0.1:0", tls_certificates=[(chain, key)], verify_client=True, root_certificates=ca
)
prove_strong("grpc+tls://127.0.0.1:0", server.port)
"""


@pytest.mark.parametrize(
    ("suites", "code"), [("ECDHE-ECDSA-AES128-SHA", 1), ("ECDHE-ECDSA-AES128-GCM-SHA256", 0)]
)
def test_a_server_that_would_take_a_weak_suite_finds_that_out_itself(
    papers: Path, suites: str, code: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CARELESS, str(papers)],
        env={**os.environ, CIPHERS_VARIABLE: suites},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, "without authenticated encryption" in done.stderr) == (
        code,
        bool(code),
    )


@pytest.mark.parametrize("certificate", ["", "broker"])
def test_without_a_clients_certificate_nothing_is_said(served: Served, certificate: str) -> None:
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        assert handshake(served, version=version, certificate=certificate) == ""


def test_a_certificate_of_another_ca_is_refused_by_both_sides(
    served: Served, tmp_path: Path
) -> None:
    certificates.make(tmp_path / "theirs", hosts=["127.0.0.1"], clients=["admin"])
    theirs = credentials_of(tmp_path / "theirs", "admin")
    ours = credentials_of(served.papers, "admin")
    foreign = "refused this machine's certificate (FABRIC_TLS_CERT), which is not of the CA in"
    for mixed, said in (
        (theirs, "certificate of the broker at {} is not of the CA in FABRIC_TLS_CA (self-signed"),
        (Credentials(ours.ca, theirs.chain, theirs.key), f"the broker at {{}} {foreign}"),
        (Credentials(ours.ca + theirs.ca, theirs.chain, theirs.key), "which is good here: see"),
        (Credentials(ours.ca, ours.chain, theirs.key), "FABRIC_TLS_KEY is not the key of the"),
    ):
        assert said.format(served.endpoint) in untrusted(served.endpoint, mixed)


def untrusted(endpoint: str, credentials: Credentials) -> str:
    """The sentence of a client that is not let in; also when it uploads."""
    with BrokerClient(endpoint, role="admin", timeout_s=5, credentials=credentials) as client:
        with pytest.raises(NotTrusted) as caught:
            client.hello()
        with pytest.raises(NotTrusted) as uploading:
            client.submit(submission_of(BATCHES), BATCHES)
    said = str(caught.value)
    assert str(uploading.value) == said
    for word in ("ipv4:", "SSL_", "error:", "failed to connect", "UNKNOWN"):
        assert word not in said, "nothing of gRPC's own line"
    assert re.search(r"[:;,] (copy|make|take|see|reach|set) ", said), "and what to do"
    return said


def aged(papers: Path, folder: Path, *, hosts: list[str], clients: list[str]) -> Path:
    """Certificates of the same CA that ended long ago."""
    folder.mkdir()
    for file in ("ca.pem", "ca.key"):
        shutil.copy(papers / file, folder / file)
    long_ago = Clock(lambda: 0.0, lambda: 1_500_000_000_000_000)
    certificates.make(folder, hosts=hosts, clients=clients, days=1, clock=long_ago)
    return folder


def test_a_certificate_past_its_end_opens_nothing(served: Served, tmp_path: Path) -> None:
    old = aged(served.papers, tmp_path / "old", hosts=[], clients=["admin"])
    said = untrusted(served.endpoint, credentials_of(old, "admin"))
    assert "refused this machine's certificate (FABRIC_TLS_CERT), which is past its end" in said


def test_a_broker_whose_certificate_is_past_its_end_is_not_talked_to(
    tmp_path: Path, papers: Path
) -> None:
    old = aged(papers, tmp_path / "old", hosts=["127.0.0.1"], clients=[])
    endpoint = f"grpc+tls://127.0.0.1:{free_port('127.0.0.1', 18_487)}"
    broker = Broker(served_settings(tmp_path / "home", old, endpoint))
    broker.start()
    said = untrusted(endpoint, credentials_of(papers, "admin"))
    assert f"the certificate of the broker at {endpoint} is past its end" in said
    broker.kill()


def test_an_address_where_no_broker_is_says_that_and_not_that_nobody_is_trusted(
    papers: Path,
) -> None:
    mine, port = credentials_of(papers, "admin"), free_port("127.0.0.1", 18_493)
    with socket.create_server(("127.0.0.1", port)) as plain:

        def answer() -> None:
            while True:
                try:
                    connection, _ = plain.accept()
                except OSError:
                    return
                connection.sendall(b"220 mail.example ESMTP\r\n" * 4)
                connection.close()

        threading.Thread(target=answer, daemon=True).start()
        said = unavailable(f"grpc+tls://127.0.0.1:{port}", mine)
        assert "does not speak TLS as a broker does" in said
        plain.shutdown(socket.SHUT_RDWR)
    said = unavailable(f"grpc+tls://127.0.0.1:{port}", mine)
    assert said.startswith(f"no broker answers at grpc+tls://127.0.0.1:{port} (Connection refused)")
    said = unavailable(f"grpc+tls://nowhere.invalid:{port}", mine)
    assert said.startswith("no machine is known as 'nowhere.invalid'")


def unavailable(endpoint: str, credentials: Credentials) -> str:
    with (
        BrokerClient(endpoint, role="admin", timeout_s=5, credentials=credentials) as client,
        pytest.raises(BrokerUnavailable) as caught,
    ):
        client.hello()
    assert not isinstance(caught.value, NotTrusted)
    return str(caught.value)


def test_a_server_whose_certificate_names_another_host_is_not_talked_to(
    tmp_path: Path, papers: Path
) -> None:
    """All of 127/8 is this machine, and the certificate names one address of it."""
    port = free_port("127.0.0.1", 18_481)
    broker = Broker(served_settings(tmp_path / "home", papers, f"grpc+tls://0.0.0.0:{port}"))
    broker.start()
    mine = credentials_of(papers, "admin")
    for host in ("127.0.0.1", "localhost"):
        with BrokerClient(f"grpc+tls://{host}:{port}", role="admin", credentials=mine) as client:
            assert client.hello().protocol == 1
    said = untrusted(f"grpc+tls://127.0.0.2:{port}", mine)
    assert "is not for '127.0.0.2'" in said
    assert "--host 127.0.0.2`" in said
    broker.kill()


def command(
    served: Served, folder: Path, certificate: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """`fabric ...` as on another machine: its own home, an address and three files."""
    environ = {
        **os.environ,
        "FABRIC_HOME": str(folder / "elsewhere"),
        "FABRIC_BROKER_URL": served.endpoint,
        "FABRIC_TLS_CA": str(served.papers / "ca.pem"),
        "FABRIC_TLS_CERT": str(served.papers / f"{certificate}.pem"),
        "FABRIC_TLS_KEY": str(served.papers / f"{certificate}.key"),
        "FABRIC_TENANT": "acme",
    }
    argv = [sys.executable, "-m", "fabric_pipelines", *arguments]
    return subprocess.run(
        argv, env=environ, capture_output=True, text=True, timeout=60, check=False, cwd=folder
    )


def test_the_command_on_another_machine_submits_and_looks(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"tokens": [1, 2, 3 + at]}) + "\n" for at in range(5)))
    engine = "smollm2-135m-instruct@ctranslate2-int8"
    asked = ("submit", str(file), "--function", "generate", "--engine", engine, "--json")
    done = command(served, tmp_path, "acme-producer", *asked)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["enqueued"] == 5
    shown = command(served, tmp_path, "acme-producer", "broker", "status", "--json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["ready"] == 5
    refused = command(served, tmp_path, "acme-producer", "broker", "verify")
    assert (refused.returncode, refused.stderr.count("\n")) == (WrongRole.exit_code, 1)
    assert "fabric://acme/producer" in refused.stderr
    verified = command(served, tmp_path, "admin", "broker", "verify", "--json")
    assert json.loads(verified.stdout)["ok"], verified.stderr
    human = command(served, tmp_path, "acme-producer", "broker", "status")
    assert human.returncode == 0, human.stderr
    other = command(served, tmp_path, "beta-producer", *asked)
    assert other.returncode == WrongTenant.exit_code
    assert "FABRIC_TENANT=beta" in other.stderr


def test_a_wire_that_goes_silent_ends_an_upload(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither side closes: a machine lost its power, or a firewall forgot the connection."""
    asked = {"grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"}
    assert asked <= {name for name, _ in client_module.CHANNEL_OPTIONS}
    quick = [*((name, 500) for name in sorted(asked)), ("grpc.http2.max_pings_without_data", 0)]
    kept = [each for each in client_module.CHANNEL_OPTIONS if each[0] not in asked]
    monkeypatch.setattr(client_module, "CHANNEL_OPTIONS", [*kept, *quick])
    port = int(served.endpoint.rpartition(":")[2])
    with SilentWire(port) as wire:
        mine = credentials_of(served.papers, "acme-producer")
        endpoint = f"grpc+tls://127.0.0.1:{wire.port}"

        def then_silence() -> Iterator[Any]:
            yield BATCHES[0]
            wire.silent = True
            yield tasks_of([20] * 4, seed=1)

        whole = [BATCHES[0], tasks_of([20] * 4, seed=1)]
        with (
            BrokerClient(endpoint, role="producer", timeout_s=5, credentials=mine) as client,
            pytest.raises(BrokerUnavailable),
        ):
            client.submit(submission_of(whole, tenant="acme"), then_silence())


class SilentWire:
    """A proxy that takes bytes and, once it is silent, delivers none."""

    def __init__(self, target: int) -> None:
        self._target, self.silent = target, False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> SilentWire:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                if not self.silent:
                    other.sendall(data)


def test_the_name_is_the_first_alternative_name_and_nothing_but_ours_is_taken(
    served: Served, tmp_path: Path
) -> None:
    """gRPC hands over the first name of any kind, or the common name where there is none."""
    for names, expected in (
        (("host.example", "fabric://*/admin"), "host.example"),
        (("fabric://acme/owner",), "fabric://acme/owner"),
        (("fabric://acme/admin",), "act on all"),
        ((), "fabric-pipelines stranger"),
    ):
        stranger = signed_by(served.papers, tmp_path, names)
        with (
            BrokerClient(
                served.endpoint, role="admin", timeout_s=5, credentials=stranger
            ) as client,
            pytest.raises(WrongRole, match=expected),
        ):
            client.hello()


def signed_by(papers: Path, folder: Path, names: tuple[str, ...]) -> Credentials:
    """A client certificate of our CA with any names, as another tool might make it."""
    import uuid

    made = folder / uuid.uuid4().hex
    made.mkdir()
    for file in ("ca.pem", "ca.key"):
        shutil.copy(papers / file, made / file)
    issuer = certificates._Issuer(made, certificates.SYSTEM_CLOCK)
    issuer.issue("stranger", names, 1)
    return credentials_of(made, "stranger")


@pytest.mark.parametrize("address", ["0.0.0.0:18470", "192.0.2.7:18470", "broker.example:18470"])
def test_a_plain_door_for_other_machines_is_refused_with_the_remedy(
    tmp_path: Path, papers: Path, address: str
) -> None:
    for name in ("broker_listen", "broker_url"):
        flags = {"home": tmp_path / "home", name: f"grpc://{address}"}
        broker = Broker(settings.load(flags, {}, tmp_path))
        code, errors = broker.refused()
        assert code == SettingsError.exit_code
        assert len(errors.splitlines()) == 1
        assert "FABRIC_BROKER_LISTEN=grpc+tls://" in errors
        assert "fabric broker certificates" in errors


def test_a_tls_door_without_certificates_does_not_open(tmp_path: Path) -> None:
    flags = {"home": tmp_path / "home", "broker_listen": "grpc+tls://127.0.0.1:18470"}
    code, errors = Broker(settings.load(flags, {}, tmp_path)).refused()
    assert code == SettingsError.exit_code
    assert "FABRIC_TLS_CA" in errors
    with pytest.raises(SettingsError, match="FABRIC_TLS_CERT"):
        BrokerClient("grpc+tls://127.0.0.1:18470", role="admin")


def test_a_key_that_others_may_read_is_refused(tmp_path: Path, papers: Path) -> None:
    loose = tmp_path / "loose.key"
    loose.write_bytes((papers / "admin.key").read_bytes())
    loose.chmod(0o644)
    flags = {
        "home": tmp_path,
        "broker_url": "grpc+tls://127.0.0.1:1",
        "tls_ca": papers / "ca.pem",
        "tls_cert": papers / "admin.pem",
        "tls_key": loose,
    }
    with pytest.raises(SettingsError, match="chmod 600"):
        BrokerClient.of(settings.load(flags, {}, tmp_path), role="admin")


def test_certificates_are_added_to_a_folder_and_never_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "papers"
    first = certificates.make(folder, hosts=["broker.lan", "10.1.2.3"], clients=["consumer"])
    assert [item.made for item in first] == [True, True, True]
    assert first[1].names == ("broker.lan", "10.1.2.3", "localhost", "127.0.0.1")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    second = certificates.make(folder, hosts=["other"], clients=["consumer", "acme/producer"])
    assert [(item.name, item.made) for item in second] == [
        ("ca", False),
        ("broker", False),
        ("consumer", False),
        ("acme-producer", True),
    ]
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.key")} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("client", ["owner", "acme/admin", "a b/producer", "/producer", ""])
def test_no_certificate_is_made_that_the_broker_would_refuse(tmp_path: Path, client: str) -> None:
    with pytest.raises(UsageError, match="no certificate can be made"):
        certificates.make(tmp_path / "papers", hosts=[], clients=[client])
    assert not (tmp_path / "papers").exists()


def test_half_a_pair_is_named_and_left_alone(tmp_path: Path) -> None:
    certificates.make(tmp_path, hosts=[], clients=["admin"])
    (tmp_path / "admin.key").unlink()
    with pytest.raises(FabricError, match=r"admin\.pem is there without"):
        certificates.make(tmp_path, hosts=[], clients=["admin"])
