"""Questions to judge replicas that are starting, that are there, and that are gone again."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from relaxd.config import JudgeConfig
from relaxd.rewards.judge import JudgeError
from relaxd.roles import JUDGE
from relaxd.rpc.client import channel
from relaxd.rpc.server import start_server
from relaxd.rpc.service_settings import ServiceSettings
from relaxd.v1 import coordinator_pb2_grpc, judge_pb2, judge_pb2_grpc
from relaxd.v1.coordinator_pb2 import CallableReplica
from relaxd.v1.replica_pb2 import (
    REPLICA_STATE_FAILED,
    REPLICA_STATE_IDLE,
    REPLICA_STATE_READY,
    REPLICA_STATE_STARTING,
    ReplicaState,
)
from relaxd.waiting import Backoff, waits
from services.reward import patience
from services.reward.judge import JudgeClient, JudgeReplicas
from tests.kit.replicas import watch_replicas
from tests.kit.waiting import eventually

RUN = "run"


class Judge(judge_pb2_grpc.JudgeServicer):
    async def Ask(self, request, context):
        return judge_pb2.AskResponse(text="Score: 8")


class Coordinator(coordinator_pb2_grpc.CoordinatorServicer):
    """Tells of the judge's replicas that a test decides."""

    def __init__(self) -> None:
        self.replicas: list[CallableReplica] = []

    async def WatchReplicas(self, request, context):
        assert request.role == JUDGE
        async for message in watch_replicas(lambda: self.replicas):
            yield message


class Place:
    def __init__(self, coordinator: Coordinator, client: JudgeClient, address: str) -> None:
        self._coordinator = coordinator
        self.client = client
        self.address = address

    def judge_is(self, state: "ReplicaState.ValueType", detail: str = "") -> None:
        run_id = "" if state == REPLICA_STATE_IDLE else RUN
        judge = CallableReplica(replica_id="judge-1", address=self.address, state=state, run_id=run_id, detail=detail)
        self._coordinator.replicas = [judge]

    def nobody_is_there(self) -> None:
        self._coordinator.replicas = []

    async def ask(self) -> str:
        return (await self.client.ask(judge_pb2.AskRequest())).text


@pytest.fixture
async def place(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    monkeypatch.setattr(patience, "PROBE_PAUSE", Backoff(0.01, 0.05))
    monkeypatch.setattr(patience, "PAUSE", Backoff(0.01, 0.02))
    async with AsyncExitStack() as stack:
        coordinator = Coordinator()
        add, add_judge = (
            coordinator_pb2_grpc.add_CoordinatorServicer_to_server,
            judge_pb2_grpc.add_JudgeServicer_to_server,
        )
        server = await start_server(
            [(add, coordinator, "relaxd.v1.Coordinator"), (add_judge, Judge(), "relaxd.v1.Judge")]
        )
        stack.push_async_callback(server.stop)
        address = f"127.0.0.1:{server.port}"
        to = channel(address)
        stack.push_async_callback(to.close, None)
        stub = coordinator_pb2_grpc.CoordinatorStub(to)
        replicas = JudgeReplicas(stub, ServiceSettings(role="reward", redis=""), RUN)
        client = JudgeClient(JudgeConfig(model="big", timeout_seconds=5.0, outage_seconds=0.2), replicas)
        stack.push_async_callback(client.close)
        yield Place(coordinator, client, address)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_judge_that_is_starting_is_waited_for_without_a_warning(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await place.client.start()
    assert (
        place.client.detail
        == "waiting for the judge, which is starting, for 0 s now: no replica of it is registered yet"
    )
    asking = asyncio.create_task(place.ask())
    place.judge_is(REPLICA_STATE_IDLE)
    await eventually(lambda: place.client.detail.endswith(": judge-1"), "the replica is seen")
    place.judge_is(REPLICA_STATE_STARTING, "loading the model")
    await eventually(lambda: place.client.detail.endswith(": judge-1 loading the model"), "its start is seen")
    await asyncio.sleep(0.3)  # brief: longer than roles.judge.outage_seconds, which does not count a start
    named = {wait.reason: wait.next_notice for wait in waits()}
    assert named == {"the judge, which is starting": patience.START_NOTICE_SECONDS}
    assert not asking.done()
    place.judge_is(REPLICA_STATE_READY)
    assert await asking == "Score: 8"
    assert (place.client.detail, warnings(caplog)) == ("", [])
    said = [record.getMessage() for record in caplog.records if record.name == patience.__name__]
    assert said == [
        "waiting for the judge, which is starting: no replica of it is registered yet",
        "the judge answers now",
    ]


async def test_a_judge_that_has_failed_or_has_gone_is_an_outage(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.judge_is(REPLICA_STATE_STARTING)
    await place.client.start()
    place.judge_is(REPLICA_STATE_FAILED, "no such model")
    await eventually(lambda: "does not answer" in place.client.detail, "the failure is seen")
    said = "no judge replica is ready (judge-1: no such model)"
    assert warnings(caplog) == [f"the judge does not answer: {said}; its samples wait"]
    place.judge_is(REPLICA_STATE_READY)
    assert await place.ask() == "Score: 8"
    place.nobody_is_there()

    async def ask_until_it_is_known() -> None:
        async with asyncio.timeout(20):
            while True:
                await place.ask()

    with pytest.raises(JudgeError, match="the judge does not answer, for"):
        await ask_until_it_is_known()
