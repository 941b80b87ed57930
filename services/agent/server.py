"""Server of relaxd.v1.Agent, which holds evaluations' conversations on request."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from relaxd.config.evaluation import MAX_SAMPLES
from relaxd.json_text import parse_json
from relaxd.media.prompt_media import PromptMedia
from relaxd.rpc.errors import Unavailable, Violations
from relaxd.v1 import agent_pb2, agent_pb2_grpc
from services.agent.agent_service import AgentService
from services.agent.engines import WantedWeights
from services.agent.group_conversations import example_of


class AgentServicer(agent_pb2_grpc.AgentServicer):
    """Answers relaxd.v1.Agent."""

    def __init__(self, service: AgentService) -> None:
        self._service = service

    async def Converse(
        self, request: agent_pb2.ConverseRequest, context: Any
    ) -> AsyncIterator[agent_pb2.ConverseResponse]:
        """Hold conversations about a prompt; stream each when it has ended."""
        evaluations = self._service.evaluations
        if evaluations is None:
            raise Unavailable("this replica works on no run whose samples are conversations")
        violations = Violations()
        name, known, most = request.evaluation_set, evaluations.sets, request.sampling.max_new_tokens
        violations.check(name in known, "evaluation_set", f"is {name!r}: the run has {', '.join(known) or 'none'}")
        violations.check(1 <= request.n <= MAX_SAMPLES, "n", f"is {request.n}: it must be 1 to {MAX_SAMPLES}")
        violations.check(most >= 1, "sampling.max_new_tokens", f"is {most}: it must be at least 1")
        prompt: Any = None
        try:
            prompt = parse_json(request.prompt_json)
        except ValueError as error:
            violations.add("prompt_json", f"isn't JSON: {error}")
        else:
            has_text = isinstance(prompt, dict) and isinstance(prompt.get("text"), str)
            violations.check(has_text, "prompt_json", 'must be an object with "text", as in the column "prompt"')
        violations.raise_if_any()
        wanted = WantedWeights(request.weights.term, request.weights.version, request.or_later)
        media = PromptMedia.from_proto(request)
        held = evaluations.hold(name, example_of(prompt), request.n, request.sampling, wanted, media)
        async with aclosing(held):  # type: ignore[type-var]
            async for conversation in held:
                yield conversation
