"""Calls of Generate, of an engine that is full and of a sample that has tokens already."""

from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from relaxd.config import RehearsalConfig, RolloutConfig
from relaxd.replica.replica_service import SyncIds
from relaxd.rpc.client import channel
from relaxd.rpc.errors import field_violations, retry_seconds
from relaxd.rpc.server import start_server
from relaxd.v1 import rollout_pb2_grpc
from relaxd.v1.rollout_pb2 import GenerateRequest, GenerateResponse
from relaxd.v1.sample_pb2 import SamplingParams
from services.rollout.engines.request_types import Version
from services.rollout.engines.scripted_engine import ScriptedEngine
from services.rollout.service.group_generator import Occupancy
from services.rollout.service.server import FULL_SECONDS, RolloutServicer
from tests.kit.waiting import eventually

LENGTH = 8


def asked(**fields: Any) -> GenerateRequest:
    values = {"prompt_tokens": [1, 2], "n": 1, "sampling": SamplingParams(max_new_tokens=2 * LENGTH)}
    return GenerateRequest(**(values | fields))


async def test_a_full_engine_says_when_to_ask_again_and_a_sample_goes_on_with_its_tokens() -> None:
    engine = ScriptedEngine(RolloutConfig(), RehearsalConfig(median_tokens=LENGTH, spread=0.0))
    engine.weights = Version(1, 3)
    # The parts of a rollout service that Generate needs.
    service = SimpleNamespace(engine=engine, occupancy=Occupancy(), max_queued_samples=3)
    servicer = RolloutServicer(cast(Any, service), SyncIds())
    add = rollout_pb2_grpc.add_RolloutServicer_to_server
    server = await start_server([(add, servicer, "relaxd.v1.Rollout")])
    async with channel(f"127.0.0.1:{server.port}") as to:
        stub = rollout_pb2_grpc.RolloutStub(to)

        async def generate(**fields: Any) -> list[GenerateResponse]:
            return [message async for message in stub.Generate(asked(**fields), timeout=60)]

        await engine.pause("in_place", 600.0, 1.0)
        first, second = stub.Generate(asked(n=2), timeout=60), stub.Generate(asked(n=2), timeout=60)
        await eventually(lambda: service.occupancy.requests == 2, "two requests")
        with pytest.raises(grpc.aio.AioRpcError, match="4 samples are running or waiting, at most 3 may") as full:
            await generate()
        assert full.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert retry_seconds(full.value) == FULL_SECONDS
        second.cancel()
        await engine.resume()
        assert sum(len(message.tokens) for message in [each async for each in first]) == 2 * LENGTH

        tokens = [token for message in await generate() for token in message.tokens]
        assert len(tokens) == LENGTH
        rare = await generate(report_every=LENGTH - 1)
        assert [len(message.tokens) for message in rare] == [LENGTH - 1, 1]
        rest = await generate(begun_tokens=tokens[:5])
        assert [token for message in rest for token in message.tokens] == tokens[5:]
        (last,) = await generate(begun_tokens=tokens[:5], final_only=True)
        assert last.token_count == LENGTH

        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await generate(n=2, begun_tokens=[1, -1] * LENGTH)
        assert dict(field_violations(refused.value)) == {
            "begun_tokens": f"are {2 * LENGTH}: they must be fewer than sampling.max_new_tokens ({2 * LENGTH})",
            "begun_tokens[1]": f"is -1: the model's token ids are 0 to {engine.vocabulary - 1}",
        }
        with pytest.raises(grpc.aio.AioRpcError, match="begun_tokens: are given, but n is 2: it must be 1 with them"):
            await generate(n=2, begun_tokens=[1])
        with pytest.raises(grpc.aio.AioRpcError, match="report_every: is -1: it must be 0"):
            await generate(report_every=-1)
    await server.stop()
    await engine.stop()
