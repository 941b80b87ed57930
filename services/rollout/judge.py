"""`python -m services.rollout.judge`: the judge, an engine whose frozen model answers questions of rewards."""

import asyncio
import logging
from pathlib import Path
from typing import Any

from relaxd.board import roles_for
from relaxd.config import JudgeConfig, RolloutConfig, RunConfig
from relaxd.config.role_settings import ENGINE_SETTINGS
from relaxd.data.examples import Example, Message
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.models import DataError
from relaxd.models.folders import resolve_model
from relaxd.replica.replica_life import run_replica
from relaxd.replica.replica_service import ReplicaContext, ReplicaService, ServiceStatus, SyncIds, open_context
from relaxd.roles import JUDGE
from relaxd.rpc.errors import FailedPrecondition, InvalidArgument, Unavailable, Violations
from relaxd.rpc.server import Service
from relaxd.rpc.service_settings import parse_settings
from relaxd.v1 import judge_pb2, judge_pb2_grpc
from relaxd.v1.coordinator_pb2 import Assignment
from relaxd.v1.weights_pb2 import MemoryChange
from services.rollout.engines.request_types import FINISH_NUMBERS, Output, Sampling
from services.rollout.service.child_engine import ALL_MEMORY, ChildEngine
from services.rollout.service.replica_engine import FrozenEngine

IDLE_LOOK_SECONDS = 0.1
"""Interval between checks for unanswered questions during a drain, in seconds."""

logger = logging.getLogger(__name__)


class JudgeService(ReplicaService):
    """Judge replica: answers questions of rewards with a frozen model in its engine."""

    role = JUDGE

    def __init__(self, context: ReplicaContext) -> None:
        self._engine = FrozenEngine(context, JUDGE, {"rollout.": "roles.judge."})
        self._config = JudgeConfig()
        self._tokenizer: PromptTokenizer | None = None
        self._draining = self._takes_turns = False
        self._open = self._answered = 0

    async def ask(self, messages: list[Message], seed: int) -> tuple[int, Output]:
        """Generate the reply to a conversation. Returns the conversation's length in tokens, and the reply.

        Raises Unavailable if no model is loaded or the judge sleeps or drains; InvalidArgument for a conversation that
        the chat template or the model's context can't take; and the engine's errors.
        """
        engine, tokenizer, config = self._present_engine(), self._tokenizer, self._config
        assert tokenizer is not None  # read before the engine starts
        if self._draining:
            raise Unavailable("this replica is draining: ask another one")
        if not engine.serving:
            raise Unavailable("the judge sleeps, because the trainer has its GPUs: ask again")
        self._open += 1
        try:
            (tokens,) = await asyncio.to_thread(tokenizer.encode, [Example(messages, place="the conversation")])
            length = len(tokens)
            if engine.context and length + config.max_new_tokens > engine.context:
                raise _wrong_messages(
                    f"have {length} tokens: with roles.judge.max_new_tokens = {config.max_new_tokens} that is more "
                    f"than the judge's context of {engine.context}"
                )
            sampling = Sampling(
                max_new_tokens=config.max_new_tokens,
                temperature=config.temperature,
                top_p=config.top_p,
                top_k=config.top_k,
                seed=seed,
            )
            (output,) = [one async for one in engine.generate(tuple(map(int, tokens)), 1, sampling)]
            self._answered += 1
            return length, output
        except DataError as error:
            raise _wrong_messages(error.message) from error
        finally:
            self._open -= 1

    async def sleep(self, seconds: float) -> MemoryChange:
        """Finish unanswered questions, refuse new ones, and free the engine's GPU memory.

        Raises FailedPrecondition if the judge does not share GPUs with a trainer in turns, Unavailable if no model is
        loaded, and the engine's errors.
        """
        if not self._takes_turns:
            raise FailedPrecondition(
                "this judge takes no turns with a trainer (run.colocate, roles.judge.gpu_share): nobody would wake it"
            )
        memory = await self._present_engine().sleep(seconds)
        logger.info("asleep: %.2f GB are in use now, after %.2f", memory.after_bytes / 1e9, memory.before_bytes / 1e9)
        return memory

    async def wake(self, seconds: float) -> MemoryChange:
        """Allocate the engine's GPU memory again, and accept questions. Raises Unavailable and the engine's errors."""
        memory = await self._present_engine().wake(ALL_MEMORY, seconds)
        logger.info("awake: %.2f GB are in use now, after %.2f", memory.after_bytes / 1e9, memory.before_bytes / 1e9)
        return memory

    def _present_engine(self) -> ChildEngine:
        engine = self._engine.engine
        if engine is None or not engine.alive:
            raise Unavailable("there is no model: " + (self._engine.detail or "no run with a judge is assigned"))
        return engine

    async def start_run(self, config: RunConfig, assignment: Assignment) -> None:
        """Load the judge's model and tokenizer, if the run needs a judge."""
        self._draining = False
        if JUDGE not in roles_for(config):
            self._engine.detail = "this run needs no judge service"
            return
        self._config = judge = config.roles.judge
        folder = await asyncio.to_thread(resolve_model, judge.model, setting="roles.judge.model")
        self._tokenizer = await asyncio.to_thread(_read_tokenizer, folder, judge)
        self._takes_turns = config.run.colocate and judge.shares_gpus
        await self._engine.load(folder, config, engine_config(judge), takes_turns=self._takes_turns)

    async def stop_run(self) -> None:
        self._tokenizer = None
        await self._engine.stop()

    async def pause_run(self) -> None:
        """Do nothing: rewards that are being computed still need the judge's answers."""

    async def resume_run(self) -> None:
        """Do nothing, because a pause of the run does not stop the judge."""

    async def drain(self, seconds: float) -> int:
        """Refuse new questions, so that clients send them to other replicas, and finish unanswered ones.

        Returns the number of questions that are unanswered after `seconds`.
        """
        self._draining = True
        end = asyncio.get_running_loop().time() + seconds
        while self._open and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(IDLE_LOOK_SECONDS)  # brief: `seconds`
        return self._open

    def status(self) -> ServiceStatus:
        """Return the judge's status; unanswered questions count as held groups."""
        engine = self._engine.engine
        asleep = engine is not None and engine.asleep == ALL_MEMORY
        gauges = dict(engine.gauges) if engine is not None else {}
        tokens = engine.tokens if engine is not None else 0
        return ServiceStatus(
            held_groups=self._open,
            done_groups=self._answered,
            progress=self._answered + tokens + self._engine.loaded_mebibytes,
            detail=self._engine.detail or ("asleep: the trainer has the device" if asleep else ""),
            awake=self._takes_turns and (self._engine.loading or (engine is not None and engine.alive and not asleep)),
            gauges={**gauges, "rss_bytes": self._engine.rss_bytes},
        )


def engine_config(judge: JudgeConfig) -> RolloutConfig:
    """Return the settings of a judge's engine, under the names of [rollout]."""
    return RolloutConfig(**{name: getattr(judge, name) for name in ENGINE_SETTINGS})


def _read_tokenizer(folder: Path, judge: JudgeConfig) -> PromptTokenizer:
    try:
        return PromptTokenizer(folder, judge.chat_template, judge.chat_template_arguments)
    except DataError as error:
        own = "chat_template" if error.field == "model.chat_template" else "model"
        raise DataError(f"roles.judge.{own}", error.message) from error


def _wrong_messages(problem: str) -> InvalidArgument:
    return InvalidArgument(f"messages {problem}", [("messages", problem)])


class JudgeServicer(judge_pb2_grpc.JudgeServicer):
    """gRPC servicer of relaxd.v1.Judge."""

    def __init__(self, service: JudgeService, sync_ids: SyncIds) -> None:
        self._service = service
        self._sync_ids = sync_ids

    async def Ask(self, request: judge_pb2.AskRequest, context: Any) -> judge_pb2.AskResponse:
        messages = parse_messages(request)
        prompt_tokens, output = await self._service.ask(messages, request.seed)
        return judge_pb2.AskResponse(
            text=output.text,
            finish_reason=FINISH_NUMBERS[output.finish_reason or ""],
            prompt_tokens=prompt_tokens,
            tokens=len(output.tokens),
        )

    async def Sleep(self, request: judge_pb2.JudgeSleepRequest, context: Any) -> judge_pb2.JudgeSleepResponse:
        self._check_turn(request)
        return judge_pb2.JudgeSleepResponse(memory=await self._service.sleep(request.timeout_seconds))

    async def Wake(self, request: judge_pb2.JudgeWakeRequest, context: Any) -> judge_pb2.JudgeWakeResponse:
        self._check_turn(request)
        return judge_pb2.JudgeWakeResponse(memory=await self._service.wake(request.timeout_seconds))

    def _check_turn(self, request: judge_pb2.JudgeSleepRequest | judge_pb2.JudgeWakeRequest) -> None:
        violations = Violations()
        violations.check_seconds(request.timeout_seconds, "timeout_seconds")
        violations.raise_if_any()
        self._sync_ids.take(request.sync_id)


def parse_messages(request: judge_pb2.AskRequest) -> list[dict[str, str]]:
    """Return the messages of a question. Raises InvalidArgument naming every wrong field."""
    violations = Violations()
    violations.check(request.messages, "messages", "is empty: give at least one message")
    violations.check(request.seed >= 0, "seed", f"is {request.seed}: it must not be negative")
    messages = []
    for number, message in enumerate(request.messages):
        violations.check(message.role, f"messages[{number}].role", 'is empty: it must be one such as "user"')
        for place, part in enumerate(message.content):
            kind = part.WhichOneof("part")
            field, found = f"messages[{number}].content[{place}]", "empty" if kind is None else kind
            violations.check(kind == "text", field, f"is {found}: it must be text, which is all that judges read")
        messages.append({"role": message.role, "content": "\n".join(part.text for part in message.content)})
    violations.raise_if_any()
    return messages


async def main() -> None:
    """Run the judge service until it is stopped."""
    async with open_context(parse_settings(JUDGE)) as context:
        service = JudgeService(context)
        servicer = JudgeServicer(service, SyncIds(context.fence))
        calls = Service(judge_pb2_grpc.add_JudgeServicer_to_server, servicer, "relaxd.v1.Judge")
        await run_replica(service, context, [calls])


if __name__ == "__main__":
    asyncio.run(main())
