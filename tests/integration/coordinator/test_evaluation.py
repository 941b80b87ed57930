"""Evaluation against real servers: waits, retries and concurrency."""

import asyncio
import itertools
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from relaxd.config import RunConfig
from relaxd.data.dataset import load_data
from relaxd.media.messages import to_proto
from relaxd.roles import AGENT, REWARD, ROLLOUT
from relaxd.v1 import agent_pb2, agent_pb2_grpc, reward_pb2, reward_pb2_grpc, rollout_pb2, rollout_pb2_grpc
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
        self.texts = ("7",)
        self.requests: list[rollout_pb2.GenerateRequest] = []

    async def Generate(self, request: rollout_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        assert request.final_only
        self.running += request.n
        self.max_running = max(self.max_running, self.running)
        try:
            seconds, self.seconds = self.seconds, max(0.0, self.seconds - self.faster)
            await asyncio.sleep(min(seconds, 3600))
            self.answered += 1
            self.requests.append(request)
            for sample in reversed(range(request.n)):
                text = self.texts[sample % len(self.texts)]
                yield rollout_pb2.GenerateResponse(
                    sample=sample, text=text, finish_reason="FINISH_REASON_STOP", token_count=5
                )
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            self.running -= request.n


class Agent(agent_pb2_grpc.AgentServicer):
    """Holds conversations in which the environment pays 1 to the first and 0 to the second; the third fails."""

    def __init__(self, *, hangs: bool) -> None:
        self.hangs = hangs
        self.requests: list[agent_pb2.ConverseRequest] = []
        self.left = 0

    async def Converse(self, request: agent_pb2.ConverseRequest, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        try:
            await asyncio.sleep(3600 * self.hangs)
        except asyncio.CancelledError:
            self.left += 1
            raise
        for sample in reversed(range(request.n)):
            messages = to_proto([{"role": role, "content": f"{role} {sample}"} for role in ("user", "assistant")])
            yield agent_pb2.ConverseResponse(
                sample=sample,
                finish_reason="FINISH_REASON_ENV_FAILED" if sample == 2 else "FINISH_REASON_ENV_DONE",
                text=f"assistant {sample}",
                token_count=7,
                messages=messages,
                outcome=reward_pb2.EnvironmentOutcome(reward=1.0 - sample),
                turns=1,
                failure="step raised" if sample == 2 else "",
            )


class Reward(reward_pb2_grpc.RewardServicer):
    def __init__(self) -> None:
        self.sets: set[str] = set()
        self.requests: list[reward_pb2.ScoreRequest] = []

    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:
        assert not request.reward
        self.sets.add(request.evaluation_set)
        self.requests.append(request)
        if request.environment_outcomes:
            paid = [outcome.reward for outcome in request.environment_outcomes]
            return reward_pb2.ScoreResponse(scores=[reward_pb2.Score(reward=reward) for reward in paid])
        texts = [one.messages[0].content[0].text for one in request.responses]
        return reward_pb2.ScoreResponse(scores=[reward_pb2.Score(reward=float(text == "7")) for text in texts])


class Kit(FleetKit):
    """Adds engines that generate on request."""

    reward: Reward

    def __init__(self, folder: Path, redis_url: str) -> None:
        super().__init__(redis_url)
        self.model = write_tokenizer(folder / "model")

    async def evaluate(
        self,
        stall_seconds: float = STALL_SECONDS,
        rollout: Mapping[str, Any] | None = None,
        agent: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> dict[str, float]:
        self.lines: dict[str, list[dict[str, Any]]] = defaultdict(list)
        config = RunConfig.model_validate(
            {
                "run": {"steps": 1},
                "model": {"path": str(self.model)},
                "data": {"source": "addition"},
                "reward": {"name": "addition", "timeout_seconds": 0.1},
                "rollout": {"max_running_samples": 2, **(rollout or {})},
                "agent": agent or {},
                "eval": {"prompts": PROMPTS, "stall_seconds": stall_seconds} | settings,
            }
        )
        evaluator = Evaluator(self.context(config), load_data(config))
        try:
            found = await evaluator.evaluate(
                (1, 3),
                lambda name, lines: self.lines[name].extend(map(dict, lines)),
                beside_training="sets" in settings,
            )
            return await evaluator.summarise(found)
        finally:
            assert evaluator.in_progress == 0

    def keep(self, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
        self.lines[name] += map(dict, lines)

    async def engine(self, name: str, seconds: float = 0.0, term: int = 1) -> Engine:
        engine = Engine(seconds)
        add = rollout_pb2_grpc.add_RolloutServicer_to_server
        await self.serve(name, ROLLOUT, add, engine, "relaxd.v1.Rollout")
        self.generated(name, 0, term)
        return engine

    async def agent(self, name: str, *, hangs: bool = False) -> Agent:
        agent = Agent(hangs=hangs)
        await self.serve(name, AGENT, agent_pb2_grpc.add_AgentServicer_to_server, agent, "relaxd.v1.Agent")
        return agent

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
    kit.reward = Reward()
    await kit.serve("judge", REWARD, reward_pb2_grpc.add_RewardServicer_to_server, kit.reward, "relaxd.v1.Reward")
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


async def test_lines_are_kept_about_every_answer(kit: Kit) -> None:
    engine = await kit.engine("slow at first", seconds=0.3)
    engine.faster = 0.3
    await kit.evaluate()
    lines = kit.lines["held_out"]
    assert sorted(line["index"] for line in lines) == list(range(PROMPTS))
    assert len({line["prompt"] for line in lines}) == PROMPTS
    kept = {"sample": 0, "reward": 1.0, "parts": {}, "error": "", "length": 5, "finish_reason": "stop"}
    assert all(kept.items() <= line.items() for line in lines)


async def test_sets_have_samples_sampling_and_rewards_of_their_own(kit: Kit) -> None:
    engine = await kit.engine("one")
    engine.texts = ("7", "8", "7", "9")
    (kit.model / "set.jsonl").write_text("".join(f'{{"prompt": "{n} + 1?", "answer": "7"}}\n' for n in range(5)))
    own = {"name": "sums", "path": str(kit.model / "set.jsonl"), "samples_per_prompt": 4, "reward": "exact_match"}
    metrics = await kit.evaluate(sets=[own | {"prompts": 3, "stop": ["."], "max_new_tokens": 9}], kept_prompts=2)
    assert metrics["eval_reward"] == 1.0
    assert metrics["eval/sums/prompts"] == 3
    assert metrics["eval/sums/reward"] == metrics["eval/sums/pass_at_1"] == 0.5
    assert metrics["eval/sums/pass_at_2"] == pytest.approx(1 - 1 / 6)
    assert (metrics["eval/sums/pass_at_4"], metrics["eval/sums/maj_at_4"]) == (1.0, 1.0)
    assert metrics["eval/sums/pass_at_2_low"] < metrics["eval/sums/pass_at_2"] < metrics["eval/sums/pass_at_2_high"]
    assert kit.reward.sets == {"", "sums"}
    asked = [request for request in engine.requests if request.n == 4]
    assert len({request.sampling.seed for request in asked}) == len(asked) == 3
    sampling = asked[0].sampling
    assert (sampling.temperature, sampling.max_new_tokens, list(sampling.stop)) == (1.0, 9, ["."])
    assert {request.sampling.temperature for request in engine.requests if request.n == 1} == {0.0}
    texts = sorted((line["index"], line["sample"], line.get("response")) for line in kit.lines["sums"])
    assert texts[3:8] == [(0, 3, "9"), (1, 0, "7"), (1, 1, "8"), (1, 2, "7"), (1, 3, "9")]
    assert [text for index, _, text in texts if index == 2] == [None] * 4


async def test_sets_have_the_runs_sampling_but_for_what_they_set(kit: Kit) -> None:
    engine = await kit.engine("one")
    (kit.model / "set.jsonl").write_text('{"prompt": "1 + 1?"}\n')
    path = str(kit.model / "set.jsonl")
    plain = {"name": "plain", "path": path, "samples_per_prompt": 2}
    own = {"name": "own", "path": path, "samples_per_prompt": 3, "top_k": 0, "min_new_tokens": 2, "stop_token_ids": [8]}
    rollout = {"top_k": 5, "min_new_tokens": 4, "top_p": 0.5, "stop_token_ids": [7], "stop": ["x"]}
    await kit.evaluate(rollout=rollout, sets=[plain, own], prompts=1)
    asked = {request.n: request.sampling for request in engine.requests}
    found = {n: (s.top_k, s.min_new_tokens, s.top_p, list(s.stop_token_ids), list(s.stop)) for n, s in asked.items()}
    assert found == {1: (0, 4, 1.0, [7], ["x"]), 2: (5, 4, 0.5, [7], ["x"]), 3: (0, 2, 0.5, [8], ["x"])}


async def test_beside_training_it_takes_its_share_of_an_engine(kit: Kit) -> None:
    engine = await kit.engine("one", seconds=0.05)
    await kit.evaluate(sets=[{"name": "words", "task": "spell_backward", "prompts": 2}], interval=1, engine_share=0.5)
    assert (engine.answered, engine.max_running) == (PROMPTS + 2, 1)


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


async def test_conversations_are_held_by_agents_and_scored_with_what_their_environment_gave(kit: Kit) -> None:
    engine, agent = await kit.engine("engine"), await kit.agent("agent")
    (kit.model / "set.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    own = {"name": "talks", "path": str(kit.model / "set.jsonl"), "samples_per_prompt": 3, "max_new_tokens": 9}
    metrics = await kit.evaluate(agent={"environment": "calculator"}, sets=[own], prompts=1)
    assert not engine.requests
    assert metrics["eval_reward"] == 1.0
    assert metrics["eval_environment_failed"] == 0
    assert metrics["eval/talks/reward"] == pytest.approx(1 / 3)
    assert metrics["eval/talks/pass_at_1"] == pytest.approx(1 / 3)
    assert metrics["eval/talks/unscored"] == metrics["eval/talks/environment_failed"] == 1
    assert metrics["eval/talks/turns_mean"] == 1
    (asked,) = [request for request in agent.requests if request.evaluation_set == "talks"]
    assert (asked.weights.term, asked.weights.version, asked.or_later) == (1, 3, True)
    assert (asked.n, asked.sampling.max_new_tokens, asked.sampling.temperature) == (3, 9, 1.0)
    assert json.loads(asked.prompt_json)["answer"] == "2"
    (scored,) = [request for request in kit.reward.requests if len(request.responses) > 1]
    assert [one.messages[0].content[0].text for one in scored.responses] == ["user 0", "user 1"]
    line = next(line for line in kit.lines["talks"] if line["sample"] == 2)
    assert (line["reward"], line["error"], line["finish_reason"]) == (0.0, "step raised", "env_failed")
    assert line["messages"][0] == {"role": "user", "content": "user 2"}


async def test_a_prompt_larger_than_a_message_fails_the_evaluation_by_name(kit: Kit) -> None:
    await kit.engine("engine")
    add, agent = agent_pb2_grpc.add_AgentServicer_to_server, Agent(hangs=False)
    await kit.serve("agent", AGENT, add, agent, "relaxd.v1.Agent", max_message_bytes=1024)
    row = {"prompt": "1 + 1?", "answer": "2", "metadata": {"long": "x" * 1024}}
    (kit.model / "set.jsonl").write_text(json.dumps({"prompt": "1 + 1?"}) + "\n" + json.dumps(row) + "\n")
    own = {"name": "talks", "path": str(kit.model / "set.jsonl")}
    with pytest.raises(EvaluationFailed, match=r"^talks, prompt 1: with its media .* and agent: .*larger than max"):
        await kit.evaluate(agent={"environment": "calculator"}, sets=[own], prompts=1)


async def test_conversations_of_a_lost_agent_begin_anew_at_the_next(kit: Kit) -> None:
    await kit.engine("engine")
    lost = await kit.agent("lost", hangs=True)
    evaluating = asyncio.create_task(kit.evaluate(stall_seconds=60.0, agent={"environment": "calculator"}))
    await eventually(lambda: len(lost.requests) == PROMPTS)
    await kit.lose("lost")
    await eventually(lambda: lost.left == PROMPTS)
    await kit.agent("next")
    metrics = await evaluating
    assert (metrics["eval_prompts"], metrics["eval_reward"]) == (PROMPTS, 1.0)


async def test_conversations_do_not_wait_without_end_for_an_engine(kit: Kit) -> None:
    await kit.engine("engine")
    agent = await kit.agent("agent", hangs=True)
    evaluating = asyncio.create_task(kit.evaluate(agent={"environment": "calculator"}))
    await eventually(lambda: len(agent.requests) == PROMPTS)
    await kit.lose("engine")
    with pytest.raises(EvaluationFailed, match=r"no rollout replica serves the version, for 1 s"):
        await evaluating
    await eventually(lambda: agent.left == PROMPTS)
