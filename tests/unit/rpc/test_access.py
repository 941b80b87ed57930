"""Tokens, their roles, and what each call needs."""

import hashlib
import importlib
import pkgutil

import pytest
from google.protobuf.descriptor_pb2 import MethodOptions

import relaxd.v1
from relaxd.rpc.access import KNOWN_TOKENS, Access, Tokens, least_access
from relaxd.rpc.errors import PermissionDenied, ServerError, Unauthenticated
from relaxd.rpc.methods import access, may_repeat, methods, needs_term, path
from relaxd.rpc.security import ServerSecurity, is_loopback
from relaxd.rpc.tls import TlsFiles
from relaxd.v1 import access_pb2

READ, SERVICE, ADMIN = "r" * 32, "s" * 32, "a" * 32
GET, HEARTBEAT, START = (f"/relaxd.v1.Coordinator/{name}" for name in ("GetRun", "Heartbeat", "StartRun"))


def every_call() -> set[tuple[str, str]]:
    """(service, method) of everything in protos/relaxd/v1 that relaxd serves."""
    found = set()
    for module in pkgutil.iter_modules(relaxd.v1.__path__):
        if module.name.endswith("_pb2") and module.name != "remote_reward_pb2":  # users serve that one
            services = importlib.import_module(f"relaxd.v1.{module.name}").DESCRIPTOR.services_by_name.values()
            found |= {(service.full_name, method.name) for service in services for method in service.methods}
    return found


def test_every_method_says_who_may_call_it():
    found = {(method.containing_service.full_name, method.name): method for method in methods()}
    assert set(found) == every_call(), "relaxd/rpc/methods.py: a file of protos/relaxd/v1 is missing"
    silent = [place for place, method in found.items() if access(method) == access_pb2.ACCESS_UNSPECIFIED]
    assert not silent, "these methods need `option (access)` in their protos"
    reads = {place for place, method in found.items() if access(method) == access_pb2.ACCESS_READ}
    assert reads == {
        place
        for place, method in found.items()
        if method.GetOptions().idempotency_level == MethodOptions.NO_SIDE_EFFECTS
    }


def test_grpc_repeats_reads_and_what_comes_to_the_same():
    repeated = {method.name for method in methods() if may_repeat(method)}
    assert {"GetRun", "ListReplicas", "GetStatus", "LeaseGpus", "StartRun"} <= repeated
    assert not repeated & {"WatchRun", "Generate", "Score", "Heartbeat", "Restart", "Launch"}


def test_orders_to_replicas_and_launchers_carry_a_term():
    orders = {path(method).removeprefix("/relaxd.v1.") for method in methods() if needs_term(path(method))}
    assert {"Replica/Drain", "Rollout/PauseGeneration", "Trainer/ExportHuggingFace", "Launcher/Remove"} <= orders
    assert not {service for service, _, _ in (order.partition("/") for order in orders)} & {"Coordinator", "Reward"}
    assert not orders & {"Rollout/Generate", "Replica/GetStatus", "Trainer/GetWeightManifest"}


def test_looking_needs_read_and_what_nobody_thought_of_needs_admin():
    for service, name in every_call():
        looks = name.startswith(("Get", "List", "Watch"))
        assert (least_access(f"/{service}/{name}") is Access.READ) == looks, name
    assert least_access("/relaxd.v1.Coordinator/Future") is Access.ADMIN


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tokens"
    digest = hashlib.sha256(SERVICE.encode()).hexdigest()
    path.write_text(
        f"# who  name  token\nread dashboards {READ}\n\nservice fleet sha256:{digest}  # all\nadmin ann {ADMIN}\n"
    )
    return path


@pytest.mark.parametrize(
    ("token", "allowed", "denied"),
    [(READ, (GET,), (HEARTBEAT, START)), (SERVICE, (GET, HEARTBEAT), (START,)), (ADMIN, (GET, HEARTBEAT, START), ())],
)
def test_a_role_may_do_what_the_ones_below_it_may(file, token, allowed, denied):
    tokens = Tokens(file)
    for method in allowed:
        tokens.check(method, f"Bearer {token}")
    for method in denied:
        with pytest.raises(PermissionDenied, match=r'token "\w+" has role (read|service), but .* needs \w+$') as caught:
            tokens.check(method, f"Bearer {token}".encode())
        assert token not in caught.value.message


def test_wrong_tokens(file):
    tokens = Tokens(file)
    digest = hashlib.sha256(SERVICE.encode()).hexdigest()
    for given in (
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Basic {ADMIN}",
        ADMIN,
        f"Bearer {ADMIN}x",
        f"Bearer sha256:{digest}",
    ):
        with pytest.raises(Unauthenticated) as caught:
            tokens.check(GET, given)
        assert ADMIN not in caught.value.message
    with pytest.raises(Unauthenticated):
        tokens.check(GET, b"Bearer \xff\xfe")


def test_one_token_may_do_everything():
    tokens = Tokens(token="right")
    for method in (GET, HEARTBEAT, START, "/relaxd.v1.Coordinator/Future"):
        tokens.check(method, "Bearer right")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no token"),
        ("admin ann", "line 1: has 2 words, not three"),
        (f"# ok\nroot ann {ADMIN}", "line 2: role is 'root'"),
        ("read r sha256:12", "line 1: sha256: must be followed by 64 hexadecimal digits"),
        (f"read r {READ}\nadmin r {ADMIN}", "line 2: 'r' or its token occurs twice"),
        (f"read r {READ}\nadmin a {READ}", "line 2: 'a' or its token occurs twice"),
        ("read r tokén", "line 1: the token is not printable ASCII"),
    ],
)
def test_a_wrong_file_is_explained_without_its_tokens(tmp_path, text, message):
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        Tokens(path)
    assert not any(token in str(caught.value) for token in (READ, ADMIN, "tokén"))


def test_a_changed_file_counts_and_a_broken_one_does_not(file, monkeypatch, caplog):
    monkeypatch.setattr(Tokens, "RELOAD_SECONDS", 0.0)
    tokens = Tokens(file)
    file.write_text(f"admin bob {'b' * 32}\n")
    tokens.check(START, f"Bearer {'b' * 32}")
    with pytest.raises(Unauthenticated):
        tokens.check(START, f"Bearer {ADMIN}")
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
    ServerSecurity(Tokens(token=ADMIN)).check(host)
    ServerSecurity(tls=TlsFiles(certificate="c", key="k", client_ca="a")).check(host)
    ServerSecurity(allow_insecure=True).check(host)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"read r {READ}\nadmin ann development", '"ann" in .*tokens has 11 characters: it must have 16 or more'),
        ("admin ann sha256:" + hashlib.sha256(b"changeme").hexdigest(), ".* is a well-known word"),
        ("admin ann sha256:" + hashlib.sha256(b"").hexdigest(), ".* is a well-known word"),
    ],
)
def test_beyond_loopback_no_token_may_be_one_that_can_be_guessed(tmp_path, text, told):
    path = tmp_path / "tokens"
    path.write_text(text)
    ServerSecurity(Tokens(path)).check("127.0.0.1")
    ServerSecurity(Tokens(path), allow_insecure=True).check("0.0.0.0")
    with pytest.raises(ServerError, match=f"refusing to listen on 0.0.0.0: the token {told}.*openssl rand") as caught:
        ServerSecurity(Tokens(path), TlsFiles(certificate="c", key="k", client_ca="a")).check("0.0.0.0")
    assert "development" not in str(caught.value)


@pytest.mark.parametrize("token", [*KNOWN_TOKENS, "fifteen letters"])
def test_beyond_loopback_the_only_token_is_long(token):
    ServerSecurity(Tokens(token=token)).check("127.0.0.1")
    with pytest.raises(ServerError, match=r"RELAXD_TOKEN\(_FILE\) has \d+ characters: it must have 16 or more"):
        ServerSecurity(Tokens(token=token)).check("0.0.0.0")


def test_a_changed_file_brings_in_no_token_that_can_be_guessed(file, monkeypatch, caplog):
    monkeypatch.setattr(Tokens, "RELOAD_SECONDS", 0.0)
    tokens = Tokens(file)
    ServerSecurity(tokens).check("0.0.0.0")
    file.write_text("admin bob short\n")
    tokens.check(START, f"Bearer {ADMIN}")
    with pytest.raises(Unauthenticated):
        tokens.check(START, "Bearer short")
    assert 'still accepting the former tokens: the token "bob"' in caplog.text
