"""Handshake: why a connection under TLS does not come about, asked once more in our own words.

A client of gRPC is told "unavailable" with a chopped line of its TLS library, and of its own certificate's refusal
not even that: the server judges it after the client's handshake is over, and hangs up. Python's `ssl` tells the cases
apart, so after a failure the same handshake is made with it and one byte more is waited for; a server that hangs up
then refused us, and why is found by judging our certificate here, as it does there.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from fabric_pipelines.broker.transport import TLS, Credentials, address_of
from fabric_pipelines.errors import BrokerUnavailable, NotTrusted

WAIT_S = 3.0
EXPIRED, NOT_YET, WRONG_HOST, WRONG_ADDRESS = 10, 9, 62, 64  # OpenSSL: X509_V_ERR_*
ROUNDS_MAX = 8  # of a handshake; three are enough
RENEW = "make a new one with `fabric broker certificates`"


def why_refused(endpoint: str, credentials: Credentials) -> BrokerUnavailable:
    """The one thing that stands in the way: NotTrusted with whose certificate and what to do about it, or that nobody
    answers there."""
    host, port = address_of(endpoint.removeprefix(TLS))
    host = host.strip("[]")
    try:
        accepted = _shake(host, port, _context(credentials))
    except ssl.SSLCertVerificationError as fault:
        return NotTrusted(_of_theirs(endpoint, host, fault))
    except ssl.SSLError as fault:
        if fault.reason == "KEY_VALUES_MISMATCH":
            return NotTrusted(
                "FABRIC_TLS_KEY is not the key of the certificate in FABRIC_TLS_CERT: take both from one pair"
            )
        return BrokerUnavailable(
            f"what answers at {endpoint} does not speak TLS as a broker does ({fault.reason or fault}): correct "
            "FABRIC_BROKER_URL"
        )
    except socket.gaierror:
        return BrokerUnavailable(
            f"no machine is known as {host!r}, where FABRIC_BROKER_URL {endpoint} looks for a broker: correct it"
        )
    except TimeoutError:
        return BrokerUnavailable(
            f"nothing answers at {endpoint} within {WAIT_S:.0f} s: see that the broker runs there with "
            "FABRIC_BROKER_LISTEN, and that no firewall is between"
        )
    except OSError as fault:
        return BrokerUnavailable(
            f"no broker answers at {endpoint} ({fault.strerror or fault}): start it there with FABRIC_BROKER_LISTEN set"
        )
    if not accepted:
        return NotTrusted(_of_ours(endpoint, credentials))
    return BrokerUnavailable(
        f"the broker at {endpoint} takes this certificate and did not answer: try again, and see its log"
    )


def _of_theirs(endpoint: str, host: str, fault: ssl.SSLCertVerificationError) -> str:
    theirs = f"the certificate of the broker at {endpoint}"
    if fault.verify_code == EXPIRED:
        return f"{theirs} is past its end: {RENEW} there, from the same CA, and restart the broker"
    if fault.verify_code == NOT_YET:
        return f"{theirs} does not hold yet: set the clocks of both machines"
    if fault.verify_code in (WRONG_HOST, WRONG_ADDRESS):
        return (
            f"{theirs} is not for {host!r}: reach it by a name that is in it, or make one with `fabric broker "
            f"certificates --host {host}`"
        )
    return (
        f"{theirs} is not of the CA in FABRIC_TLS_CA ({fault.verify_message}): copy ca.pem from the folder that the "
        "broker's own certificate came from"
    )


def _of_ours(endpoint: str, credentials: Credentials) -> str:
    ours = f"the broker at {endpoint} refused this machine's certificate (FABRIC_TLS_CERT), which"
    code = _judged_here(credentials)
    if code == EXPIRED:
        return f"{ours} is past its end: {RENEW}, from the same CA"
    if code == NOT_YET:
        return f"{ours} does not hold yet: set the clocks of both machines"
    if code:
        return (
            f"{ours} is not of the CA in FABRIC_TLS_CA: take FABRIC_TLS_CERT and FABRIC_TLS_KEY from the folder that "
            "the broker's own certificate came from"
        )
    return f"{ours} is good here: see that the broker's own FABRIC_TLS_CA is that of this machine"


def _judged_here(credentials: Credentials) -> int:
    """OpenSSL's verdict on our certificate, asked by a server in this process that trusts our CA; 0 if it is good."""
    judge = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    judge.verify_mode = ssl.CERT_REQUIRED
    _load(judge, credentials)
    judge.maximum_version = (
        ssl.TLSVersion.TLSv1_2
    )  # in which the certificate is part of the handshake
    shown = _context(credentials)
    shown.check_hostname, shown.verify_mode = False, ssl.CERT_NONE
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (shown.wrap_bio(down, up), judge.wrap_bio(up, down, server_side=True))
    for _ in range(ROUNDS_MAX):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as fault:
                return int(fault.verify_code)
    return 0


def _shake(host: str, port: int, context: ssl.SSLContext) -> bool:
    """A whole handshake and, since a refusal comes behind it, whether anything follows."""
    with (
        socket.create_connection((host, port), timeout=WAIT_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as wrapped,
    ):
        try:
            return bool(wrapped.recv(1))
        except (ssl.SSLError, ConnectionResetError):
            return False


def _context(credentials: Credentials) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    _load(context, credentials)
    return context


def _load(context: ssl.SSLContext, credentials: Credentials) -> None:
    context.load_verify_locations(cadata=credentials.ca.decode("ascii", "replace"))
    with _as_file(credentials.chain) as chain, _as_file(credentials.key) as key:
        context.load_cert_chain(chain, key)


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """A path for `ssl`, which takes nothing else; the content stays in memory."""
    fd = os.memfd_create("fabric-tls", os.MFD_CLOEXEC)
    try:
        os.write(fd, content)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
