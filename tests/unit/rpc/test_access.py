"""Tokens, their roles, and what each call needs."""

import hashlib
import importlib
import pkgutil
from contextvars import copy_context

import pytest
from google.protobuf.descriptor_pb2 import MethodOptions

import relaxd.v1
from relaxd.roles import COORDINATOR, REPLICA_ROLES
from relaxd.rpc.access import (
    ADMIN,
    KNOWN_TOKENS,
    READ,
    REPLICA,
    TOKEN_ROLES,
    AccessTokens,
    callers,
    callers_of,
    may_repeat,
    methods,
    needs_term,
    path,
    speak_for,
)
from relaxd.rpc.credentials import ServerSecurity, is_loopback
from relaxd.rpc.errors import PermissionDenied, ServerError, Unauthenticated
from relaxd.rpc.tls import TlsFiles
from tests.kit.cases import each

READ_TOKEN, REWARD_TOKEN, TRAINER_TOKEN, ADMIN_TOKEN = "r" * 32, "s" * 32, "t" * 32, "a" * 32
GET, HEARTBEAT, ANNOUNCE, START = (
    f"/relaxd.v1.Coordinator/{name}" for name in ("GetRun", "Heartbeat", "AnnounceVersion", "StartRun")
)
ASK, DRAIN = "/relaxd.v1.Judge/Ask", "/relaxd.v1.Replica/Drain"
REFLECT = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"


def every_call() -> set[tuple[str, str]]:
    """(service, method) of everything in protos/relaxd/v1 that relaxd serves."""
    found = set()
    for module in pkgutil.iter_modules(relaxd.v1.__path__):
        served_by_users = module.name in ("remote_reward_pb2", "environment_pb2")
        if module.name.endswith("_pb2") and not served_by_users:
            services = importlib.import_module(f"relaxd.v1.{module.name}").DESCRIPTOR.services_by_name.values()
            found |= {(service.full_name, method.name) for service in services for method in service.methods}
    return found


def test_every_method_says_who_may_call_it():
    found = {(method.containing_service.full_name, method.name): method for method in methods()}
    assert set(found) == every_call(), "relaxd/rpc/access.py: a file of protos/relaxd/v1 is missing"
    silent = [place for place, method in found.items() if not callers(method)]
    assert not silent, "these methods need `option (callers)` in their protos"
    unknown = {name for method in found.values() for name in callers(method)} - {*TOKEN_ROLES, REPLICA, "parent"}
    assert not unknown, "protos/relaxd/v1/access.proto doesn't say what these are"
    for (_, name), method in found.items():
        if callers(method) != ("parent",):
            looks = name.startswith(("Get", "List", "Watch", "Is"))
            assert (READ in callers(method)) == looks, name
            assert looks == (method.GetOptions().idempotency_level == MethodOptions.NO_SIDE_EFFECTS), name


def test_grpc_repeats_reads_and_what_comes_to_the_same():
    repeated = {method.name for method in methods() if may_repeat(method)}
    assert {"GetRun", "ListReplicas", "GetStatus", "LeaseGpus", "StartRun"} <= repeated
    assert not repeated & {"WatchRun", "WatchReplicas", "Generate", "Score", "Heartbeat", "Restart", "Launch"}


def test_orders_to_replicas_and_launchers_carry_a_term():
    orders = {path(method).removeprefix("/relaxd.v1.") for method in methods() if needs_term(path(method))}
    assert {"Replica/Drain", "Rollout/PauseGeneration", "Trainer/ExportHuggingFace", "Launcher/Remove"} <= orders
    assert not {service for service, _, _ in (order.partition("/") for order in orders)} & {"Coordinator", "Reward"}
    assert not orders & {"Rollout/Generate", "Replica/GetStatus", "Trainer/GetWeightManifest"}


@pytest.mark.parametrize(
    ("role", "calls"),
    [
        ("reward", {"Coordinator/WatchReplicas", "Judge/Ask"}),  # who is a judge, and what it says
        ("agent", {"Coordinator/WatchReplicas", "Rollout/Generate"}),  # which engines there are, and what they write
        (  # that there are new weights; which hosts there are, and their ranks
            "trainer",
            {
                *("Coordinator/AnnounceVersion", "Coordinator/WatchReplicas", "Ranks/StartRanks"),
                *("Ranks/JoinWeightGroup", "Ranks/BroadcastVersions", "Ranks/LeaveWeightGroup"),
            },
        ),
        *((role, set()) for role in ("ranks", "rollout", "advantage", "reference", "teacher", "critic", "judge")),
    ],
)
def test_a_role_may_call_what_it_needs(role, calls):
    itself = {"Register", "Heartbeat", "LeaseGpus", "TakeTurn"}
    allowed = {path(method).removeprefix("/relaxd.v1.") for method in methods() if role in callers_of(path(method))}
    assert allowed == calls | {f"Coordinator/{name}" for name in itself}


def test_the_coordinator_gives_orders_and_is_no_admin():
    allowed = {
        path(method).removeprefix("/relaxd.v1.") for method in methods() if COORDINATOR in callers_of(path(method))
    }
    services = {call.partition("/")[0] for call in allowed}
    assert services == {"Replica", "Trainer", "Rollout", "Agent", "Reward", "Judge", "Launcher"}
    looks = {call for call in allowed if not needs_term(f"/relaxd.v1.{call}")}
    assert looks == {
        *("Launcher/ListInstances", "Replica/GetStatus", "Trainer/GetWeightManifest"),
        *("Agent/Converse", "Reward/Score", "Rollout/Generate"),
    }


def test_every_role_of_the_table_has_a_case():
    cases = test_a_role_may_call_what_it_needs.pytestmark[0].args[1]
    assert {role for role, _ in cases} == set(REPLICA_ROLES)


def test_what_nobody_thought_of_is_for_admins():
    assert callers_of("/relaxd.v1.Coordinator/Future") == (ADMIN,)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tokens"
    digest = hashlib.sha256(REWARD_TOKEN.encode()).hexdigest()
    path.write_text(
        f"# who  name  token\nread dashboards {READ_TOKEN}\n\nreward scores sha256:{digest}  # all\n"
        f"trainer trains {TRAINER_TOKEN}\nadmin ann {ADMIN_TOKEN}\n"
    )
    return path


@pytest.mark.parametrize(
    ("token", "allowed", "denied"),
    [
        (READ_TOKEN, (GET, REFLECT), (HEARTBEAT, START, ASK)),
        (REWARD_TOKEN, (HEARTBEAT, ASK, REFLECT), (GET, START, ANNOUNCE, DRAIN)),
        (TRAINER_TOKEN, (HEARTBEAT, ANNOUNCE), (GET, START, ASK, DRAIN)),
        (ADMIN_TOKEN, (GET, HEARTBEAT, ASK, ANNOUNCE, DRAIN, START, REFLECT), ()),
    ],
)
def test_a_token_allows_what_is_for_its_role(file, token, allowed, denied):
    tokens = AccessTokens(file)
    for method in allowed:
        tokens.check(method, f"Bearer {token}")
    for method in denied:
        with pytest.raises(PermissionDenied, match=r'^token "\w+" is for \w+, but /\S+ is for \S+') as caught:
            tokens.check(method, f"Bearer {token}".encode())
        assert token not in caught.value.message


def test_who_may_call_is_said(file):
    with pytest.raises(PermissionDenied) as caught:
        AccessTokens(file).check("/relaxd.v1.Trainer/GetWeightManifest", f"Bearer {TRAINER_TOKEN}")
    assert caught.value.message == (
        'token "trains" is for trainer, but /relaxd.v1.Trainer/GetWeightManifest is for read, coordinator or admin: '
        "call it with such a token"
    )


@pytest.mark.parametrize(
    ("token", "role", "allowed"),
    [
        (None, "trainer", True),  # where calls need none
        (REWARD_TOKEN, "reward", True),
        (REWARD_TOKEN, "trainer", False),
        (TRAINER_TOKEN, "reward", False),
        (READ_TOKEN, "reward", False),
        (ADMIN_TOKEN, "trainer", True),
    ],
)
def test_a_token_speaks_for_replicas_of_its_role(file, token, role, allowed):
    def call():
        if token is not None:
            AccessTokens(file).check(REFLECT, f"Bearer {token}")
        speak_for(role, "register x-1")

    alone = copy_context()
    if allowed:
        alone.run(call)
        return
    with pytest.raises(PermissionDenied) as caught:
        alone.run(call)
    assert f"but to register x-1 is for {role}: give this process a token for {role} (RELAXD_TOKEN_FILE)" in str(
        caught.value
    )


def test_wrong_tokens(file):
    tokens = AccessTokens(file)
    digest = hashlib.sha256(REWARD_TOKEN.encode()).hexdigest()
    for given in (
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Basic {ADMIN_TOKEN}",
        ADMIN_TOKEN,
        f"Bearer {ADMIN_TOKEN}x",
        f"Bearer sha256:{digest}",
    ):
        with pytest.raises(Unauthenticated) as caught:
            tokens.check(GET, given)
        assert ADMIN_TOKEN not in caught.value.message
    with pytest.raises(Unauthenticated):
        tokens.check(GET, b"Bearer \xff\xfe")


def test_one_token_may_do_everything():
    tokens = AccessTokens(token="right")
    for method in (GET, HEARTBEAT, START, "/relaxd.v1.Coordinator/Future"):
        tokens.check(method, "Bearer right")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no token"),
        ("admin ann", "line 1: has 2 words, not three"),
        (f"# ok\nroot ann {ADMIN_TOKEN}", "line 2: role is 'root': it must be one of admin, advantage, "),
        (f"rewards r {ADMIN_TOKEN}", "did you mean 'reward'"),
        ("read r sha256:12", "line 1: sha256: must be followed by 64 hexadecimal digits"),
        (f"read r {READ_TOKEN}\nadmin r {ADMIN_TOKEN}", "line 2: 'r' or its token occurs twice"),
        (f"read r {READ_TOKEN}\nadmin a {READ_TOKEN}", "line 2: 'a' or its token occurs twice"),
        ("read r tokén", "line 1: the token is not printable ASCII"),
    ],
)
def test_a_wrong_file_is_explained_without_its_tokens(tmp_path, text, message):
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        AccessTokens(path)
    assert not any(token in str(caught.value) for token in (READ_TOKEN, ADMIN_TOKEN, "tokén"))


def test_a_changed_file_counts_and_a_broken_one_does_not(file, monkeypatch, caplog):
    monkeypatch.setattr(AccessTokens, "RELOAD_SECONDS", 0.0)
    tokens = AccessTokens(file)
    file.write_text(f"admin bob {'b' * 32}\n")
    tokens.check(START, f"Bearer {'b' * 32}")
    with pytest.raises(Unauthenticated):
        tokens.check(START, f"Bearer {ADMIN_TOKEN}")
    for broken in (lambda: file.write_text("nonsense\n"), file.unlink):
        broken()
        tokens.check(START, f"Bearer {'b' * 32}")
    assert caplog.text.count("still accepting the former tokens") == 2


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "::1", "[::1]"])
def test_loopback(host):
    assert is_loopback(host)
    ServerSecurity().check(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "no-such-host.invalid"])
def test_beyond_loopback_someone_has_to_ask_who_calls(host):
    assert not is_loopback(host)
    for open_doors in (ServerSecurity(), ServerSecurity(tls=TlsFiles(certificate="c", key="k"))):
        with pytest.raises(ServerError, match=r"RELAXD_TOKEN_FILE.*--allow-insecure / RELAXD_ALLOW_INSECURE=1"):
            open_doors.check(host)
    ServerSecurity(AccessTokens(token=ADMIN_TOKEN)).check(host)
    ServerSecurity(tls=TlsFiles(certificate="c", key="k", client_ca="a")).check(host)
    ServerSecurity(allow_insecure=True).check(host)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"read r {READ_TOKEN}\nadmin ann development", '"ann" in .*tokens has 11 characters: it must have 16 or more'),
        ("admin ann sha256:" + hashlib.sha256(b"changeme").hexdigest(), ".* is a well-known word"),
        ("admin ann sha256:" + hashlib.sha256(b"").hexdigest(), ".* is a well-known word"),
    ],
)
def test_beyond_loopback_no_token_may_be_one_that_can_be_guessed(tmp_path, text, told):
    path = tmp_path / "tokens"
    path.write_text(text)
    ServerSecurity(AccessTokens(path)).check("127.0.0.1")
    ServerSecurity(AccessTokens(path), allow_insecure=True).check("0.0.0.0")
    with pytest.raises(ServerError, match=f"refusing to listen on 0.0.0.0: the token {told}.*openssl rand") as caught:
        ServerSecurity(AccessTokens(path), TlsFiles(certificate="c", key="k", client_ca="a")).check("0.0.0.0")
    assert "development" not in str(caught.value)


@each("token", [*KNOWN_TOKENS, "fifteen letters"])
def test_beyond_loopback_the_only_token_is_long(token):
    ServerSecurity(AccessTokens(token=token)).check("127.0.0.1")
    with pytest.raises(ServerError, match=r"RELAXD_TOKEN\(_FILE\) has \d+ characters: it must have 16 or more"):
        ServerSecurity(AccessTokens(token=token)).check("0.0.0.0")


def test_a_changed_file_brings_in_no_token_that_can_be_guessed(file, monkeypatch, caplog):
    monkeypatch.setattr(AccessTokens, "RELOAD_SECONDS", 0.0)
    tokens = AccessTokens(file)
    ServerSecurity(tokens).check("0.0.0.0")
    file.write_text("admin bob short\n")
    tokens.check(START, f"Bearer {ADMIN_TOKEN}")
    with pytest.raises(Unauthenticated):
        tokens.check(START, "Bearer short")
    assert 'still accepting the former tokens: the token "bob"' in caplog.text
