"""Evaluation against real servers: waits, retries and concurrency."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from relaxd.config import RunConfig
from relaxd.data.dataset import load_data
from relaxd.roles import REWARD, ROLLOUT
from relaxd.v1 import reward_pb2, reward_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from relaxd.v1.replica_pb2 import WeightVersion
from services.coordinator.runs import evaluation
from services.coordinator.runs.evaluation import EvaluationFailed, Evaluator
from tests.integration.coordinator.fleet_kit import FleetKit
from tests.kit.tokenizer import write_tokenizer
from tests.kit.waiting import eventually

STALL_SECONDS = 1.0
PROMPTS = 4
HANG = float("inf")


class Engine(rollout_pb2_grpc.RolloutServicer):
    """Answers after some seconds."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.faster = 0.0
        """Seconds by which each answer takes less than the one before."""
        self.running = self.max_running = self.answered = self.left = 0

    async def Generate(self, request: rollout_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        assert request.final_only
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        try:
            seconds, self.seconds = self.seconds, max(0.0, self.seconds - self.faster)
            await asyncio.sleep(min(seconds, 3600))
            self.answered += 1
            yield rollout_pb2.GenerateResponse(text="7", finish_reason="FINISH_REASON_STOP", token_count=5)
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            self.running -= 1


class Reward(reward_pb2_grpc.RewardServicer):
    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:
        assert [one.messages[0].content[0].text for one in request.responses] == ["7"]
        return reward_pb2.ScoreResponse(scores=[reward_pb2.Score(reward=1.0)])


class Kit(FleetKit):
    """Adds engines that generate on request."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        super().__init__(redis_url)
        self.model = write_tokenizer(folder / "model")

    async def evaluate(self, stall_seconds: float = STALL_SECONDS) -> dict[str, float]:
        return evaluation.summarise_answers(await self.answers(stall_seconds))

    async def answers(self, stall_seconds: float = STALL_SECONDS) -> list[evaluation.Judged]:
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
        evaluator = Evaluator(self.context(config), load_data(config))
        try:
            return await evaluator.evaluate((1, 3))
        finally:
            assert evaluator.in_progress == 0

    async def engine(self, name: str, seconds: float = 0.0, term: int = 1) -> Engine:
        engine = Engine(seconds)
        add = rollout_pb2_grpc.add_RolloutServicer_to_server
        await self.serve(name, ROLLOUT, add, engine, "relaxd.v1.Rollout")
        self.generated(name, 0, term)
        return engine

    def generated(self, name: str, tokens: int, term: int = 1) -> None:
        self.beat(name, progress=tokens, weights=WeightVersion(term=term, version=3))

    async def generate_forever(self, name: str) -> None:
        for tokens in itertools.count():
            await asyncio.sleep(0.1)
            self.generated(name, tokens)


@pytest.fixture
async def kit(tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Kit]:
    monkeypatch.setattr(evaluation, "RETRY_SECONDS", 0.1)
    kit = Kit(tmp_path, redis_url)
    await kit.serve("judge", REWARD, reward_pb2_grpc.add_RewardServicer_to_server, Reward(), "relaxd.v1.Reward")
    yield kit
    await kit.close()


async def test_an_answer_may_take_longer_than_any_limit_while_its_engine_generates(kit: Kit) -> None:
    engine = await kit.engine("slow", seconds=2 * STALL_SECONDS)
    generating = asyncio.create_task(kit.generate_forever("slow"))
    metrics = await kit.evaluate()
    generating.cancel()
    assert metrics["eval_prompts"] == PROMPTS
    assert metrics["eval_reward"] == 1.0
    assert metrics["eval_response_length"] == 5
    assert (engine.answered, engine.max_running) == (PROMPTS, 2)


async def test_answers_are_kept_in_the_prompts_order(kit: Kit) -> None:
    engine = await kit.engine("slow at first", seconds=0.3)
    engine.faster = 0.3
    answers = [answer.to_json() for answer in await kit.answers()]
    assert [answer["index"] for answer in answers] == list(range(PROMPTS))
    assert len({answer["prompt"] for answer in answers}) == PROMPTS
    kept = {"reward": 1.0, "parts": {}, "error": "", "length": 5, "finish_reason": "stop"}
    assert all(kept.items() <= answer.items() for answer in answers)


async def test_what_a_silent_engine_was_asked_is_asked_of_another(kit: Kit) -> None:
    silent, well = await kit.engine("a-silent", HANG), await kit.engine("well")
    assert (await kit.evaluate())["eval_prompts"] == PROMPTS
    assert well.answered == PROMPTS
    assert silent.max_running == 2
    await eventually(lambda: silent.left == 2)


async def test_what_a_lost_engine_was_asked_is_asked_of_the_next_at_once(kit: Kit) -> None:
    lost = await kit.engine("lost", HANG)
    evaluating = asyncio.create_task(kit.evaluate(stall_seconds=60.0))
    await eventually(lambda: lost.running == 2)
    await kit.lose("lost")
    await eventually(lambda: lost.left == 2)
    await kit.engine("next", term=2)  # the trainer has been restarted meanwhile
    assert (await evaluating)["eval_prompts"] == PROMPTS


async def test_without_an_engine_it_says_so_in_the_end(kit: Kit) -> None:
    with pytest.raises(EvaluationFailed, match=r"no rollout replica serves the version, for 1 s \(eval.stall_seconds"):
        await kit.evaluate()
