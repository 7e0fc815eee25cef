"""Roles: who a caller is, which calls its role may make, and which tenant's lanes it may reach.

One table, ROLES, asked at one place for every call. Over mutual TLS the certificate says who calls, as its only
subject alternative name:

    fabric://<tenant>/<role>[+<role>...]         fabric://acme/producer     fabric://*/consumer

and nothing that is declared counts. gRPC hands over the first name alone, whatever its kind, and the subject's
common name where there is none; a name of any other form is refused, and the CA must be the fabric's own. On this
machine the caller declares its role, which guards against mistakes; who may connect at all is the socket file's
permission to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from fabric_pipelines.broker.fields import shown
from fabric_pipelines.errors import WrongRole, WrongTenant
from fabric_pipelines.settings import TENANT

EVERY_TENANT = "*"
SCHEME = "fabric://"

PRODUCER, CONSUMER, COMPLETION, ADMIN = "producer", "consumer", "completion", "admin"
ALL = frozenset({PRODUCER, CONSUMER, COMPLETION, ADMIN})
ALIASES: Mapping[str, str] = {"worker": CONSUMER}
WHOLE_BROKER = frozenset(
    {COMPLETION, ADMIN}
)  # act on everything, so no one tenant's certificate has them

ROLES: Mapping[str, frozenset[str]] = {
    "hello": ALL,
    "submission": ALL,
    "status": ALL,
    "verify": frozenset({ADMIN}),
    "scrub": frozenset({ADMIN}),
    "drain": frozenset({ADMIN}),
    "states": frozenset({ADMIN}),
    "requeue": frozenset({ADMIN}),
    "settled": frozenset({COMPLETION, ADMIN}),
    "settled_sums": frozenset({COMPLETION, ADMIN}),
    "submit": frozenset({PRODUCER}),
    "close": frozenset({PRODUCER, ADMIN}),
    "abandon": frozenset({PRODUCER, ADMIN}),
    "attach": frozenset({CONSUMER}),
    "lease": frozenset({CONSUMER}),
    "renew": frozenset({CONSUMER}),
    "computed": frozenset({CONSUMER}),
    "nack": frozenset({CONSUMER}),
    "detach": frozenset({CONSUMER, COMPLETION}),
    "pull": frozenset({COMPLETION}),
    "release": frozenset({COMPLETION}),
    "settle": frozenset({COMPLETION}),
}


@dataclass(frozen=True, slots=True)
class Identity:
    """tenant: whose lanes it reaches, or EVERY_TENANT. name: as it is told in errors."""

    tenant: str
    roles: frozenset[str]
    name: str

    @property
    def bound(self) -> bool:
        """To one tenant."""
        return self.tenant != EVERY_TENANT

    def session(self, name: str) -> str:
        """A session's name as the broker knows it: no tenant can speak for another's session."""
        return f"{self.tenant}/{name}" if self.bound else name


def declared(role: object) -> Identity:
    """A caller on this machine, which reaches every tenant's lanes. WrongRole for a role that does not exist."""
    known = ALIASES.get(role, role) if isinstance(role, str) else ""
    if known not in ALL:
        raise WrongRole(f"there is no role {shown(role)}: roles are {', '.join(sorted(ALL))}")
    return Identity(EVERY_TENANT, frozenset({known}), f"role {role!r}")


@lru_cache(maxsize=1024)
def certified(peer_identity: bytes) -> Identity:
    """The caller that a verified certificate names. WrongRole for a name of another form."""
    name = peer_identity.decode("utf-8", "replace")
    tenant, slash, word = name.removeprefix(SCHEME).partition("/")
    roles = frozenset(word.split("+"))
    if (
        not name.startswith(SCHEME)
        or not slash
        or not roles <= ALL
        or not (tenant == EVERY_TENANT or TENANT.fullmatch(tenant))
    ):
        raise WrongRole(
            f"the certificate's first subject alternative name is {name[:120]!r}, not {SCHEME}<tenant>/<role> "
            f"with roles of {', '.join(sorted(ALL))}: `fabric broker certificates` makes one that is"
        )
    if tenant != EVERY_TENANT and roles & WHOLE_BROKER:
        raise WrongRole(
            f"the certificate {name!r} gives {' and '.join(sorted(roles & WHOLE_BROKER))} to one tenant, but they act "
            f"on all: it must be {SCHEME}{EVERY_TENANT}/{word}"
        )
    return Identity(tenant, roles, f"certificate {name!r}")


def require_role(who: Identity, call: str) -> None:
    """WrongRole unless `who` may make this call."""
    allowed = ROLES[call]
    if not who.roles & allowed:
        raise WrongRole(
            f"{who.name} may not {call}: only {', '.join(sorted(allowed))} may; come with a certificate of such a "
            "role (`fabric broker certificates --client` makes them)"
        )


def require_tenant(who: Identity, tenant: str, what: str) -> None:
    """WrongTenant unless `who` may reach what belongs to `tenant`."""
    if who.bound and who.tenant != tenant:
        raise WrongTenant(
            f"{what} is of another tenant than {who.name}, which is of {who.tenant!r}: set "
            f"FABRIC_TENANT={who.tenant}, or use that tenant's certificate"
        )
