"""An engine with a model that sees, behind a real gRPC server."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

from relaxd.media.prompt_media import PromptMedia
from relaxd.v1 import rollout_pb2, sample_pb2
from tests.integration.agent.scripted_engines import Fleet, ScriptedEngine
from tests.unit.rollout.engine_harness import Harness


class SeeingEngine(ScriptedEngine):
    """An engine with a model."""

    def __init__(self, fleet: "SeeingFleet") -> None:
        super().__init__(fleet, "rollout-0", 0)
        self._requests = fleet.requests
        self._harness = fleet.harness

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        """Answer with the model's own tokens."""
        self._requests.append(request)
        name = uuid4().hex
        self._harness.submit(
            name,
            list(request.prompt_tokens),
            media=PromptMedia.from_proto(request),
            max_new_tokens=request.sampling.max_new_tokens,
            temperature=1.0,
            seed=request.sampling.seed,
        )
        (answer,) = await asyncio.to_thread(self._harness.wait, name)
        yield rollout_pb2.GenerateResponse(tokens=answer.tokens, logprobs=answer.logprobs, versions=answer.versions)
        yield rollout_pb2.GenerateResponse(finish_reason=sample_pb2.FINISH_REASON_STOP, text="said")


class SeeingFleet(Fleet):
    """A coordinator with one engine that has a model."""

    def __init__(self, harness: Harness) -> None:
        super().__init__([], [])
        self.harness = harness
        self.engines = [SeeingEngine(self)]
