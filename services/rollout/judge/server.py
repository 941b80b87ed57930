"""relaxd.v1.Judge: checks questions and passes them to the engine."""

from typing import Any

from relaxd.replica.replica_server import SyncIds
from relaxd.rpc.errors import Violations
from relaxd.v1 import judge_pb2, judge_pb2_grpc
from services.rollout.engines.message_encoding import FINISH_NUMBERS
from services.rollout.judge.judge_service import JudgeService


class JudgeServicer(judge_pb2_grpc.JudgeServicer):
    """Answers relaxd.v1.Judge."""

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
