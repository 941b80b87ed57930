"""Evaluation: greedy answers to held-out prompts, judged by the run's own reward."""

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from relaxd.config import RunConfig
from relaxd.data.dataset import Prompt, RunData
from relaxd.rpc.errors import explain
from relaxd.v1.reward_pb2 import Score, ScoreRequest
from relaxd.v1.rollout_pb2 import GenerateRequest
from relaxd.v1.sample_pb2 import SamplingParams
from services.coordinator.fleet import Fleet
from services.coordinator.peers import Peers
from services.coordinator.registry import Replica, Version

logger = logging.getLogger(__name__)

ATTEMPTS = 5
"""How often one prompt is asked before the evaluation is given up."""
RETRY_SECONDS = 2.0
GENERATE_SECONDS = 300.0
"""Deadline of one answer: all prompts are in flight at once, and the last waits for all others."""


class EvaluationFailed(Exception):
    """Held-out prompts could not be answered or judged."""


class AnswerCut(Exception):
    """An answer was ended before its end, by weights.pause = "abort"."""


@dataclass(frozen=True)
class Judged:
    """One answer."""

    score: Score
    length: int
    """Tokens of the answer."""


class Evaluator:
    """Evaluates one run."""

    def __init__(self, config: RunConfig, data: RunData, fleet: Fleet, peers: Peers) -> None:
        self._config = config
        self._data = data
        self._fleet = fleet
        self._peers = peers
        self.under_way = 0
        """Evaluations under way."""

    @property
    def wanted(self) -> bool:
        """Whether the run evaluates at all."""
        return self._config.eval.prompts > 0 and self._data.held_out is not None

    async def evaluate(self, version: Version, *, or_later: bool = False) -> dict[str, float]:
        """Ask the held-out prompts of the engines that serve a version, with `or_later` also a later one of its epoch.

        Returns eval_accuracy and eval_format (where the reward has such parts; eval_accuracy is the reward where it has
        none), eval_reward, eval_response_length (tokens) and eval_prompts. An answer that the reward can't score
        counts as 0 and is counted in eval_unscored. Raises EvaluationFailed.
        """
        held_out = self._data.held_out
        assert held_out is not None  # asked only if `wanted`
        prompts = [held_out.prompt(index) for index in range(min(self._config.eval.prompts, len(held_out)))]
        tasks = [
            asyncio.create_task(self._judge(number, prompt, version, or_later)) for number, prompt in enumerate(prompts)
        ]
        self.under_way += 1
        try:
            return summarise(await asyncio.gather(*tasks))
        finally:
            self.under_way -= 1
            for task in tasks:
                task.cancel()

    async def _judge(self, number: int, prompt: Prompt, version: Version, or_later: bool) -> Judged:
        for attempt in range(1, ATTEMPTS + 1):
            engines = [e for e in self._fleet.serving(version[0]) if or_later or e.version == version]
            rewards = self._fleet.rewards()
            if engines and rewards:
                try:
                    return await self._ask(
                        prompt, engines[number % len(engines)], rewards[(number + attempt) % len(rewards)]
                    )
                except grpc.aio.AioRpcError as error:
                    problem = explain(error)
                    if error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND):
                        raise EvaluationFailed(problem) from error
                except AnswerCut:
                    problem = "an answer was cut by a weight synchronisation"
            else:
                problem = f"no {'rollout' if not engines else 'reward'} replica is ready"
            if number == 0:
                logger.warning("evaluation, attempt %d of %d: %s", attempt, ATTEMPTS, problem)
            await asyncio.sleep(RETRY_SECONDS)
        raise EvaluationFailed(problem)

    async def _ask(self, prompt: Prompt, engine: Replica, reward: Replica) -> Judged:
        request = GenerateRequest(
            prompt_tokens=prompt.tokens.tolist(),
            n=1,
            sampling=SamplingParams(
                max_new_tokens=self._config.eval.max_new_tokens or self._config.rollout.max_new_tokens, temperature=0.0
            ),
        )
        text, finish_reason, length = "", "", 0
        stub = self._peers.rollout(engine.registration.address)
        async for part in stub.Generate(request, timeout=GENERATE_SECONDS):
            length += len(part.tokens)
            if part.finish_reason:
                text, finish_reason = part.text, part.finish_reason
        if finish_reason == "abort":
            raise AnswerCut
        scored = await self._peers.reward(reward.registration.address).Score(
            ScoreRequest(
                reward=self._config.reward.name,
                prompt=prompt.text,
                answer=prompt.answer,
                metadata_json=json.dumps(prompt.metadata),
                responses=[text],
                finish_reasons=[finish_reason],
            ),
            timeout=GENERATE_SECONDS,
        )
        return Judged(scored.scores[0], length)


def summarise(judged: Sequence[Judged]) -> dict[str, float]:
    """The metrics of an evaluation."""
    count = len(judged)
    scored = [one for one in judged if not one.score.error]
    sums: dict[str, float] = {}
    for one in scored:
        for name, value in one.score.parts.items():
            sums[f"eval_{name}"] = sums.get(f"eval_{name}", 0.0) + value
    means = {name: value / count for name, value in sums.items()}
    reward = sum(one.score.reward for one in scored) / count
    means.setdefault("eval_accuracy", reward)
    if len(scored) < count:
        first = next(one.score.error for one in judged if one.score.error)
        logger.warning("%d of %d held-out answers could not be scored: %s", count - len(scored), count, first)
    return means | {
        "eval_reward": reward,
        "eval_response_length": sum(one.length for one in judged) / count,
        "eval_prompts": float(count),
        "eval_unscored": float(count - len(scored)),
    }
