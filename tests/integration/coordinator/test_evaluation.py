"""An evaluation against real servers: how long it waits, for whom, and how much it asks at once."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from relaxd.config import RunConfig
from relaxd.data.dataset import load_data
from relaxd.rpc.server import start_server
from relaxd.rpc.tls import TlsFiles
from relaxd.v1 import reward_pb2, reward_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from relaxd.v1.coordinator_pb2 import RegisterRequest
from relaxd.v1.replica_pb2 import REPLICA_STATE_READY, ROLE_REWARD, ROLE_ROLLOUT, GetStatusResponse, Role, WeightVersion
from services.coordinator import evaluation
from services.coordinator.evaluation import EvaluationFailed, Evaluator
from services.coordinator.fleet import Fleet
from services.coordinator.peers import Peers
from services.coordinator.registry import Registry
from services.coordinator.store import Store
from tests.tokenizer import write_tokenizer

STALL_SECONDS = 1.0
PROMPTS = 4
HANG = float("inf")


class Engine(rollout_pb2_grpc.RolloutServicer):
    """Answers after some seconds."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.progress = 0
        self.running = self.most_running = self.answered = self.left = 0

    async def Generate(self, request: rollout_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        assert request.final_only
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(min(self.seconds, 3600))
            self.answered += 1
            yield rollout_pb2.GenerateResponse(text="7", finish_reason="stop", token_count=5)
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            self.running -= 1


class Reward(reward_pb2_grpc.RewardServicer):
    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:
        assert list(request.responses) == ["7"]
        return reward_pb2.ScoreResponse(scores=[reward_pb2.Score(reward=1.0)])


class Kit:
    """A coordinator's view of a run, and servers that heartbeat into it."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.model = write_tokenizer(folder / "model")
        store = Store(redis_url)
        store.take_over()
        self.registry = Registry(store, lease_seconds=60, heartbeat_seconds=0.1)
        self.peers = Peers(None, TlsFiles())
        self.engines: dict[str, Engine] = {}
        self.life = contextlib.AsyncExitStack()

    async def evaluate(self, stall_seconds: float = STALL_SECONDS) -> dict[str, float]:
        config = RunConfig.model_validate(
            {
                "run": {"steps": 1},
                "model": {"path": str(self.model)},
                "data": {"source": "addition"},
                "reward": {"name": "addition", "timeout_seconds": 0.1},
                "rollout": {"max_running_samples": 2},
                "eval": {"prompts": PROMPTS, "stall_seconds": stall_seconds},
            }
        )
        evaluator = Evaluator(config, load_data(config), Fleet(self.registry, "run"), self.peers)
        try:
            return await evaluator.evaluate((1, 3))
        finally:
            assert evaluator.under_way == 0

    async def serve(self, name: str, role: "Role.ValueType", service: tuple[Any, Any, str]) -> None:
        server = await start_server([service])
        self.life.push_async_callback(server.stop)
        await self.registry.register(
            RegisterRequest(replica_id=name, role=role, address=f"127.0.0.1:{server.port}", protocol_version=1)
        )
        self.beat(name)

    async def engine(self, name: str, seconds: float = 0.0) -> Engine:
        engine = self.engines[name] = Engine(seconds)
        add = rollout_pb2_grpc.add_RolloutServicer_to_server
        await self.serve(name, ROLE_ROLLOUT, (add, engine, "relaxd.v1.Rollout"))
        return engine

    def beat(self, name: str, epoch: int = 1) -> None:
        engine = self.engines.get(name)
        status = GetStatusResponse(state=REPLICA_STATE_READY, run_id="run")
        if engine is not None:
            status.progress = engine.progress
            status.weights.CopyFrom(WeightVersion(epoch=epoch, version=3))
        self.registry.heartbeat(name, status)

    async def generate_while(self, engine: str, seconds: float) -> None:
        """The engine makes a token every tenth of a second."""
        for _ in range(int(seconds * 10)):
            await asyncio.sleep(0.1)
            self.engines[engine].progress += 1
            self.beat(engine)


@pytest.fixture
async def kit(tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Kit]:
    monkeypatch.setattr(evaluation, "RETRY_SECONDS", 0.1)
    kit = Kit(tmp_path, redis_url)
    await kit.serve("judge", ROLE_REWARD, (reward_pb2_grpc.add_RewardServicer_to_server, Reward(), "relaxd.v1.Reward"))
    yield kit
    await kit.peers.close()
    await kit.life.aclose()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


async def test_an_answer_may_take_longer_than_any_limit_while_its_engine_generates(kit: Kit) -> None:
    engine = await kit.engine("slow", seconds=2 * STALL_SECONDS)
    generating = asyncio.create_task(kit.generate_while("slow", 10 * STALL_SECONDS))
    metrics = await kit.evaluate()
    generating.cancel()
    assert metrics["eval_prompts"] == PROMPTS
    assert metrics["eval_reward"] == 1.0
    assert metrics["eval_response_length"] == 5
    assert (engine.answered, engine.most_running) == (PROMPTS, 2)


async def test_what_a_silent_engine_was_asked_is_asked_of_another(kit: Kit) -> None:
    silent, well = await kit.engine("a-silent", HANG), await kit.engine("well")
    assert (await kit.evaluate())["eval_prompts"] == PROMPTS
    assert well.answered == PROMPTS
    assert silent.most_running == 2
    await until(lambda: silent.left == 2)


async def test_what_a_lost_engine_was_asked_is_asked_of_the_next_at_once(kit: Kit) -> None:
    lost = await kit.engine("lost", HANG)
    evaluating = asyncio.create_task(kit.evaluate(stall_seconds=60.0))
    await until(lambda: lost.running == 2)
    replica = kit.registry.get("lost")
    assert replica is not None
    await kit.registry.remove([replica])
    await until(lambda: lost.left == 2)
    await kit.engine("next")
    kit.beat("next", epoch=2)  # which the trainer's restart has synchronised
    assert (await evaluating)["eval_prompts"] == PROMPTS


async def test_without_an_engine_it_says_so_in_the_end(kit: Kit) -> None:
    with pytest.raises(EvaluationFailed, match=r"no rollout replica serves the version, for 1 s \(eval.stall_seconds"):
        await kit.evaluate()
