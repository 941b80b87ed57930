"""Evaluation: greedy answers to held-out prompts, scored by the run's own reward."""

import asyncio
import json
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from relaxd.data.dataset import Prompt, RunData
from relaxd.rewards.base import text_message
from relaxd.rewards.messages import to_proto
from relaxd.rpc.errors import explain
from relaxd.v1.content_pb2 import Conversation
from relaxd.v1.reward_pb2 import Score, ScoreRequest
from relaxd.v1.rollout_pb2 import GenerateRequest, GenerateResponse
from relaxd.v1.sample_pb2 import FINISH_REASON_ABORT, FinishReason, SamplingParams
from relaxd.waiting import waiting
from services.coordinator.fleet.registry import Replica, Version
from services.coordinator.fleet.run_context import RunContext
from services.coordinator.fleet.stall_limit import LONG_CALL_SECONDS, NoAnswer, answer

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

ATTEMPTS = 5
"""Attempts for one prompt before the evaluation fails."""
RETRY_SECONDS = 2.0
POLL_SECONDS = 0.5


class EvaluationFailed(Exception):
    """Held-out prompts could not be answered or scored."""


class _Retry(Exception):
    """A prompt was not answered or scored for a reason that may pass."""


@dataclass(frozen=True)
class Judged:
    """One scored answer."""

    prompt: Prompt
    response: str
    score: Score
    length: int
    """Tokens of the answer."""
    finish_reason: str
    """"stop" or "length"."""

    def to_json(self) -> dict[str, Any]:
        """Return a line of the file with an evaluation's answers."""
        return {
            "index": self.prompt.index,
            "prompt": self.prompt.text,
            "answer": self.prompt.answer,
            "response": self.response,
            "reward": self.score.reward,
            "parts": dict(self.score.parts),
            "error": self.score.error,
            "length": self.length,
            "finish_reason": self.finish_reason,
        }


@dataclass
class _Question:
    """A prompt and its attempts."""

    prompt: Prompt
    attempts: int = 0
    engine: str = ""
    """Replica of the last attempt."""


class Evaluator:
    """Evaluates one run."""

    def __init__(self, context: RunContext, data: RunData) -> None:
        self._context = context
        self._data = data
        self.in_progress = 0
        """Evaluations in progress."""

    @property
    def wanted(self) -> bool:
        """The run evaluates at all."""
        return self._context.config.eval.prompts > 0 and self._data.held_out is not None

    async def evaluate(self, version: Version, *, or_later: bool = False) -> list[Judged]:
        """Evaluate a version, with `or_later` also on engines that serve a later one.

        Returns the scored answers in the prompts' order. Raises EvaluationFailed.
        """
        held_out = self._data.held_out
        assert held_out is not None  # callers check `wanted`
        prompts = [held_out.prompt(index) for index in range(min(self._context.config.eval.prompts, len(held_out)))]
        self.in_progress += 1
        try:
            with waiting(f"the evaluation of version {version[1]}") as wait:

                def on_progress(done: int) -> None:
                    wait.reason = (
                        f"the evaluation of version {version[1]}, which has {done} of {len(prompts)} answers scored"
                    )

                judged = await _Evaluation(self._context, version, or_later).run(prompts, on_progress)
            return sorted(judged, key=lambda one: one.prompt.index)
        finally:
            self.in_progress -= 1


class _Evaluation:
    """One evaluation.

    An engine gets at most rollout.max_running_samples prompts at once. An answer may take any time while its engine
    makes progress: eval.stall_seconds limits only the time without.
    """

    def __init__(self, context: RunContext, version: Version, or_later: bool) -> None:
        self._context = context
        self._version = version
        self._or_later = or_later
        self._busy: Counter[str] = Counter()
        """Prompts in progress on an engine, answers in progress on a reward replica, by replica id."""
        self._tasks: dict[asyncio.Task[Judged], _Question] = {}
        self._reported: set[str] = set()

    async def run(self, prompts: Sequence[Prompt], on_progress: Callable[[int], None]) -> list[Judged]:
        """Evaluate all prompts; returns their scored answers in any order. Raises EvaluationFailed.

        `on_progress` is told the number of answers so far.
        """
        waiting = deque(map(_Question, prompts))
        judged: list[Judged] = []
        try:
            while waiting or self._tasks:
                on_progress(len(judged))
                if not self._tasks:
                    await self._await_any(self._engines, "rollout replica serves the version")
                self._dispatch(waiting)
                if not self._tasks:
                    continue
                # named: by `evaluate`
                done, _ = await asyncio.wait(self._tasks, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    question = self._tasks.pop(task)
                    try:
                        judged.append(task.result())
                    except _Retry as problem:
                        self._report(question, str(problem))
                        waiting.append(question)
            return judged
        finally:
            for task in self._tasks:
                task.cancel()

    def _dispatch(self, waiting: deque[_Question]) -> None:
        """Fill the engines up with prompts; a failed prompt goes to another engine if there is one."""
        engines = self._engines()
        max_running = self._context.config.rollout.max_running_samples
        while waiting and (free := [engine for engine in engines if self._busy[engine.replica_id] < max_running]):
            question = waiting.popleft()
            loads = [(engine.replica_id == question.engine, self._busy[engine.replica_id]) for engine in free]
            engine = free[loads.index(min(loads))]
            question.attempts, question.engine = question.attempts + 1, engine.replica_id
            self._busy[engine.replica_id] += 1
            self._tasks[asyncio.create_task(self._judge(question.prompt, engine))] = question

    def _engines(self) -> list[Replica]:
        """Return the engines that serve the version: a version's weights are the same in every later term."""
        term, version = self._version
        return [
            engine
            for engine in self._context.fleet.candidates()
            if engine.version is not None
            and engine.version[0] >= term
            and (engine.version[1] == version or (self._or_later and engine.version[1] > version))
        ]

    async def _judge(self, prompt: Prompt, engine: Replica) -> Judged:
        try:
            try:
                final = await self._generate(prompt, engine)
            finally:
                self._busy[engine.replica_id] -= 1
            score = await self._score(prompt, final)
            finish_reason = FinishReason.Name(final.finish_reason).removeprefix("FINISH_REASON_").lower()
            return Judged(prompt, final.text, score, final.token_count, finish_reason)
        except _Retry:
            await asyncio.sleep(RETRY_SECONDS)
            raise

    async def _generate(self, prompt: Prompt, engine: Replica) -> GenerateResponse:
        request = GenerateRequest(
            prompt_tokens=prompt.tokens.tolist(),
            n=1,
            sampling=SamplingParams(
                max_new_tokens=self._context.config.eval.max_new_tokens or self._context.config.rollout.max_new_tokens,
                temperature=0.0,
                stop=self._context.config.rollout.stop,
            ),
            final_only=True,
        )
        call = self._context.peers.rollout(engine.registration.address).Generate(request, timeout=LONG_CALL_SECONDS)
        final = await self._await_answer(call.read(), engine, self._context.config.eval.stall_seconds)
        if not isinstance(final, GenerateResponse):
            raise _Retry(f"{engine.replica_id} ended the call without an answer")
        if final.finish_reason == FINISH_REASON_ABORT:  # weights.pause = "abort"
            raise _Retry("a weight synchronisation aborted an answer")
        return final

    async def _score(self, prompt: Prompt, final: GenerateResponse) -> Score:
        request = ScoreRequest(
            reward="",  # the run's, with its settings
            prompt=to_proto(prompt.messages or [text_message("user", prompt.text)]),
            answer=to_proto([text_message("assistant", prompt.answer)]),
            metadata_json=json.dumps(prompt.metadata),
            responses=[Conversation(messages=to_proto([text_message("assistant", final.text)]))],
            finish_reasons=[final.finish_reason],
            response_tokens=[final.token_count],
        )
        rewards = await self._await_any(self._context.fleet.rewards, "reward replica is ready")
        reward = min(rewards, key=lambda one: self._busy[one.replica_id])
        self._busy[reward.replica_id] += 1
        try:
            call = self._context.peers.reward(reward.registration.address).Score(request, timeout=LONG_CALL_SECONDS)
            # Progress may stall as long as one sample takes, twice if the reward's process dies.
            stall_seconds = self._context.config.eval.stall_seconds + 2 * self._context.config.reward.timeout_seconds
            return (await self._await_answer(call, reward, stall_seconds)).scores[0]
        finally:
            self._busy[reward.replica_id] -= 1

    async def _await_answer(self, call: Awaitable[Result], replica: Replica, stall_seconds: float) -> Result:
        try:
            return await answer(call, replica, self._context.fleet.registry, stall_seconds)
        except NoAnswer as problem:
            raise _Retry(str(problem)) from problem
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND):
                raise EvaluationFailed(explain(error)) from error
            raise _Retry(f"{replica.replica_id}: {explain(error)}") from error

    async def _await_any(self, find: Callable[[], list[Replica]], condition: str) -> list[Replica]:
        """Wait until `find` returns replicas. Raises EvaluationFailed: they keep failing, or don't appear in time."""
        since = time.monotonic()
        while not (found := find()):
            if (failure := self._context.fleet.failure()) is not None:
                raise EvaluationFailed(failure)
            if time.monotonic() - since > self._context.config.eval.stall_seconds:
                raise EvaluationFailed(
                    f"no {condition}, for {self._context.config.eval.stall_seconds:g} s (eval.stall_seconds)"
                )
            await self._context.fleet.registry.changed.wait(POLL_SECONDS)  # named: by `evaluate`
        return found

    def _report(self, question: _Question, problem: str) -> None:
        """Log a problem once. Raises EvaluationFailed after the last attempt."""
        if question.attempts >= ATTEMPTS:
            raise EvaluationFailed(f"{problem} (attempt {question.attempts} of {ATTEMPTS})")
        if problem not in self._reported:
            self._reported.add(problem)
            logger.warning("evaluation, attempt %d of %d: %s", question.attempts, ATTEMPTS, problem)


def summarise_answers(judged: Sequence[Judged]) -> dict[str, float]:
    """Compute the metrics of an evaluation: means over all its answers.

    Returns eval_reward, eval_<part> for each part of the reward, eval_response_length (tokens) and eval_prompts. An
    answer that the reward couldn't score counts as 0 and is counted in eval_unscored.
    """
    count = len(judged)
    scored = [one for one in judged if not one.score.error]
    sums: dict[str, float] = {}
    for one in scored:
        for name, value in one.score.parts.items():
            sums[f"eval_{name}"] = sums.get(f"eval_{name}", 0.0) + value
    means = {name: value / count for name, value in sums.items()}
    reward = sum(one.score.reward for one in scored) / count
    if len(scored) < count:
        first = next(one.score.error for one in judged if one.score.error)
        logger.warning("%d of %d held-out answers could not be scored: %s", count - len(scored), count, first)
    return means | {
        "eval_reward": reward,
        "eval_response_length": sum(one.length for one in judged) / count,
        "eval_prompts": float(count),
        "eval_unscored": float(count - len(scored)),
    }
