"""Evaluation: engines answer held-out prompts; the reward of the run, or of the evaluation set, scores the answers."""

import asyncio
import json
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc

from relaxd.data.dataset import Prompt, PromptDataset, RunData
from relaxd.data.vision import THREADS
from relaxd.evaluation.estimates import ScoredAnswer, summarise_set, vote_of
from relaxd.evaluation.sets import ResolvedSet, sets_of
from relaxd.media.messages import text_message, to_proto
from relaxd.models import DataError
from relaxd.roles import AGENT, REWARD, ROLES
from relaxd.rpc.errors import explain, is_too_large
from relaxd.rpc.message_parts import words
from relaxd.v1 import reward_pb2
from relaxd.v1.agent_pb2 import ConverseRequest, ConverseResponse
from relaxd.v1.content_pb2 import Conversation
from relaxd.v1.replica_pb2 import WeightVersion
from relaxd.v1.reward_pb2 import ScoreRequest
from relaxd.v1.rollout_pb2 import GenerateRequest, GenerateResponse
from relaxd.v1.sample_pb2 import FINISH_REASON_ABORT, FinishReason
from relaxd.waiting import waiting
from services.coordinator.fleet.peers import LONG_CALL_SECONDS, NoAnswer, answer
from services.coordinator.fleet.registry import Replica, Version
from services.coordinator.fleet.run_fleet import RunContext
from services.coordinator.runs.run_files import KeepLines
from services.coordinator.state.retries import MediaHostRetry

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
Final = TypeVar("Final", GenerateResponse, ConverseResponse)

ATTEMPTS = 5
"""Maximum attempts to answer and score one prompt; after the last, the evaluation fails."""
RETRY_SECONDS = 2.0
POLL_SECONDS = 0.5
TURN = 16
"""Number of prompts to give to engines before other tasks, such as heartbeats, get a turn."""
MESSAGE_BYTES = 32 << 20
"""Approximate maximum bytes of answers in one call to a reward replica."""


class EvaluationFailed(Exception):
    """Held-out prompts could not be answered or scored."""


class _Retry(Exception):
    """A prompt was not answered or scored for a reason that may pass."""


class _TooLarge(Exception):
    """A message with a prompt's media is above the size limit. The text names sender, receiver and error."""


@dataclass
class _Question:
    """One prompt of an evaluation set, and how often it was given to a replica."""

    asked: ResolvedSet
    index: int
    """Index of the prompt in its set."""
    attempts: int = 0
    replica: str = ""
    """Id of the replica that made the last attempt."""


Evaluated = dict[str, list[ScoredAnswer]]
"""Scored answers by set name, in the order of the prompts."""


class Evaluator:
    """Evaluates versions of one run on its evaluation sets."""

    def __init__(self, context: RunContext, data: RunData) -> None:
        self._context = context
        self._data = data.evaluation
        self._sets = [one for one in sets_of(context.config) if one.name in data.evaluation]
        self.in_progress = 0
        """Number of evaluations in progress."""

    @property
    def wanted(self) -> bool:
        """True if the run has evaluation sets."""
        return bool(self._sets)

    async def evaluate(self, version: Version, keep: KeepLines, *, beside_training: bool = False) -> Evaluated:
        """Evaluate a version on all sets.

        With `beside_training`, use engines that serve a later version, too, but only a share of each engine's capacity.
        `keep` gets the numbers of all answers, and the texts for the first eval.kept_prompts prompts of each set. Texts
        stay in memory only while their prompt is in progress. Raises EvaluationFailed.
        """
        questions = [
            _Question(one, index)
            for one in self._sets
            for index in range(min(one.prompts or len(self._data[one.name]), len(self._data[one.name])))
        ]
        total = sum(question.asked.samples_per_prompt for question in questions)
        self.in_progress += 1
        try:
            with waiting(f"the evaluation of version {version[1]}") as wait:

                def on_progress(done: int) -> None:
                    wait.reason = f"the evaluation of version {version[1]}, which has {done} of {total} answers scored"

                evaluation = _Evaluation(self._context, self._data, version, keep, beside_training)
                found = await evaluation.run(questions, on_progress)
            return {
                one.name: sorted(found[one.name], key=lambda answer: (answer.index, answer.sample))
                for one in self._sets
            }
        finally:
            self.in_progress -= 1

    async def summarise(self, found: Evaluated) -> dict[str, float]:
        """Return the metrics of all evaluation sets."""
        metrics: dict[str, float] = {}
        for one in self._sets:
            metrics |= await asyncio.to_thread(summarise_set, one, found[one.name])
        return metrics


class _Evaluation:
    """One evaluation.

    An engine generates at most rollout.max_running_samples answers at once (beside training, a share of that), but
    always at least those of one prompt. Only an engine's time without progress is limited, by eval.stall_seconds. In a
    run with an environment the answers are conversations: agent replicas hold at most agent.max_sessions at once each.
    """

    def __init__(
        self,
        context: RunContext,
        data: Mapping[str, PromptDataset],
        version: Version,
        keep: KeepLines,
        beside_training: bool,
    ) -> None:
        self._context = context
        self._data = data
        self._version = version
        self._keep = keep
        self._or_later = beside_training
        config = context.config
        share = config.eval.engine_share if beside_training else 1.0
        self._converses = config.agent.is_there
        most = config.agent.max_sessions if self._converses else config.rollout.max_running_samples
        self._max_running = most * share
        self._busy: Counter[str] = Counter()
        """Number of answers in progress on an engine or agent, or of prompts in progress on a reward replica, by
        replica id."""
        self._tasks: dict[asyncio.Task[list[ScoredAnswer]], _Question] = {}
        self._reported: set[str] = set()
        self._media_hosts = MediaHostRetry(f"the evaluation of version {version[1]}", config.data)
        self._reading = asyncio.Semaphore(THREADS)
        """Allows at most THREADS concurrent reads of prompts with media; each read runs in a thread."""

    async def run(self, questions: Iterable[_Question], on_progress: Callable[[int], None]) -> Evaluated:
        """Evaluate all prompts; returns their answers in any order. Raises EvaluationFailed.

        `on_progress` gets the number of answers scored so far.
        """
        waiting = deque(questions)
        found: Evaluated = defaultdict(list)
        try:
            while waiting or self._tasks:
                on_progress(sum(map(len, found.values())))
                if not self._tasks or self._converses:  # an agent would wait for engines without end
                    await self._await_any(self._engines, "rollout replica serves the version")
                if not self._tasks and self._converses:
                    await self._await_any(self._agents, "agent replica is ready")
                await self._dispatch(waiting)
                if not self._tasks:
                    continue
                # named: by `evaluate`
                done, _ = await asyncio.wait(self._tasks, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    question = self._tasks.pop(task)
                    try:
                        found[question.asked.name] += task.result()
                    except _Retry as problem:
                        self._report(question, str(problem))
                        waiting.append(question)
            return found
        finally:
            for task in self._tasks:
                task.cancel()

    async def _dispatch(self, waiting: deque[_Question]) -> None:
        """Give prompts to the engines, or agents, up to their capacity; a failed prompt goes to another replica if
        possible."""
        answering = self._agents if self._converses else self._engines
        replicas = answering()
        given = 0
        while waiting:
            count = waiting[0].asked.samples_per_prompt
            free = [
                replica
                for replica in replicas
                if (busy := self._busy[replica.replica_id]) == 0 or busy + count <= self._max_running
            ]
            if not free:
                return
            question = waiting.popleft()
            loads = [(replica.replica_id == question.replica, self._busy[replica.replica_id]) for replica in free]
            replica = free[loads.index(min(loads))]
            question.attempts, question.replica = question.attempts + 1, replica.replica_id
            self._busy[replica.replica_id] += count
            self._tasks[asyncio.create_task(self._judge(question, replica))] = question
            given += 1
            if given % TURN == 0:
                await asyncio.sleep(0)  # brief: thousands of prompts for hundreds of engines take seconds
                replicas = answering()

    def _agents(self) -> list[Replica]:
        return self._context.fleet.ready(AGENT)

    def _engines(self) -> list[Replica]:
        """Return the engines that serve the evaluated version in this term or a later one, in which its weights are the
        same. Beside training, engines with a later version count, too."""
        term, version = self._version
        return [
            engine
            for engine in self._context.fleet.candidates()
            if engine.version is not None
            and engine.version[0] >= term
            and (engine.version[1] == version or (self._or_later and engine.version[1] > version))
        ]

    async def _prompt(self, question: _Question) -> Prompt:
        """Return the prompt that a question names. Raises DataError if the data can't be read."""
        data = self._data[question.asked.name]
        if not self._context.config.has_media:
            return data.prompt(question.index)
        async with self._reading:
            return await self._media_hosts.in_thread(data.prompt, question.index)

    async def _judge(self, question: _Question, replica: Replica) -> list[ScoredAnswer]:
        asked = question.asked
        try:
            try:
                try:
                    prompt = await self._prompt(question)
                except DataError as error:  # rows of large files aren't checked before
                    raise EvaluationFailed(f"{asked.name}: {error}") from error
                finals = await (self._converse if self._converses else self._generate)(asked, prompt, replica)
                # The replica counts as busy until here: otherwise slow rewards would pile up answers.
                whole = [final for final in finals if not final.failure]
                scores = [one for some in _in_messages(whole) for one in await self._score(asked, prompt, some)]
            except _TooLarge as error:
                what = f"{asked.name}, prompt {question.index}: with its media it is too large for a message"
                raise EvaluationFailed(f"{what} {error}") from error
            finally:
                self._busy[replica.replica_id] -= asked.samples_per_prompt
        except _Retry:
            await asyncio.sleep(RETRY_SECONDS)
            raise
        given = iter(scores)
        of_answers = [
            (final, reward_pb2.Score(error=final.failure) if final.failure else next(given)) for final in finals
        ]
        answers = [
            ScoredAnswer(
                index=question.index,
                sample=final.sample,
                reward=0.0 if score.error else score.reward,
                length=final.token_count,
                finish_reason=words(FinishReason)[final.finish_reason],
                vote=vote_of(final.text) if asked.samples_per_prompt > 1 else "",
                parts=dict(score.parts),
                error=score.error,
                turns=final.turns,
            )
            for final, score in of_answers
        ]
        lines = [answer.to_json() for answer in answers]
        if question.index < self._context.config.eval.kept_prompts:
            texts = {"prompt": prompt.text, "answer": prompt.answer}
            lines = [{**line, **texts, **_said(final)} for line, final in zip(lines, finals, strict=True)]
        await asyncio.to_thread(self._keep, asked.name, lines)
        return answers

    async def _generate(self, asked: ResolvedSet, prompt: Prompt, engine: Replica) -> list[ConverseResponse]:
        """Return all answers to a prompt, in order. Their tokens stay with the engine."""
        request = GenerateRequest(
            prompt_tokens=prompt.tokens.tolist(),
            n=asked.samples_per_prompt,
            sampling=asked.sampling(prompt.index),
            final_only=True,
            media=prompt.media.to_proto(),
            media_contents=prompt.media.contents,
        )
        call = self._context.peers.rollout(engine.registration.address).Generate(request, timeout=LONG_CALL_SECONDS)
        finals = await self._read_all(asked, call, engine, self._context.config.eval.stall_seconds)
        if any(final.finish_reason == FINISH_REASON_ABORT for final in finals):  # weights.pause = "abort"
            raise _Retry("a weight synchronisation aborted an answer")
        return [
            ConverseResponse(
                sample=final.sample,
                finish_reason=final.finish_reason,
                text=final.text,
                token_count=final.token_count,
                messages=to_proto([text_message("assistant", final.text)]),
            )
            for final in finals
        ]

    async def _converse(self, asked: ResolvedSet, prompt: Prompt, agent: Replica) -> list[ConverseResponse]:
        """Return all conversations about a prompt, in order."""
        term, version = self._version
        request = ConverseRequest(
            evaluation_set=asked.name,
            prompt_json=json.dumps(prompt.to_json()),
            n=asked.samples_per_prompt,
            sampling=asked.sampling(prompt.index),
            weights=WeightVersion(term=term, version=version),
            or_later=self._or_later,
            media=prompt.media.to_proto(),
            media_contents=prompt.media.contents,
        )
        call = self._context.peers.agent(agent.registration.address).Converse(request, timeout=LONG_CALL_SECONDS)
        config = self._context.config
        # Progress may stall as long as one call of the environment takes.
        stall_seconds = config.eval.stall_seconds + ROLES[AGENT].timeout_seconds(config)
        return await self._read_all(asked, call, agent, stall_seconds)

    async def _read_all(
        self, asked: ResolvedSet, call: AsyncIterable[Final], replica: Replica, stall_seconds: float
    ) -> list[Final]:
        """Return the answers of a streamed call, sorted by sample. Raises _Retry if some are missing."""

        async def read() -> list[Final]:
            return sorted([final async for final in call], key=lambda final: final.sample)

        finals = await self._await_answer(read(), replica, stall_seconds)
        count = asked.samples_per_prompt
        if [final.sample for final in finals] != list(range(count)):
            raise _Retry(f"{replica.replica_id} ended the call with {len(finals)} of {count} answers")
        return finals

    async def _score(
        self, asked: ResolvedSet, prompt: Prompt, finals: Sequence[ConverseResponse]
    ) -> list[reward_pb2.Score]:
        media = prompt.media.by_hash() if (asked.reward or self._context.config.reward).media else {}
        for final in finals:
            media |= final.media
        request = ScoreRequest(
            evaluation_set=asked.name if asked.reward is not None else "",  # without one: the run's reward
            prompt=to_proto(prompt.messages or [text_message("user", prompt.text)]),
            answer=to_proto([text_message("assistant", prompt.answer)]),
            metadata_json=json.dumps(prompt.metadata),
            responses=[Conversation(messages=final.messages) for final in finals],
            finish_reasons=[final.finish_reason for final in finals],
            response_tokens=[final.token_count for final in finals],
            environment_outcomes=[final.outcome for final in finals if final.HasField("outcome")],
            media=media,
        )
        rewards = await self._await_any(partial(self._context.fleet.ready, REWARD), "reward replica is ready")
        reward = min(rewards, key=lambda one: self._busy[one.replica_id])
        self._busy[reward.replica_id] += 1
        try:
            call = self._context.peers.reward(reward.registration.address).Score(request, timeout=LONG_CALL_SECONDS)
            # Progress may stall as long as one sample takes, twice if the reward's process dies.
            config = self._context.config
            stall_seconds = config.eval.stall_seconds + 2 * ROLES[REWARD].timeout_seconds(config)
            return list((await self._await_answer(call, reward, stall_seconds)).scores)
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
            if is_too_large(error):
                between = f"between the coordinator and {replica.replica_id}"
                raise _TooLarge(f"{between}: make them smaller ({explain(error)})") from error
            raise _Retry(f"{replica.replica_id}: {explain(error)}") from error

    async def _await_any(self, find: Callable[[], list[Replica]], condition: str) -> list[Replica]:
        """Wait until `find` returns at least one replica. Raises EvaluationFailed if the replicas keep failing, or if
        none appears within eval.stall_seconds."""
        since = time.monotonic()
        while not (found := find()):
            if (failure := self._context.fleet.failure()) is not None:
                raise EvaluationFailed(str(failure))
            if time.monotonic() - since > self._context.config.eval.stall_seconds:
                raise EvaluationFailed(
                    f"no {condition}, for {self._context.config.eval.stall_seconds:g} s (eval.stall_seconds)"
                )
            await self._context.fleet.registry.changed.wait(POLL_SECONDS)  # named: by `evaluate`
        return found

    def _report(self, question: _Question, problem: str) -> None:
        """Log why an attempt failed; the same reason only once. Raises EvaluationFailed if it was the last attempt."""
        if question.attempts >= ATTEMPTS:
            raise EvaluationFailed(f"{problem} (attempt {question.attempts} of {ATTEMPTS})")
        if problem not in self._reported:
            self._reported.add(problem)
            logger.warning("evaluation, attempt %d of %d: %s", question.attempts, ATTEMPTS, problem)


def _said(final: ConverseResponse) -> dict[str, Any]:
    """Return an answer's texts for the evaluation's file; for a conversation also its messages."""
    if not final.turns:
        return {"response": final.text}
    said = [{"role": one.role, "content": "".join(part.text for part in one.content)} for one in final.messages]
    return {"response": final.text, "messages": said}


def _in_messages(finals: Sequence[ConverseResponse]) -> Iterator[list[ConverseResponse]]:
    """Divide answers among requests of about MESSAGE_BYTES at most."""
    some: list[ConverseResponse] = []
    size = 0
    for final in finals:
        if some and size + final.ByteSize() > MESSAGE_BYTES:
            yield some
            some, size = [], 0
        some.append(final)
        size += final.ByteSize()
    if some:
        yield some
