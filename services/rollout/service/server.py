"""Server of relaxd.v1.Rollout: Generate, and the calls of weight synchronisation and sleep."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import numpy as np
from opentelemetry import trace

from relaxd.config import CPU_TRANSPORTS
from relaxd.media.prompt_media import PromptMedia
from relaxd.replica.replica_life import run_replica
from relaxd.replica.replica_service import ReplicaContext, SyncIds
from relaxd.rpc.errors import AlreadyExists, FailedPrecondition, NotFound, ResourceExhausted, Unavailable, Violations
from relaxd.rpc.message_parts import words
from relaxd.rpc.server import Service
from relaxd.v1 import rollout_pb2, rollout_pb2_grpc, weights_pb2
from services.rollout.engines.engine_interface import RolloutEngine
from services.rollout.engines.request_types import FINISH_NUMBERS, MEMORY_PARTS, PAUSE_MODES, Output, Sampling, Version
from services.rollout.service.child_engine import ChildEngine
from services.rollout.service.rollout_service import RolloutService

FULL_SECONDS = 0.5
"""Delay after which a caller of a full engine should retry, in seconds."""
MAX_PROFILED = 10_000
"""Maximum number of model steps that one call of Profile records."""
REPLY_SECONDS = 0.3
"""Time before a caller's deadline at which PauseGeneration gives up, in seconds, so that the caller gets the reason."""

TEMPERATURES = (1e-3, 1e3)
"""Minimum and maximum of temperatures other than 0. Lower ones may make logits infinite and fail the whole batch."""
MAX_SAMPLES = 4096
"""Maximum number of samples of one Generate request."""


class RolloutServicer(rollout_pb2_grpc.RolloutServicer):
    """gRPC servicer of relaxd.v1.Rollout: checks requests and passes them on to the engine.

    Calls of earlier weight synchronisations are refused.
    """

    def __init__(self, service: RolloutService, sync_ids: SyncIds) -> None:
        self._service = service
        self._sync_ids = sync_ids
        self._numbers = itertools.count()
        self._running: dict[str, tuple[RolloutEngine, str]] = {}
        """Engine and engine's request id of each running Generate request, by the caller's request id."""
        self._samples = 0
        """Number of samples in running and waiting Generate requests."""

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        engine = self._engine()
        prompt, n, sampling = parse_generate(request, engine.vocabulary, engine.context)
        if not engine.serving:
            reason = "a weight synchronisation failed halfway" if engine.quarantined else "none were synchronised yet"
            raise Unavailable(f"the engine has no weights to serve: {reason}")
        asked, running = request.request_id, f"call-{next(self._numbers)}"
        if asked in self._running:
            raise AlreadyExists(f'request_id is "{asked}", which is running: cancel it, or give another id')
        if self._samples >= (most := self._service.max_queued_samples):
            raise ResourceExhausted(
                f"{self._samples} samples are running or waiting, at most {most} may (twice "
                "rollout.max_running_samples): ask again later, or another replica",
                retry_seconds=FULL_SECONDS,
            )
        _mark_span(request)
        begun = tuple(request.begun_tokens)
        outputs = engine.generate(
            *(prompt, n, sampling),
            stream=not request.final_only,
            report_every=max(1, request.report_every),
            begun={0: begun} if begun else {},
            request_id=running,
            media=PromptMedia.from_proto(request),
        )
        self._samples += n
        if asked:
            self._running[asked] = (engine, running)
        try:
            with self._service.occupancy.working():
                async with aclosing(outputs):  # type: ignore[type-var]
                    async for output in outputs:
                        yield _final_response(output, len(begun)) if request.final_only else _response(output)
        finally:
            self._samples -= n
            self._running.pop(asked, None)

    async def Cancel(self, request: rollout_pb2.CancelRequest, context: Any) -> rollout_pb2.CancelResponse:
        if request.request_id not in self._running:
            raise NotFound(f'request_id is "{request.request_id}": no such request is running here')
        engine, running = self._running[request.request_id]
        await engine.abort(running)
        return rollout_pb2.CancelResponse()

    async def PauseGeneration(
        self, request: rollout_pb2.PauseGenerationRequest, context: Any
    ) -> rollout_pb2.PauseGenerationResponse:
        violations = Violations()
        _check_pause(request, "", violations)
        violations.raise_if_any()
        engine = self._engine()
        self._sync_ids.take(request.sync_id)
        remaining = context.time_remaining()
        timeout = float("inf") if remaining is None else remaining - REPLY_SECONDS
        self._service.occupancy.pause(request.lease_seconds)
        mode = PAUSE_MODES[request.mode]
        paused = await engine.pause(mode, request.lease_seconds, _pause_timeout(request, timeout))
        return rollout_pb2.PauseGenerationResponse(paused_samples=paused)

    async def ResumeGeneration(
        self, request: rollout_pb2.ResumeGenerationRequest, context: Any
    ) -> rollout_pb2.ResumeGenerationResponse:
        engine = self._engine()
        self._sync_ids.take(request.sync_id)
        named = Version.from_proto(request.weights) if request.HasField("weights") else None
        await engine.resume(named, request.digest)
        self._service.occupancy.resume()
        self._service.update_intake()
        weights = engine.weights
        if weights is None:
            return rollout_pb2.ResumeGenerationResponse()
        return rollout_pb2.ResumeGenerationResponse(weights=weights.to_proto())

    async def JoinWeightGroup(
        self, request: rollout_pb2.JoinWeightGroupRequest, context: Any
    ) -> rollout_pb2.JoinWeightGroupResponse:
        engine, group = self._engine(), request.group
        violations = Violations()
        violations.check(group.name, "group.name", "is empty")
        violations.check(group.world_size >= 2, "group.world_size", f"is {group.world_size}: it must be at least 2")
        violations.check(
            0 < request.rank < group.world_size,
            "rank",
            f"is {request.rank}: it must be 1 to world_size - 1, because the trainer's ranks come first",
        )
        violations.check(0 < group.store_port < 65536, "group.store_port", f"is {group.store_port}: no such port")
        violations.check(group.store_host, "group.store_host", "is empty")
        place, right = ("a CPU", CPU_TRANSPORTS) if engine.device == "cpu" else ("a GPU", ("nccl", "cuda_ipc"))
        transport = words(weights_pb2.Transport).get(group.transport, str(group.transport))
        violations.check(
            transport in right,
            "group.transport",
            f'is "{transport}": this engine is on {place}: use "{right[0]}" (weights.transport)',
        )
        violations.check_seconds(group.timeout_seconds, "group.timeout_seconds")
        violations.check(request.manifest.buckets, "manifest", "is empty")
        violations.raise_if_any()
        self._sync_ids.take(request.sync_id)
        await engine.join(request)
        return rollout_pb2.JoinWeightGroupResponse()

    async def ReceiveWeights(
        self, request: rollout_pb2.ReceiveWeightsRequest, context: Any
    ) -> rollout_pb2.ReceiveWeightsResponse:
        timeout = request.timeout_seconds
        weights = Version.from_proto(request.weights)
        violations = Violations()
        violations.check_seconds(timeout, "timeout_seconds")
        violations.check(weights.term >= 1, "weights.term", f"is {weights.term}: a trainer's term is at least 1")
        violations.check(weights.version >= 0, "weights.version", f"is {weights.version}: it must not be negative")
        if request.HasField("pause"):
            _check_pause(request.pause, "pause.", violations)
        violations.raise_if_any()
        engine = self._engine()
        self._sync_ids.take(request.sync_id)
        if engine.weights is not None and weights.term < engine.weights.term:
            raise FailedPrecondition(
                f"weights.term is {weights.term}, but the engine serves weights of the later term {engine.weights.term}"
            )
        if request.HasField("pause"):
            self._service.occupancy.pause(request.pause.lease_seconds)
            request.pause_timeout_seconds = _pause_timeout(request.pause, request.pause_timeout_seconds)
        began = time.monotonic()
        response = await engine.receive(request)
        response.pause_seconds = max(0.0, time.monotonic() - began - response.seconds)
        if request.resume:
            self._service.occupancy.resume()
        # Wakes threads, so do it after the answer, for which the next optimizer step waits.
        asyncio.get_running_loop().call_soon(self._service.update_intake)
        return response

    async def LeaveWeightGroup(
        self, request: rollout_pb2.LeaveWeightGroupRequest, context: Any
    ) -> rollout_pb2.LeaveWeightGroupResponse:
        if request.sync_id:
            self._sync_ids.take(request.sync_id)
        engine = self._service.engine
        if engine is None:
            return rollout_pb2.LeaveWeightGroupResponse()
        quarantined = await engine.leave(request.group_name)
        self._service.update_intake()
        return rollout_pb2.LeaveWeightGroupResponse(quarantined=quarantined)

    async def Sleep(self, request: rollout_pb2.SleepRequest, context: Any) -> rollout_pb2.SleepResponse:
        timeout = request.timeout_seconds
        violations = Violations()
        violations.check_seconds(timeout, "timeout_seconds")
        violations.raise_if_any()
        engine = self._child_engine()
        if not self._service.colocated:
            raise FailedPrecondition("this run isn't colocated (run.colocate): nobody would wake the engine up again")
        self._sync_ids.take(request.sync_id)
        try:
            return rollout_pb2.SleepResponse(memory=await engine.sleep(timeout))
        finally:
            self._service.update_intake()

    async def Wake(self, request: rollout_pb2.WakeRequest, context: Any) -> rollout_pb2.WakeResponse:
        timeout = request.timeout_seconds
        violations = Violations()
        violations.check_seconds(timeout, "timeout_seconds")
        violations.check(request.parts, "parts", "is empty: name the parts to allocate")
        for index, part in enumerate(request.parts):
            violations.check(part in MEMORY_PARTS, f"parts[{index}]", f"is {part}: no such MemoryPart")
        violations.raise_if_any()
        engine = self._child_engine()
        self._sync_ids.take(request.sync_id)
        memory = await engine.wake([MEMORY_PARTS[part] for part in request.parts], timeout)
        self._service.update_intake()
        return rollout_pb2.WakeResponse(memory=memory)

    async def Profile(self, request: rollout_pb2.ProfileRequest, context: Any) -> rollout_pb2.ProfileResponse:
        violations = Violations()
        violations.check(
            1 <= request.steps <= MAX_PROFILED, "steps", f"is {request.steps}: it must be from 1 to {MAX_PROFILED}"
        )
        violations.raise_if_any()
        return rollout_pb2.ProfileResponse(paths=await self._service.record(self._child_engine(), request))

    def _child_engine(self) -> ChildEngine:
        engine = self._engine()
        if not isinstance(engine, ChildEngine):
            raise FailedPrecondition(
                "this engine is not a process of relaxd's: an external server can't sleep, and is profiled by itself"
            )
        return engine

    def _engine(self) -> RolloutEngine:
        engine = self._service.engine
        if engine is None:
            raise Unavailable("there is no engine: " + (self._service.status().detail or "no run is assigned"))
        return engine


def parse_generate(
    request: rollout_pb2.GenerateRequest, vocabulary: int, context: int
) -> tuple[tuple[int, ...], int, Sampling]:
    """Return prompt, number of samples and sampling of a request to a model with this vocabulary and context length.

    Raises InvalidArgument naming every wrong field.
    """
    violations = Violations()
    prompt, asked = tuple(request.prompt_tokens), request.sampling
    violations.check(prompt, "prompt_tokens", "is empty: give at least one token id")
    for field, tokens in (("prompt_tokens", prompt), ("begun_tokens", request.begun_tokens)):
        for place, token in enumerate(tokens):
            if not 0 <= token < vocabulary:
                violations.add(f"{field}[{place}]", f"is {token}: the model's token ids are 0 to {vocabulary - 1}")
                break  # a wrong tokenizer would give thousands
    every = request.report_every
    violations.check(every >= 0, "report_every", f"is {every}: it must be 0 (for each token) or positive")
    violations.check(1 <= request.n <= MAX_SAMPLES, "n", f"is {request.n}: it must be 1 to {MAX_SAMPLES}")
    new = asked.max_new_tokens
    if violations.check(new >= 1, "sampling.max_new_tokens", f"is {new}: it must be at least 1") and context:
        violations.check(
            len(prompt) + new <= context,
            "sampling.max_new_tokens",
            f"is {new}: with the prompt's {len(prompt)} tokens that is more than the model's context of {context}",
        )
    low, high = TEMPERATURES
    violations.check(
        asked.temperature == 0 or low <= asked.temperature <= high,
        "sampling.temperature",
        f"is {asked.temperature:g}: it must be 0 (greedy), or {low:g} to {high:g}",
    )
    violations.check(
        0 <= asked.top_p <= 1, "sampling.top_p", f"is {asked.top_p:g}: it must be 0 to 1 (0 and 1 are off)"
    )
    violations.check(asked.top_k >= 0, "sampling.top_k", f"is {asked.top_k}: it must be 0 (off) or positive")
    for place, token in enumerate(asked.stop_token_ids):
        violations.check(
            0 <= token < vocabulary,
            f"sampling.stop_token_ids[{place}]",
            f"is {token}: the model's token ids are 0 to {vocabulary - 1}",
        )
    for place, text in enumerate(asked.stop):
        violations.check(text, f"sampling.stop[{place}]", "is empty: it must have at least one character")
    violations.check(
        0 <= asked.min_new_tokens <= max(new, 0),
        "sampling.min_new_tokens",
        f"is {asked.min_new_tokens}: it must be 0 (off) to max_new_tokens ({new})",
    )
    if begun := request.begun_tokens:
        violations.check(request.n == 1, "begun_tokens", f"are given, but n is {request.n}: it must be 1 with them")
        violations.check(
            len(begun) < max(new, 1),
            "begun_tokens",
            f"are {len(begun)}: they must be fewer than sampling.max_new_tokens ({new})",
        )
    violations.raise_if_any()
    return prompt, request.n, Sampling.from_proto(asked)


def _response(output: Output) -> rollout_pb2.GenerateResponse:
    return rollout_pb2.GenerateResponse(
        sample=output.sample,
        tokens=_list(output.tokens),
        logprobs=_list(output.logprobs),
        versions=_list(output.versions),
        finish_reason=FINISH_NUMBERS[output.finish_reason or ""],
        text=output.text,
        receipts=[receipt.to_proto() for receipt in output.receipts],
    )


def _final_response(output: Output, begun: int) -> rollout_pb2.GenerateResponse:
    return rollout_pb2.GenerateResponse(
        sample=output.sample,
        finish_reason=FINISH_NUMBERS[output.finish_reason or ""],
        text=output.text,
        token_count=begun + len(output.tokens),
    )


def _list(values: Any) -> list[Any]:
    """Return the elements of an array or sequence as a list, which protobuf reads faster than an array."""
    return list(values.tolist() if isinstance(values, np.ndarray) else values)


def _mark_span(request: rollout_pb2.GenerateRequest) -> None:
    span = trace.get_current_span()
    for name, value in (("relaxd.request_id", request.request_id), ("relaxd.session_id", request.session_id)):
        if value:
            span.set_attribute(name, value)


def _pause_timeout(request: rollout_pb2.PauseGenerationRequest, timeout: float) -> float:
    """Return the seconds within which generation must pause: at most the lease, which must not expire first."""
    return max(min(request.lease_seconds, timeout), 0.1)


def _check_pause(request: rollout_pb2.PauseGenerationRequest, prefix: str, violations: Violations) -> None:
    lease = request.lease_seconds
    violations.check(request.mode in PAUSE_MODES, f"{prefix}mode", f"is {request.mode}: no such PauseMode")
    violations.check_seconds(lease, f"{prefix}lease_seconds")


async def run_rollout(context: ReplicaContext) -> None:
    """Run a rollout replica until it is stopped."""
    service = RolloutService(context)
    servicer = RolloutServicer(service, SyncIds(context.fence))
    calls = Service(rollout_pb2_grpc.add_RolloutServicer_to_server, servicer, "relaxd.v1.Rollout")
    try:
        await run_replica(service, context, [calls])
    finally:
        await service.close()
