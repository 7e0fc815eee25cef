"""Transports: which endpoints there are, and the credentials that a connection off this machine needs.

    grpc+unix://<path>           this machine; the socket's file permissions are the guard. Calls go over the
                                 call socket beside it (callsocket.py), bulk through Flight
    grpc://127.0.0.1:<port>      this machine, every user of it
    grpc+tls://<host>:<port>     any machine, mutual TLS: both sides show a certificate of one private CA

Plain connections never leave the machine and mutual TLS has no off switch: there is no flag to look for. gRPC
takes TLS 1.2 and 1.3 and offers no way to set the lower bound; what it does offer is the list of cipher suites, so
that both of ours take suites with authenticated encryption only, and a server proves that of itself when it starts.
"""

from __future__ import annotations

import os
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fabric_pipelines.broker.callsocket import path_beside
from fabric_pipelines.errors import Refused, SettingsError
from fabric_pipelines.settings import PLAIN_PATH, Settings

UNIX = "grpc+unix://"
PLAIN = "grpc://"
TLS = "grpc+tls://"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
PORT_MAX = 65_535
# gRPC reads this variable once, when its first client or server of a process is made, and takes TLS 1.2 names only;
# the suites of TLS 1.3 all have authenticated encryption and are always on.
CIPHERS_VARIABLE = "GRPC_SSL_CIPHER_SUITES"
AEAD_SUITES = ":".join(
    f"ECDHE-{key}-{cipher}"
    for key in ("ECDSA", "RSA")
    for cipher in ("AES128-GCM-SHA256", "AES256-GCM-SHA384")
)
WEAK_SUITES = "ECDHE+AES:!AESGCM:!AESCCM:@SECLEVEL=0"  # as OpenSSL names those with CBC
PROBE_S = 5.0
SERVER_HELLO = (22, 2)  # RFC 5246: record type "handshake"; at byte 5, message type "server hello"


@dataclass(frozen=True, slots=True)
class Credentials:
    """PEM text: the certificates to trust, the chain to show, its private key."""

    ca: bytes
    chain: bytes
    key: bytes

    @classmethod
    def of(cls, settings: Settings) -> Credentials:
        """Those that settings name. Raises SettingsError for a file that is missing, not readable or not PEM, and
        for a key that others may read."""
        parts = [
            _pem(name, getattr(settings, name), mark)
            for name, mark in (
                ("tls_ca", b"-----BEGIN CERTIFICATE-----"),
                ("tls_cert", b"-----BEGIN CERTIFICATE-----"),
                ("tls_key", b"PRIVATE KEY-----"),
            )
        ]
        if Path(settings.tls_key).stat().st_mode & 0o077:
            raise SettingsError(
                f"tls_key {settings.tls_key} may be read by others than its owner: chmod 600 it"
            )
        return cls(*parts)


def credentials_for(endpoint: str, settings: Settings) -> Credentials | None:
    """What a connection to, or a server on, that endpoint needs; None where it stays on this machine."""
    return Credentials.of(settings) if endpoint.startswith(TLS) else None


def call_path(endpoint: str) -> Path | None:
    """The call socket beside an endpoint; None where there is none and calls go through Flight."""
    if not endpoint.startswith(UNIX):
        return None
    return path_beside(Path(endpoint.removeprefix(UNIX)))


def require_local(endpoint: str) -> str:
    """The endpoint, if it is a Unix socket or loopback in plain."""
    if endpoint.startswith(UNIX):
        if PLAIN_PATH.fullmatch(endpoint.removeprefix(UNIX)):
            return endpoint
        raise SettingsError(
            f"the socket path of broker endpoint {endpoint!r} has characters other than letters, digits and "
            "._~-/, which gRPC does not take: set FABRIC_BROKER_URL to a plain path"
        )
    host, port = address_of(endpoint.removeprefix(PLAIN))
    if endpoint.startswith(PLAIN) and host in LOOPBACK and port:
        return endpoint
    raise SettingsError(
        f"broker endpoint {endpoint!r} is neither {UNIX}<path> nor {PLAIN}127.0.0.1:<port>; plain connections "
        f"never leave the machine: other machines are served over mutual TLS, with FABRIC_BROKER_LISTEN={TLS}"
        "<address>:<port> here and certificates from `fabric broker certificates`"
    )


def require_reachable(endpoint: str, credentials: Credentials | None) -> str:
    """The endpoint, if a client may connect to it: local, or with credentials for TLS."""
    if not endpoint.startswith(TLS):
        return require_local(endpoint)
    host, port = address_of(endpoint.removeprefix(TLS))
    if not host or not port:
        raise SettingsError(f"broker endpoint {endpoint!r} must be {TLS}<host>:<port>")
    if credentials is None:
        raise SettingsError(
            f"broker endpoint {endpoint!r} takes no one without a certificate: set FABRIC_TLS_CA, "
            "FABRIC_TLS_CERT and FABRIC_TLS_KEY"
        )
    return endpoint


def require_listen(endpoint: str, credentials: Credentials | None) -> str:
    """The endpoint, if a server may be bound to it: local, or any address with mutual TLS."""
    if (
        endpoint.startswith(PLAIN)
        and endpoint.removeprefix(PLAIN).rpartition(":")[0] not in LOOPBACK
    ):
        raise SettingsError(
            f"the broker does not listen in plain on {endpoint!r}, which other machines reach: set "
            f"FABRIC_BROKER_LISTEN={TLS}{endpoint.removeprefix(PLAIN)} and make certificates with `fabric broker "
            "certificates`"
        )
    return require_reachable(endpoint, credentials)


def require_strong_ciphers() -> None:
    """From here on this process uses suites with authenticated encryption only, whatever its environment says.
    Call before anything of gRPC exists in it, a plain client or server included."""
    os.environ[CIPHERS_VARIABLE] = AEAD_SUITES


def prove_strong(endpoint: str, port: int) -> None:
    """Refused if the TLS server at `port` takes a suite without authenticated encryption from a client that has
    nothing else, which means that gRPC was used before the list was set."""
    host = address_of(endpoint.removeprefix(TLS))[0].strip("[]")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    if not answers_hello(host, port, WEAK_SUITES):
        return
    raise Refused(
        f"the broker on {endpoint} would take cipher suites without authenticated encryption: start it in a process "
        f"of its own, with {CIPHERS_VARIABLE} unset"
    )


def answers_hello(host: str, port: int, suites: str) -> bool:
    """Whether a TLS server there agrees to TLS 1.2 with one of these suites (OpenSSL's words). Reads no further
    than its first message: what comes after needs a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = (
        False,
        ssl.CERT_NONE,
    )  # asked is what it takes, not who it is
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(suites)
    context.set_alpn_protocols(["h2"])
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    start = b""
    with socket.create_connection((host, port), timeout=PROBE_S) as connection:
        connection.sendall(outgoing.read())
        while len(start) < 6 and (more := connection.recv(16)):
            start += more
    return len(start) >= 6 and (start[0], start[5]) == SERVER_HELLO


def address_of(text: str) -> tuple[str, int]:
    """(host, port); port 0 when there is none that could be one."""
    host, _, port = text.rpartition(":")
    number = int(port) if port.isascii() and port.isdigit() else 0
    return host, number if number <= PORT_MAX else 0


def _pem(name: str, path: str, mark: bytes) -> bytes:
    variable = f"FABRIC_{name.upper()}"
    if not path:
        raise SettingsError(
            f"{name} is not set, and TLS needs it: set {variable}; `fabric broker certificates` makes the files"
        )
    try:
        text = Path(path).read_bytes()
    except OSError as fault:
        raise SettingsError(
            f"{name} {path} cannot be read ({fault.strerror}): set {variable}"
        ) from fault
    if mark not in text:
        raise SettingsError(f"{name} {path} is not the PEM file it should be: set {variable}")
    return text
