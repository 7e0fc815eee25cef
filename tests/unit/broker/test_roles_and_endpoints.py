"""Who a certificate says it is, what a role may do, and which endpoints there are."""

from __future__ import annotations

import pytest

from fabric_pipelines.broker.roles import (
    ALL,
    ROLES,
    WHOLE_BROKER,
    certified,
    declared,
    require_role,
    require_tenant,
)
from fabric_pipelines.broker.transport import (
    AEAD_SUITES,
    Credentials,
    call_path,
    require_listen,
    require_local,
    require_reachable,
)
from fabric_pipelines.errors import FabricError, SettingsError, WrongRole, WrongTenant

PAPERS = Credentials(b"ca", b"chain", b"key")


@pytest.mark.parametrize(
    ("name", "tenant", "roles"),
    [
        (b"fabric://acme/producer", "acme", {"producer"}),
        (b"fabric://acme/producer+consumer", "acme", {"producer", "consumer"}),
        (b"fabric://*/consumer", "*", {"consumer"}),
        (b"fabric://*/admin+completion", "*", {"admin", "completion"}),
        (b"fabric://a.b-c_d9/producer", "a.b-c_d9", {"producer"}),
    ],
)
def test_a_certificates_name_is_tenant_and_roles(name: bytes, tenant: str, roles: set[str]) -> None:
    who = certified(name)
    assert (who.tenant, who.roles) == (tenant, roles)
    assert who.bound == (tenant != "*")


@pytest.mark.parametrize(
    "name",
    [
        b"",
        b"broker.example",
        b"fabric://acme",
        b"fabric:///producer",
        b"fabric://acme/",
        b"fabric://acme/owner",
        b"fabric://acme/producer+owner",
        b"fabric://acme/producer/admin",
        b"fabric://acme/Producer",
        b"fabric://a/b/producer",
        b"fabric://acme /producer",
        b"fabric://**/producer",
        b"FABRIC://acme/producer",
        b"xfabric://acme/producer",
        b"fabric://acme/worker",
        b"fabric://" + b"a" * 65 + b"/producer",
        b"fabric://\xff/producer",
        b"fabric://acme/admin",
        b"fabric://acme/completion",
        b"fabric://acme/producer+admin",
    ],
)
def test_any_other_name_is_nobody(name: bytes) -> None:
    with pytest.raises(WrongRole, match="certificate"):
        certified(name)


def test_every_call_has_a_role_and_every_role_a_call() -> None:
    assert all(roles and roles <= ALL for roles in ROLES.values())
    assert set().union(*ROLES.values()) == ALL
    for call in ("settle", "settled", "settled_sums", "pull", "verify", "scrub", "drain"):
        assert ROLES[call] <= WHOLE_BROKER, "acts on every tenant's work"


@pytest.mark.parametrize("call", sorted(ROLES))
@pytest.mark.parametrize("role", sorted(ALL))
def test_the_table_decides_and_a_refusal_names_role_and_call(role: str, call: str) -> None:
    if role in ROLES[call]:
        require_role(declared(role), call)
        assert role in ROLES[call]
        return
    with pytest.raises(WrongRole, match=rf"'{role}' may not {call}: only "):
        require_role(declared(role), call)


def test_several_roles_may_do_what_any_of_them_may() -> None:
    both = certified(b"fabric://acme/producer+consumer")
    for call in ("submit", "lease"):
        require_role(both, call)
    with pytest.raises(WrongRole):
        require_role(both, "settle")


def test_a_tenant_reaches_its_own_and_no_session_of_anothers_has_its_name() -> None:
    acme, beta, everyone = (
        certified(b"fabric://%b/consumer" % t) for t in (b"acme", b"beta", b"*")
    )
    require_tenant(acme, "acme", "a lane")
    require_tenant(everyone, "acme", "a lane")
    with pytest.raises(WrongTenant, match="FABRIC_TENANT=acme"):
        require_tenant(acme, "beta", "a lane")
    assert len({who.session("w") for who in (acme, beta, everyone)}) == 3


@pytest.mark.parametrize(
    ("endpoint", "local", "reachable", "listen"),
    [
        ("grpc+unix:///run/b.sock", True, True, True),
        ("grpc://127.0.0.1:1", True, True, True),
        ("grpc://localhost:1", True, True, True),
        ("grpc://[::1]:1", True, True, True),
        ("grpc+tls://broker.lan:8471", False, True, True),
        ("grpc+tls://0.0.0.0:8471", False, True, True),
        ("grpc+tls://[::]:8471", False, True, True),
        ("grpc+unix:///run/a b.sock", False, False, False),
        ("grpc://0.0.0.0:1", False, False, False),
        ("grpc://127.0.0.1.example:1", False, False, False),
        ("grpc://10.0.0.1:1", False, False, False),
        ("grpc://127.0.0.1", False, False, False),
        ("grpc://127.0.0.1:0", False, False, False),
        ("grpc://127.0.0.1:99999", False, False, False),
        ("grpc://127.0.0.1:x", False, False, False),
        ("grpc+tcp://127.0.0.1:1", False, False, False),
        ("grpc+tls://broker.lan", False, False, False),
        ("grpc+tls://:8471", False, False, False),
        ("http://broker.lan:1", False, False, False),
        ("", False, False, False),
    ],
)
def test_an_endpoint_is_local_or_mutual_tls_or_refused(
    endpoint: str, local: bool, reachable: bool, listen: bool
) -> None:
    found = []
    for check in (
        lambda: require_local(endpoint),
        lambda: require_reachable(endpoint, PAPERS),
        lambda: require_listen(endpoint, PAPERS),
    ):
        try:
            found.append(check() == endpoint)
        except FabricError as fault:
            assert isinstance(fault, SettingsError)  # noqa: PT017 - the type is what is asked
            found.append(False)
    assert found == [local, reachable, listen]


def test_without_papers_tls_is_neither_reached_nor_served() -> None:
    for check in (require_reachable, require_listen):
        with pytest.raises(SettingsError, match="FABRIC_TLS_CA"):
            check("grpc+tls://broker.lan:8471", None)


def test_calls_have_a_socket_of_their_own_beside_a_unix_socket_only() -> None:
    assert str(call_path("grpc+unix:///run/b.sock")) == "/run/b.call"
    assert call_path("grpc://127.0.0.1:1") is None
    assert call_path("grpc+tls://broker.lan:8471") is None


def test_every_suite_of_ours_encrypts_with_authentication_and_keeps_no_old_session_readable() -> (
    None
):
    suites = AEAD_SUITES.split(":")
    assert len(suites) == len(set(suites)) == 4
    assert all(suite.startswith("ECDHE-") and "GCM" in suite for suite in suites)
