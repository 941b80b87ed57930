"""Our server and client stack over real connections."""

import asyncio
import json
import logging
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from relaxd.rpc.access import AccessTokens
from relaxd.rpc.client import channel, sync_channel
from relaxd.rpc.credentials import ServerSecurity
from relaxd.rpc.errors import (
    InvalidArgument,
    NotFound,
    ServerError,
    Violations,
    explain,
    field_violations,
    is_too_large,
)
from relaxd.rpc.leader_term import NewestTerm
from relaxd.rpc.server import LIVENESS, RunningServer, Service, start_server
from relaxd.v1 import reward_pb2, reward_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from tests.kit.ports import free_port
from tests.kit.processes import run_python
from tests.kit.waiting import eventually

REWARD = "relaxd.v1.Reward"
GRPCURL = Path(sys.executable).parent / "grpcurl"
WRONG, HANG = 101, 102
TOKEN = "right" * 5
RIGHT = ServerSecurity(AccessTokens(token=TOKEN))


class Reward(reward_pb2_grpc.RewardServicer):
    """Answers by what the request's reward name asks for."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    async def Score(self, request, context):
        match request.reward:
            case "wrong":
                violations = Violations()
                violations.check(request.reward != "wrong", "reward", "must not be 'wrong'")
                violations.check(request.responses, "responses", "must not be empty")
                violations.raise_if_any()
            case "unknown":
                raise NotFound("no reward called 'unknown'")
            case "bug":
                raise ValueError("a bug of ours")
            case "own timeout":
                raise TimeoutError("of the handler's own")
            case "abort":
                await context.abort(grpc.StatusCode.DATA_LOSS, "by hand")
            case "hang":
                try:
                    await asyncio.Event().wait()
                finally:
                    self.cancelled.set()
        return reward_pb2.ScoreResponse()


class Rollout(rollout_pb2_grpc.RolloutServicer):
    async def Generate(self, request, context):
        yield rollout_pb2.GenerateResponse()
        if request.n == WRONG:
            raise InvalidArgument("n: must not be 101", [("n", "must not be 101")])
        if request.n == HANG:
            await asyncio.Event().wait()


@asynccontextmanager
async def serve(**options) -> AsyncIterator[RunningServer]:
    running = await start_server(
        [
            Service(reward_pb2_grpc.add_RewardServicer_to_server, options.pop("reward", Reward()), REWARD),
            Service(rollout_pb2_grpc.add_RolloutServicer_to_server, Rollout(), "relaxd.v1.Rollout"),
        ],
        **options,
    )
    try:
        yield running
    finally:
        await running.stop()


@pytest.fixture
async def server() -> AsyncIterator[RunningServer]:
    async with serve() as running:
        yield running


async def failure(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def score(address_or_port, reward: str, **options):
    return reward_pb2_grpc.RewardStub(address_or_port).Score(reward_pb2.ScoreRequest(reward=reward), **options)


async def test_health_follows_set_serving_for_each_service(server):
    async with channel(f"127.0.0.1:{server.port}") as to:
        health = health_pb2_grpc.HealthStub(to)
        for name in ("", REWARD, "relaxd.v1.Rollout"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        alive = await health.Check(health_pb2.HealthCheckRequest(service=LIVENESS))
        assert alive.status == health_pb2.HealthCheckResponse.SERVING
        await server.set_serving(True)
        for name in ("", REWARD, "relaxd.v1.Rollout"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        error = await failure(health.Check(health_pb2.HealthCheckRequest(service="relaxd.v1.Nothing")))
        assert error.code() is grpc.StatusCode.NOT_FOUND


async def grpcurl(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        GRPCURL, "-plaintext", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    async with asyncio.timeout(60):
        output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


async def test_grpcurl_needs_no_proto_file(server):
    address = f"127.0.0.1:{server.port}"
    code, output = await grpcurl(address, "list")
    assert (code, set(output.split())) == (
        0,
        {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection", REWARD, "relaxd.v1.Rollout"},
    )
    code, output = await grpcurl(address, "describe", "relaxd.v1.Reward.Score")
    assert code == 0
    assert "rpc Score ( .relaxd.v1.ScoreRequest ) returns ( .relaxd.v1.ScoreResponse )" in output
    assert 'option (.relaxd.v1.callers) = "coordinator";' in output
    code, output = await grpcurl(address, "describe", "relaxd.v1.Reward.Nothing")
    assert code != 0
    assert "not found" in output.lower()
    code, output = await grpcurl("-d", json.dumps({"reward": "fine"}), address, "relaxd.v1.Reward/Score")
    assert (code, json.loads(output)) == (0, {})
    code, output = await grpcurl("-d", json.dumps({"reward": "wrong"}), address, "relaxd.v1.Reward/Score")
    assert code != 0
    assert "InvalidArgument" in output
    assert "must not be empty" in output


async def test_reflection_v1_answers_as_v1alpha_does(server):
    async with channel(f"127.0.0.1:{server.port}") as to:
        ask = to.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        call = ask(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10)
        (answer,) = [response async for response in call]
    assert REWARD in {service.name for service in answer.list_services_response.service}


async def test_bad_input_is_answered_with_every_field_violation(server):
    async with channel(f"127.0.0.1:{server.port}") as to:
        error = await failure(score(to, "wrong"))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field_violations(error) == [("reward", "must not be 'wrong'"), ("responses", "must not be empty")]
    assert explain(error) == "INVALID_ARGUMENT: reward: must not be 'wrong'; responses: must not be empty"


async def test_errors_without_details_and_aborts_by_hand_pass_through(server):
    async with channel(f"127.0.0.1:{server.port}") as to:
        assert explain(await failure(score(to, "unknown"))) == "NOT_FOUND: no reward called 'unknown'"
        assert explain(await failure(score(to, "abort"))) == "DATA_LOSS: by hand"


@pytest.mark.parametrize(("reward", "message"), [("bug", "a bug of ours"), ("own timeout", "of the handler's own")])
async def test_a_bug_is_internal_and_logged_with_its_traceback(server, caplog, reward, message):
    async with channel(f"127.0.0.1:{server.port}") as to:
        error = await failure(score(to, reward))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert message in error.details()
    (entry,) = [record for record in caplog.records if record.exc_info]
    assert entry.levelno == logging.ERROR
    assert "/relaxd.v1.Reward/Score" in entry.getMessage()


async def test_what_a_service_does_not_implement(server):
    async with channel(f"127.0.0.1:{server.port}") as to:
        error = await failure(reward_pb2_grpc.RewardStub(to).ListRewards(reward_pb2.ListRewardsRequest()))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_stream_fails_with_its_details(server):
    async with channel(f"127.0.0.1:{server.port}") as to:
        stream = rollout_pb2_grpc.RolloutStub(to).Generate(rollout_pb2.GenerateRequest(n=WRONG))
        assert await stream.read() == rollout_pb2.GenerateResponse()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
    assert field_violations(caught.value) == [("n", "must not be 101")]


async def test_a_call_without_a_deadline_gets_the_servers():
    reward = Reward()
    async with (
        serve(reward=reward, deadline_seconds=0.2, stream_deadline_seconds=0.3) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as to,  # ours would set a deadline
    ):
        error = await failure(score(to, "hang"))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "longer than its deadline of 0.2 s" in error.details()
        assert reward.cancelled.is_set()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in rollout_pb2_grpc.RolloutStub(to).Generate(rollout_pb2.GenerateRequest(n=HANG)):
                pass
        assert "longer than its deadline of 0.3 s" in caught.value.details()


async def test_a_handler_is_cancelled_at_the_callers_deadline():
    reward = Reward()
    async with serve(reward=reward) as server, channel(f"127.0.0.1:{server.port}") as to:
        await score(to, "fine")  # connected: the call is to arrive before its deadline
        error = await failure(score(to, "hang", timeout=1.0))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(30):
            await reward.cancelled.wait()


async def test_our_channel_always_sets_a_deadline(monkeypatch):
    monkeypatch.setattr("relaxd.rpc.client.DEFAULT_DEADLINE_SECONDS", 0.3)
    async with serve() as server, channel(f"127.0.0.1:{server.port}") as to:
        assert (await failure(score(to, "hang"))).code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_taken_port_is_named(server):
    with pytest.raises(ServerError) as caught:
        async with serve(port=server.port):
            pass
    assert str(caught.value) == (
        f"port {server.port} on 127.0.0.1 is taken: stop the process that uses it, or set another --port / RELAXD_PORT"
    )


async def test_an_address_that_is_not_ours_is_named():
    with pytest.raises(ServerError, match=r"cannot listen on port \d+ of 192\.0\.2\.1: Cannot assign"):
        async with serve(host="192.0.2.1", port=free_port(), security=RIGHT):
            pass


async def test_the_token_is_checked_except_for_health(monkeypatch):
    async with serve(security=RIGHT, serving=True) as server:
        address = f"127.0.0.1:{server.port}"
        async with channel(address) as to:
            error = await failure(score(to, "fine"))
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
            assert "RELAXD_TOKEN" in error.details()
            health = await health_pb2_grpc.HealthStub(to).Check(health_pb2.HealthCheckRequest())
            assert health.status == health_pb2.HealthCheckResponse.SERVING
        async with channel(address, token="wrong") as to:
            error = await failure(score(to, "fine"))
            assert explain(error).startswith("UNAUTHENTICATED: the token is wrong")
        async with channel(address, token=TOKEN) as to:
            await score(to, "fine")
        monkeypatch.setenv("RELAXD_TOKEN", TOKEN)
        async with channel(address) as to:
            await score(to, "fine")
            assert [answer async for answer in rollout_pb2_grpc.RolloutStub(to).Generate(rollout_pb2.GenerateRequest())]
        code, output = await grpcurl(address, "list")
        assert code != 0
        assert "token" in output
        code, output = await grpcurl("-H", f"authorization: Bearer {TOKEN}", address, "list")
        assert code == 0


async def test_each_call_is_for_the_roles_that_need_it(tmp_path):
    (tmp_path / "tokens").write_text("read looker r-token\ncoordinator orders c-token\n")
    async with serve(security=ServerSecurity(AccessTokens(tmp_path / "tokens"))) as server:
        address = f"127.0.0.1:{server.port}"
        async with channel(address, token="c-token") as to:
            await score(to, "fine")
        async with channel(address, token="r-token") as to:
            error = await failure(score(to, "fine"))
            stream = rollout_pb2_grpc.RolloutStub(to).Generate(rollout_pb2.GenerateRequest())
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream.read()
        assert explain(error) == (
            'PERMISSION_DENIED: token "looker" is for read, but /relaxd.v1.Reward/Score is for coordinator or admin: '
            "call it with such a token"
        )
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        code, output = await grpcurl("-H", "authorization: Bearer r-token", address, "list")
        assert (code, REWARD in output) == (0, True)


async def test_a_term_that_is_none_is_explained():
    async with serve(fence=NewestTerm()) as server, channel(f"127.0.0.1:{server.port}") as to:
        await score(to, "fine")  # work needs no term
        await score(to, "fine", metadata=[("relaxd-term", "7")])
        for wrong in ("", "0", "-1", "7.0", "1" * 30):
            error = await failure(score(to, "fine", metadata=[("relaxd-term", wrong)]))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert [field for field, _ in field_violations(error)] == ["relaxd-term"]
        error = await failure(score(to, "fine", metadata=[("relaxd-term", "6")]))
        assert "the coordinator of term 6 was replaced: the newest has 7" in error.details()
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert b"TERM_SUPERSEDED" in dict(error.trailing_metadata())["grpc-status-details-bin"]


async def test_the_sync_channel_does_the_same():
    async with serve(security=RIGHT) as server:
        with sync_channel(f"127.0.0.1:{server.port}", token=TOKEN) as to:
            stub = reward_pb2_grpc.RewardStub(to)
            await asyncio.to_thread(stub.Score, reward_pb2.ScoreRequest(reward="fine"))
            with pytest.raises(grpc.RpcError) as caught:
                await asyncio.to_thread(stub.Score, reward_pb2.ScoreRequest(reward="wrong"))
            future = stub.Score.future(reward_pb2.ScoreRequest(reward="fine"))
            assert await asyncio.to_thread(future.result, 30) == reward_pb2.ScoreResponse()
        assert explain(caught.value) == "INVALID_ARGUMENT: reward: must not be 'wrong'; responses: must not be empty"


async def test_a_message_over_the_cap_is_refused_and_one_below_is_not():
    async with serve(max_message_bytes=1 << 20) as server:
        async with channel(f"127.0.0.1:{server.port}") as to:
            await score(to, "x" * ((1 << 20) - 100))
            error = await failure(score(to, "x" * (1 << 20)))
            assert is_too_large(error)
            assert "SERVER: Received message larger than max" in error.details()
        async with channel(f"127.0.0.1:{server.port}", max_message_bytes=1000) as to:
            error = await failure(score(to, "x" * 1000))
            assert is_too_large(error)
            assert "CLIENT: Sent message larger than max" in error.details()


async def test_connections_are_renewed_without_failing_calls():
    peers = set()

    class Watched(Reward):
        async def Score(self, request, context):
            peers.add(context.peer())
            return reward_pb2.ScoreResponse()

    async with serve(reward=Watched(), max_connection_age_seconds=0.2) as server:
        async with channel(f"127.0.0.1:{server.port}") as to:
            end = time.monotonic() + 60
            while len(peers) < 3 and time.monotonic() < end:
                await score(to, "fine")
        assert len(peers) >= 3


async def test_a_call_outlives_the_age_of_its_connection():
    peers, over = [], asyncio.Event()

    class Slow(Reward):
        async def Score(self, request, context):
            peers.append(context.peer())
            if request.reward == "slow":
                await over.wait()
            return reward_pb2.ScoreResponse()

    async with (
        serve(reward=Slow(), max_connection_age_seconds=1, stream_deadline_seconds=0.1) as server,
        channel(f"127.0.0.1:{server.port}") as to,
    ):
        slow = score(to, "slow", timeout=60)

        async def three_connections() -> bool:
            await score(to, "fine")
            return len(set(peers)) >= 3

        await eventually(three_connections, "calls on a third connection")
        assert not slow.done()
        over.set()
        await slow


async def test_a_restarted_server_is_found_again_soon():
    port = free_port()
    async with channel(f"127.0.0.1:{port}") as to:
        async with serve(port=port):
            await score(to, "fine")
        assert (await failure(score(to, "fine"))).code() is grpc.StatusCode.UNAVAILABLE
        # So many attempts that gRPC's own back-off would have grown to more than the limit below.
        await failure(score(to, "fine", wait_for_ready=True, timeout=6.0))
        async with serve(port=port):
            begun = time.monotonic()
            await score(to, "fine", wait_for_ready=True)
            assert time.monotonic() - begun < 3


async def test_the_health_check_of_containers_tells_serving_from_not():
    async def check(port: int) -> tuple[int | None, str]:
        words, environment = ("-m", "relaxd.rpc.health_check"), {"RELAXD_PORT": str(port)}
        done = await asyncio.to_thread(run_python, *words, environment=environment)
        return done.returncode, done.stdout

    server = await start_server([], serving=True, security=RIGHT)
    try:
        assert await check(server.port) == (0, f"127.0.0.1:{server.port} serves\n")
        await server.set_serving(False)
        code, output = await check(server.port)
        assert code == 1
        assert "does not serve" in output
    finally:
        await server.stop()
    code, output = await check(server.port)
    assert code == 1
    assert "UNAVAILABLE" in output
