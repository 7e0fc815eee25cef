"""Certificates for a broker that serves other machines: a private CA, the broker's own, one a client role.

The folder is a small registry: what is there is kept, what is missing is made with the CA that is there, so that
another tenant or machine is added by running it again. Nothing is overwritten. Private keys are made with mode 600;
`ca.key` belongs on no machine that serves or works. Makes certificates only; who checks them is transport.py and roles.py.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from fabric_pipelines.broker.roles import EVERY_TENANT, SCHEME, certified
from fabric_pipelines.clock import SYSTEM_CLOCK, Clock
from fabric_pipelines.errors import MissingDependency, StorageFailed, UsageError, WrongRole

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

CA, BROKER = "ca", "broker"
CA_DAYS = 3650
SKEW = timedelta(minutes=5)  # a machine whose clock is behind must take them too
LOCAL_NAMES = ("localhost", "127.0.0.1")
EVERYWHERE = (f"{EVERY_TENANT}/consumer", f"{EVERY_TENANT}/completion", f"{EVERY_TENANT}/admin")


@dataclass(frozen=True, slots=True)
class Issued:
    """One certificate of the folder. names: its subject alternative names; made: now, or there before."""

    name: str
    certificate: Path
    key: Path
    names: tuple[str, ...]
    made: bool


def make(
    folder: Path,
    *,
    hosts: Sequence[str],
    clients: Sequence[str],
    days: int = 365,
    clock: Clock = SYSTEM_CLOCK,
) -> list[Issued]:
    """See to it that `folder` holds a CA, the broker's certificate for `hosts` (names or addresses by which other
    machines reach it) and one for each of `clients`, "<tenant>/<role>[+<role>]" or "<role>" for every tenant.

    Raises UsageError for a client, host or number of days that cannot be one, MissingDependency without
    `cryptography`, StorageFailed where the folder cannot be written or a pair of files is not whole.
    """
    if not 0 < days <= CA_DAYS:
        raise UsageError(f"a certificate cannot hold for {days} days: 1 to {CA_DAYS} are possible")
    wanted = [(BROKER, tuple(dict.fromkeys((*hosts, *LOCAL_NAMES))))]
    for client in clients:
        uri = _uri(client)
        wanted.append((_file_name(uri), (uri,)))
    try:
        issuer = _Issuer(folder, clock)
    except ImportError as fault:
        raise MissingDependency("cryptography", "fleet", "making certificates") from fault
    return [issuer.authority, *(issuer.issue(name, names, days) for name, names in wanted)]


def _uri(client: str) -> str:
    tenant, slash, roles = client.rpartition("/")
    uri = f"{SCHEME}{tenant if slash else EVERY_TENANT}/{roles}"
    try:
        certified(uri.encode())
    except WrongRole as fault:
        raise UsageError(f"no certificate can be made for {client!r}: {fault}") from fault
    return uri


def _file_name(uri: str) -> str:
    """fabric://*/consumer: "consumer"; fabric://acme/producer: "acme-producer"."""
    tenant, _, roles = uri.removeprefix(SCHEME).partition("/")
    return roles if tenant == EVERY_TENANT else f"{tenant}-{roles}"


class _Issuer:
    """The CA of one folder."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        from cryptography import x509

        self._x509, self._folder = x509, folder
        self._now = datetime.fromtimestamp(clock.wall_us() / 1e6, UTC)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._key, self._certificate, made = self._own()
        self.authority = Issued(CA, *self._paths(CA), (), made)

    def issue(self, name: str, names: tuple[str, ...], days: int) -> Issued:
        certificate, key = self._paths(name)
        if found := self._found(name):
            return Issued(name, certificate, key, self._names_of(found[0]), made=False)
        until = min(self._now + timedelta(days=days), self._certificate.not_valid_after_utc)
        private, made = self._signed(name, names, until)
        self._write(name, private, made)
        return Issued(name, certificate, key, names, made=True)

    def _own(self) -> tuple[EllipticCurvePrivateKey, x509.Certificate, bool]:
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        if found := self._found(CA):
            key = load_pem_private_key(found[1].read_bytes(), None)
            if not isinstance(key, EllipticCurvePrivateKey):
                raise UsageError(
                    f"{found[1]} is not a key that was made here: choose another folder"
                )
            return key, self._x509.load_pem_x509_certificate(found[0].read_bytes()), False
        private, certificate = self._signed(CA, (), self._now + timedelta(days=CA_DAYS))
        self._write(CA, private, certificate)
        return private, certificate, True

    def _signed(
        self, name: str, names: tuple[str, ...], until: datetime
    ) -> tuple[EllipticCurvePrivateKey, x509.Certificate]:
        """A new key and its certificate, by the CA, or by itself if that is what it is."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

        x509 = self._x509
        key = ec.generate_private_key(ec.SECP256R1())
        own = name == CA
        title = "fabric-pipelines private CA" if own else f"fabric-pipelines {name}"[:64]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, title)])
        issuer_key = key if own else self._key
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject if own else self._certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._now - SKEW)
            .not_valid_after(until)
            .add_extension(x509.BasicConstraints(own, 0 if own else None), critical=True)
            .add_extension(_usage(own), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), False
            )
        )
        if not own:
            # A broker's certificate opens no door as a client, nor the other way round.
            use = (
                ExtendedKeyUsageOID.SERVER_AUTH
                if name == BROKER
                else ExtendedKeyUsageOID.CLIENT_AUTH
            )
            builder = builder.add_extension(x509.ExtendedKeyUsage([use]), critical=False)
            general = [_general_name(each) for each in names]
            builder = builder.add_extension(x509.SubjectAlternativeName(general), critical=False)
        return key, builder.sign(issuer_key, hashes.SHA256())

    def _paths(self, name: str) -> tuple[Path, Path]:
        return self._folder / f"{name}.pem", self._folder / f"{name}.key"

    def _found(self, name: str) -> tuple[Path, Path] | None:
        paths = self._paths(name)
        there = [path for path in paths if path.exists()]
        if len(there) == 1:
            raise StorageFailed(
                f"{there[0]} is there without the other file of its pair: restore that, or remove it"
            )
        return paths if there else None

    def _names_of(self, path: Path) -> tuple[str, ...]:
        certificate = self._x509.load_pem_x509_certificate(path.read_bytes())
        found = certificate.extensions.get_extension_for_class(self._x509.SubjectAlternativeName)
        return tuple(str(each.value) for each in found.value)

    def _write(
        self, name: str, key: EllipticCurvePrivateKey, certificate: x509.Certificate
    ) -> None:
        from cryptography.hazmat.primitives import serialization

        path, key_path = self._paths(name)
        pem = serialization.Encoding.PEM
        secret = key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        _create(key_path, secret, 0o600)
        _create(path, certificate.public_bytes(pem), 0o644)


def _create(path: Path, content: bytes, mode: int) -> None:
    """A file that was not there, durable on return."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _usage(own: bool) -> x509.KeyUsage:
    from cryptography.x509 import KeyUsage

    return KeyUsage(
        digital_signature=not own,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=own,
        crl_sign=own,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    from cryptography import x509

    if name.startswith(SCHEME):
        return x509.UniformResourceIdentifier(name)
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return x509.DNSName(name)
    except ValueError as fault:
        raise UsageError(f"{name!r} is neither a host name nor an address") from fault
