"""Evaluation: greedy answers to held-out prompts, judged by the run's own reward."""

import asyncio
import json
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc

from relaxd.config import RunConfig
from relaxd.data.dataset import Prompt, RunData
from relaxd.rpc.errors import explain
from relaxd.v1.reward_pb2 import Score, ScoreRequest
from relaxd.v1.rollout_pb2 import GenerateRequest, GenerateResponse
from relaxd.v1.sample_pb2 import SamplingParams
from services.coordinator.fleet import Fleet
from services.coordinator.patience import LONG_CALL_SECONDS, NoAnswer, answer
from services.coordinator.peers import Peers
from services.coordinator.registry import Replica, Version

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

ATTEMPTS = 5
"""How often one prompt is asked before the evaluation is given up."""
RETRY_SECONDS = 2.0
LOOK_SECONDS = 0.5


class EvaluationFailed(Exception):
    """Held-out prompts could not be answered or judged."""


class _AskAgain(Exception):
    """A prompt was not answered, or its answer not scored, for a reason that may pass."""


@dataclass(frozen=True)
class Judged:
    """One answer."""

    score: Score
    length: int
    """Tokens of the answer."""


@dataclass
class _Question:
    """A prompt, and how often it was asked."""

    prompt: Prompt
    attempts: int = 0
    engine: str = ""
    """The replica that was asked last."""


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
        """Ask the held-out prompts of the engines that serve a version, with `or_later` also a later one.

        Returns eval_accuracy and eval_format (where the reward has such parts; eval_accuracy is the reward where it has
        none), eval_reward, eval_response_length (tokens) and eval_prompts. An answer that the reward can't score
        counts as 0 and is counted in eval_unscored. Raises EvaluationFailed.
        """
        held_out = self._data.held_out
        assert held_out is not None  # asked only if `wanted`
        prompts = [held_out.prompt(index) for index in range(min(self._config.eval.prompts, len(held_out)))]
        self.under_way += 1
        try:
            return summarise(await _Evaluation(self._config, self._fleet, self._peers, version, or_later).run(prompts))
        finally:
            self.under_way -= 1


class _Evaluation:
    """One evaluation.

    An engine has at most rollout.max_running_samples prompts at once. An answer may take as long as its engine
    generates anything: eval.stall_seconds limits the silence, and nothing the whole.
    """

    def __init__(self, config: RunConfig, fleet: Fleet, peers: Peers, version: Version, or_later: bool) -> None:
        self._config = config
        self._fleet = fleet
        self._peers = peers
        self._version = version
        self._or_later = or_later
        self._busy: Counter[str] = Counter()
        """By replica id: prompts that an engine, and answers that a reward replica works on."""
        self._asked: dict[asyncio.Task[Judged], _Question] = {}
        self._told: set[str] = set()

    async def run(self, prompts: Sequence[Prompt]) -> list[Judged]:
        """Ask all prompts; returns what became of them, in any order. Raises EvaluationFailed."""
        waiting = deque(map(_Question, prompts))
        judged: list[Judged] = []
        try:
            while waiting or self._asked:
                if not self._asked:
                    await self._await_any(self._engines, "rollout replica serves the version")
                self._ask(waiting)
                if not self._asked:
                    continue
                done, _ = await asyncio.wait(self._asked, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    question = self._asked.pop(task)
                    try:
                        judged.append(task.result())
                    except _AskAgain as problem:
                        self._complain(question, str(problem))
                        waiting.append(question)
            return judged
        finally:
            for task in self._asked:
                task.cancel()

    def _ask(self, waiting: deque[_Question]) -> None:
        """Give every engine as many prompts as it may have; one that failed goes to another engine, if there is one."""
        engines = self._engines()
        most = self._config.rollout.max_running_samples
        while waiting and (free := [engine for engine in engines if self._busy[engine.replica_id] < most]):
            question = waiting.popleft()
            loads = [(engine.replica_id == question.engine, self._busy[engine.replica_id]) for engine in free]
            engine = free[loads.index(min(loads))]
            question.attempts, question.engine = question.attempts + 1, engine.replica_id
            self._busy[engine.replica_id] += 1
            self._asked[asyncio.create_task(self._judge(question.prompt, engine))] = question

    def _engines(self) -> list[Replica]:
        """The engines that serve the weights: under a later epoch of the trainer they are the same."""
        epoch, version = self._version
        return [
            engine
            for engine in self._fleet.engines()
            if engine.replica_id not in self._fleet.set_aside
            and engine.version is not None
            and engine.version[0] >= epoch
            and (engine.version[1] == version or (self._or_later and engine.version[1] > version))
        ]

    async def _judge(self, prompt: Prompt, engine: Replica) -> Judged:
        try:
            try:
                final = await self._generate(prompt, engine)
            finally:
                self._busy[engine.replica_id] -= 1
            return Judged(await self._score(prompt, final), final.token_count)
        except _AskAgain:
            await asyncio.sleep(RETRY_SECONDS)
            raise

    async def _generate(self, prompt: Prompt, engine: Replica) -> GenerateResponse:
        request = GenerateRequest(
            prompt_tokens=prompt.tokens.tolist(),
            n=1,
            sampling=SamplingParams(
                max_new_tokens=self._config.eval.max_new_tokens or self._config.rollout.max_new_tokens, temperature=0.0
            ),
            final_only=True,
        )
        call = self._peers.rollout(engine.registration.address).Generate(request, timeout=LONG_CALL_SECONDS)
        final = await self._patiently(call.read(), engine, self._config.eval.stall_seconds)
        if not isinstance(final, GenerateResponse):
            raise _AskAgain(f"{engine.replica_id} ended the call without an answer")
        if final.finish_reason == "abort":  # weights.pause = "abort"
            raise _AskAgain("an answer was cut by a weight synchronisation")
        return final

    async def _score(self, prompt: Prompt, final: GenerateResponse) -> Score:
        request = ScoreRequest(
            reward=self._config.reward.name,
            prompt=prompt.text,
            answer=prompt.answer,
            metadata_json=json.dumps(prompt.metadata),
            responses=[final.text],
            finish_reasons=[final.finish_reason],
        )
        rewards = await self._await_any(self._fleet.rewards, "reward replica is ready")
        reward = min(rewards, key=lambda one: self._busy[one.replica_id])
        self._busy[reward.replica_id] += 1
        try:
            call = self._peers.reward(reward.registration.address).Score(request, timeout=LONG_CALL_SECONDS)
            # Nothing may be scored for as long as the reward takes for a sample, twice where its process dies.
            stall_seconds = self._config.eval.stall_seconds + 2 * self._config.reward.timeout_seconds
            return (await self._patiently(call, reward, stall_seconds)).scores[0]
        finally:
            self._busy[reward.replica_id] -= 1

    async def _patiently(self, call: Awaitable[Result], replica: Replica, stall_seconds: float) -> Result:
        try:
            return await answer(call, replica, self._fleet.registry, stall_seconds)
        except NoAnswer as problem:
            raise _AskAgain(str(problem)) from problem
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND):
                raise EvaluationFailed(explain(error)) from error
            raise _AskAgain(f"{replica.replica_id}: {explain(error)}") from error

    async def _await_any(self, find: Callable[[], list[Replica]], what: str) -> list[Replica]:
        """Wait until `find` finds replicas. Raises EvaluationFailed: they keep failing, or are away for too long."""
        since = time.monotonic()
        while not (found := find()):
            if (failure := self._fleet.failure()) is not None:
                raise EvaluationFailed(failure)
            if time.monotonic() - since > self._config.eval.stall_seconds:
                raise EvaluationFailed(f"no {what}, for {self._config.eval.stall_seconds:g} s (eval.stall_seconds)")
            await self._fleet.registry.changed.wait(LOOK_SECONDS)
        return found

    def _complain(self, question: _Question, problem: str) -> None:
        """Log a problem once. Raises EvaluationFailed after the last attempt."""
        if question.attempts >= ATTEMPTS:
            raise EvaluationFailed(f"{problem} (attempt {question.attempts} of {ATTEMPTS})")
        if problem not in self._told:
            self._told.add(problem)
            logger.warning("evaluation, attempt %d of %d: %s", question.attempts, ATTEMPTS, problem)


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
