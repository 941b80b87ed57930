"""Calls of relaxd.v1.Agent, over a real server."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from relaxd.config import RunConfig
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.replica.peer_replicas import Peer
from relaxd.rpc.client import channel
from relaxd.rpc.errors import explain
from relaxd.rpc.server import start_server
from relaxd.v1 import agent_pb2_grpc
from relaxd.v1.agent_pb2 import ConverseRequest
from relaxd.v1.sample_pb2 import SamplingParams
from services.agent.conversation import EnvironmentConversations
from services.agent.engines import WantedWeights
from services.agent.environments import Environments
from services.agent.model_turns import PolicyModel
from services.agent.service import AgentServicer, EvaluationConversations
from tests.kit.tokenizer import write_tokenizer
from tests.kit.waiting import eventually

GOOD: dict[str, Any] = {"evaluation_set": "s", "prompt_json": '{"text": "1 + 1?"}', "n": 2}


@pytest.fixture
async def evaluations(tmp_path: Path) -> AsyncIterator[EvaluationConversations]:
    """Conversations none of which gets a place."""
    values = {
        "run": {"steps": 1},
        "model": {"path": str(write_tokenizer(tmp_path / "model"))},
        "data": {"source": "addition"},
        "reward": {"name": "environment"},
        "agent": {"environment": "calculator"},
        "eval": {"prompts": 0},
    }
    config = RunConfig.model_validate(values)
    environments = Environments(config.agent)
    tokenizer = PromptTokenizer.of_run(config, Path(config.model.path))
    model = PolicyModel(config, tokenizer, None, cast(Any, None))
    conversations = EnvironmentConversations(model, environments)
    yield EvaluationConversations(config.agent, {"s": conversations}, asyncio.Semaphore(0))
    await environments.close()


async def refusal(evaluations: EvaluationConversations | None, **fields: Any) -> tuple[grpc.StatusCode, str]:
    """Return the status of a call of Converse, and what it says."""
    service = SimpleNamespace(evaluations=evaluations)
    add = agent_pb2_grpc.add_AgentServicer_to_server
    server = await start_server([(add, AgentServicer(cast(Any, service)), "relaxd.v1.Agent")])
    request = ConverseRequest(sampling=SamplingParams(max_new_tokens=9), **GOOD | fields)
    try:
        async with channel(f"127.0.0.1:{server.port}", token="", stack="") as to:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(aiter(agent_pb2_grpc.AgentStub(to).Converse(request, timeout=60)))
            return caught.value.code(), explain(caught.value)
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"evaluation_set": "other"}, "evaluation_set: is 'other': the run has s"),
        ({"n": 0}, "n: is 0: it must be 1 to 1024"),
        ({"prompt_json": "{"}, "prompt_json: isn't JSON"),
        ({"prompt_json": "[]"}, 'prompt_json: must be an object with "text"'),
    ],
)
async def test_wrong_requests_are_refused(
    evaluations: EvaluationConversations, fields: dict[str, Any], problem: str
) -> None:
    code, text = await refusal(evaluations, **fields)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert problem in text


async def test_a_replica_without_a_run_sends_callers_elsewhere() -> None:
    assert (await refusal(None))[0] == grpc.StatusCode.UNAVAILABLE


async def test_a_replica_that_ends_sends_callers_elsewhere(evaluations: EvaluationConversations) -> None:
    """Its conversations haven't failed: they begin anew at another one."""
    asking = asyncio.create_task(refusal(evaluations))
    await eventually(lambda: evaluations.unfinished == 2)
    evaluations.cancel()
    code, text = await asking
    assert (code, evaluations.unfinished) == (grpc.StatusCode.UNAVAILABLE, 0)
    assert "ask another one" in text


@pytest.mark.parametrize(
    ("term", "version", "exactly", "or_later"),
    [
        (2, 5, True, True),
        (3, 5, True, True),
        (1, 5, False, False),
        (2, 6, False, True),
        (2, 4, False, False),
        (2, None, False, False),
    ],
)
def test_only_engines_with_the_evaluated_weights_are_asked(
    term: int, version: int | None, exactly: bool, or_later: bool
) -> None:
    engine: Peer[Any] = Peer("e", "", cast(Any, None), None)
    engine.term, engine.version = term, version
    found = [WantedWeights(2, 5, or_later=later).served_by(engine) for later in (False, True)]
    assert found == [exactly, or_later]
