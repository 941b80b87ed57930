"""relaxd.v1.Rollout: Generate, and the calls of weight synchronisation and sleep."""

import base64
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from relaxd.process.child import ChildError
from relaxd.process.json_child import ChildRequestError, ChildTimeout
from relaxd.replica.sync_ids import SyncIds
from relaxd.rpc.errors import (
    Aborted,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    RpcError,
    Unavailable,
    Violations,
)
from relaxd.v1 import replica_pb2, rollout_pb2, rollout_pb2_grpc, weights_pb2
from services.rollout.engines.types import Output, RequestFailed, Version
from services.rollout.service.child_engine import AnyEngine, ChildEngine
from services.rollout.service.requests import MEMORY_PARTS, PAUSE_MODES, parse_generate
from services.rollout.service.service import RolloutService

REPLY_SECONDS = 0.3
"""A pause fails this long before its caller's deadline, so that the caller gets the reason."""


class RolloutServicer(rollout_pb2_grpc.RolloutServicer):
    """Answers relaxd.v1.Rollout: checks requests and passes them on to the engine.

    Calls of earlier weight synchronisations are refused.
    """

    def __init__(self, service: RolloutService) -> None:
        self._service = service
        self._sync_ids = SyncIds()

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        """See the proto."""
        engine = self._engine()
        prompt, n, sampling = parse_generate(request, engine.vocabulary, engine.context)
        if not engine.serving:
            reason = "a weight synchronisation failed halfway" if engine.quarantined else "none were synchronised yet"
            raise Unavailable(f"the engine has no weights to serve: {reason}")
        with _translate_errors("generate"), self._service.occupancy.working():
            outputs = engine.generate(prompt, n, sampling, stream=not request.final_only)
            async with aclosing(outputs):  # type: ignore[type-var]
                async for output in outputs:
                    yield _final_response(output) if request.final_only else _response(output)

    async def PauseGeneration(
        self, request: rollout_pb2.PauseGenerationRequest, context: Any
    ) -> rollout_pb2.PauseGenerationResponse:
        """See the proto."""
        violations = Violations()
        _check_pause(request, "", violations)
        violations.raise_if_any()
        engine = self._engine()
        self._sync_ids.take(request.sync_id)
        remaining = context.time_remaining()
        timeout = float("inf") if remaining is None else remaining - REPLY_SECONDS
        paused = await self._pause(engine, request, timeout)
        return rollout_pb2.PauseGenerationResponse(paused_samples=paused)

    async def ResumeGeneration(
        self, request: rollout_pb2.ResumeGenerationRequest, context: Any
    ) -> rollout_pb2.ResumeGenerationResponse:
        """See the proto."""
        engine = self._engine()
        self._sync_ids.take(request.sync_id)
        await self._resume(engine)
        self._service.weights_changed()
        weights = engine.weights
        if weights is None:
            return rollout_pb2.ResumeGenerationResponse()
        return rollout_pb2.ResumeGenerationResponse(
            weights=replica_pb2.WeightVersion(term=weights.term, version=weights.version)
        )

    async def JoinWeightGroup(
        self, request: rollout_pb2.JoinWeightGroupRequest, context: Any
    ) -> rollout_pb2.JoinWeightGroupResponse:
        """See the proto."""
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
        place, right = ("a CPU", ("gloo",)) if engine.device == "cpu" else ("a GPU", ("nccl", "cuda_ipc"))
        violations.check(
            group.transport in right,
            "group.transport",
            f'is "{group.transport}": this engine is on {place}: use "{right[0]}" (weights.transport)',
        )
        timeout = group.timeout_seconds
        violations.check_seconds(timeout, "group.timeout_seconds")
        violations.check(request.manifest.buckets, "manifest", "is empty")
        violations.raise_if_any()
        self._sync_ids.take(request.sync_id)
        member = {
            "name": group.name,
            "transport": group.transport,
            "store_host": group.store_host,
            "store_port": group.store_port,
            "rank": request.rank,
            "world_size": group.world_size,
            "manifest": base64.b64encode(request.manifest.SerializeToString()).decode(),
        }
        with _translate_errors(f"join weight group {group.name}"):
            await engine.join(member, timeout)
        return rollout_pb2.JoinWeightGroupResponse()

    async def ReceiveWeights(
        self, request: rollout_pb2.ReceiveWeightsRequest, context: Any
    ) -> rollout_pb2.ReceiveWeightsResponse:
        """See the proto."""
        timeout = request.timeout_seconds
        weights = Version(request.weights.term, request.weights.version)
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
            await self._pause(engine, request.pause, request.pause_timeout_seconds)
        with _translate_errors(f"receive version {weights.version}"):
            result = await engine.receive(request.group_name, weights, timeout, checksum=request.checksum)
        if request.resume:
            await self._resume(engine)
        self._service.weights_changed()
        return rollout_pb2.ReceiveWeightsResponse(seconds=result["seconds"], checksums=result["checksums"])

    async def LeaveWeightGroup(
        self, request: rollout_pb2.LeaveWeightGroupRequest, context: Any
    ) -> rollout_pb2.LeaveWeightGroupResponse:
        """See the proto."""
        if request.sync_id:
            self._sync_ids.take(request.sync_id)
        engine = self._service.engine
        if engine is None:
            return rollout_pb2.LeaveWeightGroupResponse()
        with _translate_errors("leave"):
            quarantined = await engine.leave(request.group_name, quarantine=request.quarantine)
        self._service.weights_changed()
        return rollout_pb2.LeaveWeightGroupResponse(quarantined=quarantined)

    async def _pause(self, engine: AnyEngine, request: rollout_pb2.PauseGenerationRequest, timeout: float) -> int:
        lease = request.lease_seconds
        self._service.occupancy.pause(lease)
        with _translate_errors("pause"):
            return await engine.pause(PAUSE_MODES[request.mode], lease, max(min(lease, timeout), 0.1))

    async def _resume(self, engine: AnyEngine) -> None:
        with _translate_errors("resume"):
            await engine.resume()
        self._service.occupancy.resume()

    async def Sleep(self, request: rollout_pb2.SleepRequest, context: Any) -> rollout_pb2.SleepResponse:
        """See the proto."""
        timeout = request.timeout_seconds
        violations = Violations()
        violations.check_seconds(timeout, "timeout_seconds")
        violations.raise_if_any()
        engine = self._child_engine()
        if not self._service.colocated:
            raise FailedPrecondition("this run isn't colocated (run.colocate): nobody would wake the engine up again")
        self._sync_ids.take(request.sync_id)
        with _translate_errors("sleep"):
            try:
                change = await engine.sleep(timeout)
            finally:
                self._service.weights_changed()
        return rollout_pb2.SleepResponse(memory=_memory_change(change))

    async def Wake(self, request: rollout_pb2.WakeRequest, context: Any) -> rollout_pb2.WakeResponse:
        """See the proto."""
        timeout = request.timeout_seconds
        violations = Violations()
        violations.check_seconds(timeout, "timeout_seconds")
        violations.check(request.parts, "parts", "is empty: name the parts to allocate")
        for index, part in enumerate(request.parts):
            violations.check(part in MEMORY_PARTS, f"parts[{index}]", f"is {part}: no such MemoryPart")
        violations.raise_if_any()
        engine = self._child_engine()
        self._sync_ids.take(request.sync_id)
        with _translate_errors("wake up"):
            change = await engine.wake([MEMORY_PARTS[part] for part in request.parts], timeout)
        self._service.weights_changed()
        return rollout_pb2.WakeResponse(memory=_memory_change(change))

    def _child_engine(self) -> ChildEngine:
        engine = self._engine()
        if not isinstance(engine, ChildEngine):
            raise FailedPrecondition("this engine is an external server, which can't sleep")
        return engine

    def _engine(self) -> AnyEngine:
        engine = self._service.engine
        if engine is None:
            raise Unavailable("there is no engine: " + (self._service.status().detail or "no run is assigned"))
        return engine


def _response(output: Output) -> rollout_pb2.GenerateResponse:
    return rollout_pb2.GenerateResponse(
        sample=output.sample,
        tokens=output.tokens,
        logprobs=output.logprobs,
        versions=output.versions,
        finish_reason=output.finish_reason or "",
        text=output.text,
    )


def _final_response(output: Output) -> rollout_pb2.GenerateResponse:
    return rollout_pb2.GenerateResponse(
        sample=output.sample,
        finish_reason=output.finish_reason or "",
        text=output.text,
        token_count=len(output.tokens),
    )


def _memory_change(change: dict[str, Any]) -> weights_pb2.MemoryChange:
    return weights_pb2.MemoryChange(
        before_bytes=change["before"], after_bytes=change["after"], seconds=change["seconds"]
    )


def _check_pause(request: rollout_pb2.PauseGenerationRequest, prefix: str, violations: Violations) -> None:
    lease = request.lease_seconds
    violations.check(request.mode in PAUSE_MODES, f"{prefix}mode", f"is {request.mode}: no such PauseMode")
    violations.check_seconds(lease, f"{prefix}lease_seconds")


@contextmanager
def _translate_errors(what: str) -> Iterator[None]:
    """Turn the engine's errors into gRPC statuses."""
    try:
        yield
    except ChildRequestError as error:
        raise _status(what, error) from error
    except ChildTimeout as error:
        raise DeadlineExceeded(f"could not {what}: {error}") from error
    except ChildError as error:
        raise Unavailable(f"could not {what}: {error}") from error
    except RequestFailed as error:
        raise Aborted(f"could not {what}: {error}") from error


def _status(what: str, error: ChildRequestError) -> RpcError:
    if error.kind == "ManifestMismatch":
        return InvalidArgument(f"could not {what}: {error}", [("manifest", str(error))])
    if error.kind == "WeightGroupError":
        return Aborted(f"could not {what}: {error}")
    return FailedPrecondition(f"could not {what}: {error}")
