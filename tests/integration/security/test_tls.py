"""TLS and mutual TLS over real connections, and what people are told when it doesn't work."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from relaxd.rpc.access import AccessTokens
from relaxd.rpc.client import channel, sync_channel
from relaxd.rpc.credentials import ServerSecurity
from relaxd.rpc.server import RunningServer, start_server
from relaxd.rpc.tls import TlsFiles, connection_hint
from relaxd.v1 import coordinator_pb2, replica_pb2, replica_pb2_grpc
from relaxd.v1.coordinator_pb2_grpc import CoordinatorServicer, add_CoordinatorServicer_to_server
from tests.kit.certificates import CertificateAuthority, environment
from tests.kit.processes import run_python

PLAIN = TlsFiles()


class Replica(replica_pb2_grpc.ReplicaServicer):
    async def GetStatus(self, request, context):
        return replica_pb2.GetStatusResponse(status=replica_pb2.ReplicaStatus(detail="in"))


class Coordinator(CoordinatorServicer):
    async def ListReplicas(self, request, context):
        return coordinator_pb2.ListReplicasResponse()


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    ca = CertificateAuthority.create(tmp_path_factory.mktemp("certificates"))
    ca.issue("expired", days=-1)
    ca.issue("elsewhere", "DNS:elsewhere.example")
    return ca


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority.create(tmp_path_factory.mktemp("foreign"))


@asynccontextmanager
async def serve(files: TlsFiles, token: str | None = None) -> AsyncIterator[RunningServer]:
    add = replica_pb2_grpc.add_ReplicaServicer_to_server
    services = [
        (add, Replica(), "relaxd.v1.Replica"),
        (add_CoordinatorServicer_to_server, Coordinator(), "relaxd.v1.Coordinator"),
    ]
    running = await start_server(
        services, security=ServerSecurity(AccessTokens(token=token) if token else None, tls=files), serving=True
    )
    try:
        yield running
    finally:
        await running.stop()


async def call(server: RunningServer, files: TlsFiles, token: str | None = None) -> str:
    """The answer, or what is wrong as a person is told."""
    address = f"127.0.0.1:{server.port}"
    async with channel(address, tls=files, token=token) as to:
        try:
            answer = await replica_pb2_grpc.ReplicaStub(to).GetStatus(replica_pb2.GetStatusRequest(), timeout=20)
            return answer.status.detail
        except grpc.aio.AioRpcError as error:
            return await asyncio.to_thread(connection_hint, address, error.details(), files)


async def test_calls_go_over_tls(ours):
    async with serve(ours.files("service"), token="right") as server:
        assert await call(server, ours.files(), token="right") == "in"
        with sync_channel(f"localhost:{server.port}", tls=ours.files(), token="right") as to:
            stub = replica_pb2_grpc.ReplicaStub(to)
            assert (await asyncio.to_thread(stub.GetStatus, replica_pb2.GetStatusRequest())).status.detail == "in"
            del stub


@pytest.mark.parametrize(
    ("certificate", "told"),
    [
        ("expired", "its certificate has expired: renew it"),
        ("elsewhere", "its certificate is not for 127.0.0.1: call it by a name in the certificate, or set --tls-name"),
    ],
)
async def test_a_server_whose_certificate_is_wrong_is_not_talked_to(ours, certificate, told):
    async with serve(ours.files(certificate)) as server:
        assert (await call(server, ours.files())).startswith(told)


async def test_a_server_may_go_by_one_name_on_every_host(ours):
    async with serve(ours.files("elsewhere")) as server:
        assert await call(server, ours.files(server_name="elsewhere.example")) == "in"
        told = await call(server, ours.files(server_name="relaxd"))
        assert told.startswith("its certificate is not for relaxd")


async def test_a_foreign_server_is_not_talked_to(ours, theirs):
    async with serve(theirs.files("service")) as server:
        told = await call(server, ours.files())
    assert told == (f"its certificate is not signed by a CA in {ours.certificate} (--tls-ca / RELAXD_TLS_CA)")


async def test_plain_and_tls_do_not_mix_and_say_so(ours):
    async with serve(ours.files("service")) as server:
        assert "it uses TLS: set --tls-ca" in await call(server, PLAIN)
    async with serve(ours.files("service", clients=True)) as server:
        assert "it uses TLS: set --tls-ca" in await call(server, PLAIN)
    async with serve(PLAIN) as server:
        assert "it does not use TLS: unset --tls-ca" in await call(server, ours.files())
        assert await asyncio.to_thread(connection_hint, f"127.0.0.1:{server.port}", "", PLAIN) == ""
    assert await asyncio.to_thread(connection_hint, f"127.0.0.1:{server.port}", "Connection refused", PLAIN) == ""


async def test_mutual_tls_lets_in_only_those_with_a_certificate(ours, theirs):
    async with serve(ours.files("service", clients=True)) as server:
        assert await call(server, ours.files("service")) == "in"
        assert await call(server, ours.files("person")) == "in"
        told = await call(server, ours.files())
        assert told.startswith("it requires a client certificate: set --tls-certificate / RELAXD_TLS_CERTIFICATE")
        stranger = replace(theirs.files("person"), ca=ours.certificate)
        assert (await call(server, stranger)).startswith(f"it rejects the certificate in {stranger.certificate}: ")
        assert (await call(server, ours.files("expired"))).startswith("it rejects the certificate in ")


async def test_a_persons_certificate_makes_no_server(ours):
    async with serve(ours.files("person")) as server:
        assert await call(server, ours.files(server_name="person")) != "in"


async def test_a_renewed_certificate_is_used_without_a_restart(ours, theirs, tmp_path, caplog):
    def install(ca: CertificateAuthority, name: str) -> None:
        for suffix in ("crt", "key"):
            new = shutil.copy(ca.folder / f"{name}.{suffix}", tmp_path / "new")
            os.replace(new, tmp_path / f"mine.{suffix}")

    install(ours, "expired")
    mine = TlsFiles(certificate=str(tmp_path / "mine.crt"), key=str(tmp_path / "mine.key"))
    async with serve(mine) as server:
        assert (await call(server, ours.files())).startswith("its certificate has expired")
        install(ours, "service")
        assert await call(server, ours.files()) == "in"
        (tmp_path / "mine.key").write_text("half a fi")
        assert await call(server, ours.files()) == "in"
        install(theirs, "service")
        assert await call(server, theirs.files()) == "in"
    assert "still using the former certificate" in caplog.text
    assert "BEGIN" not in caplog.text


async def run(*words: str, **variables: str) -> tuple[int | None, str]:
    done = await asyncio.to_thread(run_python, *words, environment=variables, clean=True)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


async def test_the_health_check_knocks_with_the_services_own_certificate(ours):
    files = ours.files("service", clients=True)
    async with serve(files) as server:
        port = {"RELAXD_PORT": str(server.port)}
        assert await run("-m", "relaxd.rpc.health_check", **environment(files), **port) == (
            0,
            f"127.0.0.1:{server.port} serves",
        )
        code, output = await run("-m", "relaxd.rpc.health_check", **port)
        assert (code, "UNAVAILABLE" in output) == (1, True)
        code, output = await run("-m", "relaxd.rpc.health_check", **port, RELAXD_TLS_CA="/no/such/file")
        assert (code, "cannot be read" in output) == (1, True)


async def test_the_command_line_says_what_it_lacks(ours, tmp_path):
    (tmp_path / "token").write_text("right\n")
    files = ours.files("service", clients=True)
    cli = ("-m", "relaxd.cli")
    async with serve(files, token="right") as server:
        status = ("status", "--coordinator", f"127.0.0.1:{server.port}")
        code, output = await run(*cli, *status)
        assert (code, "it uses TLS" in output) == (1, True)
        code, output = await run(*cli, "--tls-ca", ours.certificate, *status)
        assert (code, "it requires a client certificate" in output) == (1, True)
        person = ours.files("person")
        options = ("--tls-ca", ours.certificate, "--tls-certificate", person.certificate)
        options += ("--tls-key", person.key)
        code, output = await run(*cli, *options, *status)
        assert (code, "rejects the token --token-file" in output.replace(" try:", "")) == (1, True), output
        code, output = await run(*cli, *options, "--token-file", str(tmp_path / "token"), *status, RELAXD_TOKEN="wrong")
        assert "ListRuns is not implemented" in output  # it is in


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"certificate": "service.crt"}, "--tls-certificate / RELAXD_TLS_CERTIFICATE is set, but not --tls-key"),
        ({"client_ca": "ca.crt"}, "is set, but not --tls-certificate"),
        ({"name": "relaxd"}, "--tls-name / RELAXD_TLS_NAME is set, but not --tls-ca"),
        ({"ca": "absent.crt"}, "--tls-ca / RELAXD_TLS_CA: cannot read"),
        ({"ca": "service.key"}, "has no PEM certificate"),
        ({"certificate": "service.crt", "key": "person.key"}, "must be a certificate and its unencrypted private key"),
        ({"certificate": "service.crt", "key": "locked.key"}, "must be a certificate and its unencrypted private key"),
    ],
)
def test_files_that_do_not_fit_are_named(ours, values, told):
    locked = ("openssl", "ec", "-in", "service.key", "-aes128", "-passout", "pass:word", "-out", "locked.key")
    subprocess.run(locked, cwd=ours.folder, check=True, capture_output=True, timeout=60)
    files = {name: value if name == "name" else str(ours.folder / value) for name, value in values.items()}
    with pytest.raises(ValueError, match=r"-") as caught:
        TlsFiles(**files).check()
    assert told in str(caught.value)


@pytest.mark.parametrize("set_it", ["RELAXD_TLS_CERTIFICATE", "RELAXD_TLS_CA"])
async def test_a_service_takes_both_ends_of_tls_or_none(ours, set_it):
    variables = environment(ours.files("service"))
    if set_it == "RELAXD_TLS_CA":
        variables = {set_it: variables[set_it]}
    else:
        del variables["RELAXD_TLS_CA"]
    code, output = await run("-m", "services.reward", **variables)
    assert code == 2
    assert f"{set_it} is set, but not" in output


async def test_a_service_refuses_to_listen_for_everyone(tmp_path: Path):
    coordinator = {"RELAXD_COORDINATOR": "127.0.0.1:1", "RELAXD_HOST": "0.0.0.0"}
    code, output = await run("-m", "services.reward", **coordinator)
    assert code == 1
    assert "refusing to listen on 0.0.0.0 without authentication" in output
    code, output = await run("-m", "services.reward", **coordinator, RELAXD_TOKEN="development")
    assert code == 1
    assert "refusing to listen on 0.0.0.0: the token in RELAXD_TOKEN(_FILE) has 11 characters" in output
    # With a token it goes on to the next thing that is wrong.
    tokens = tmp_path / "tokens"
    tokens.write_text("reward all right\nread looker other\n")
    coordinator |= {"RELAXD_TOKENS_FILE": str(tokens), "RELAXD_TOKEN": "other"}
    code, output = await run("-m", "services.reward", **coordinator)
    assert (code, '"looker" is for read' in output) == (2, True)
