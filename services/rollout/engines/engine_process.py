"""Base of the engines' child processes: answers the rollout service's calls, and sends the outputs of samples to the
service."""

import argparse
import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from relaxd import telemetry
from relaxd.config import RolloutConfig
from relaxd.process.child_server import AndThen, ChildServer, in_turn
from relaxd.v1 import engine_pb2, engine_pb2_grpc, rollout_pb2, rollout_pb2_grpc, weights_pb2
from services.rollout.engines.generation_gate import GenerationGate
from services.rollout.engines.request_types import (
    MARGIN_SECONDS,
    MEMORY_PARTS,
    PAUSE_MODES,
    EngineError,
    MemoryPart,
    Output,
    PauseMode,
    Request,
    Version,
    decode_request,
    encode_output,
    join_outputs,
    pack_messages,
)

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 0.05
"""Maximum seconds for which tokens of an unfinished sample are held back. One message per token would cost too much."""
MESSAGE_BYTES = 8 << 20
"""Maximum bytes of a message that contains several outputs."""
MAX_OUTPUT_BYTES = 1 << 30
"""Maximum bytes of one sample's output; protobuf's own limit is 2 GiB."""


class OutputStream:
    """Collects samples' outputs and requests' failures from any thread, and yields them as messages for one stream."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outputs: list[tuple[str, Output]] = []
        self._failures: list[engine_pb2.EngineFailure] = []
        self._urgent = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._come = asyncio.Event()
        self._hurry = asyncio.Event()

    def put(self, outputs: Mapping[str, Sequence[Output]]) -> None:
        """Add new outputs of samples, by id of their request."""
        new = [(request_id, output) for request_id, each in outputs.items() for output in each]
        self._add(new, [], urgent=any(output.finish_reason is not None for _, output in new))

    def fail(self, request_id: str, reason: str, *, wrong_media: bool = False) -> None:
        """Add a message that a request failed."""
        failure = engine_pb2.EngineFailure(request_id=request_id, reason=reason, wrong_media=wrong_media)
        self._add([], [failure], urgent=True)

    async def messages(self) -> AsyncIterator[engine_pb2.ExchangeResponse]:
        """Yield messages as outputs and failures come, for ever. Only one reader may use this at a time."""
        with self._lock:
            self._loop = asyncio.get_running_loop()
            waiting = bool(self._outputs or self._failures)
        if waiting:
            self._come.set()
        while True:
            await self._come.wait()  # idle: there is nothing to send
            if not self._hurry.is_set():
                with suppress(TimeoutError):
                    # Not wait_for: in Python 3.11 it may lose a cancellation; then two readers would share the outputs.
                    async with asyncio.timeout(FLUSH_SECONDS):
                        await self._hurry.wait()  # brief: FLUSH_SECONDS
            with self._lock:
                outputs, failures, self._outputs, self._failures = self._outputs, self._failures, [], []
                self._urgent = False
                self._come.clear()
                self._hurry.clear()
            encoded = (encode_output(request_id, output) for request_id, output in join_outputs(outputs))
            for message in pack_messages(encoded, MESSAGE_BYTES, MAX_OUTPUT_BYTES):
                yield message
            if failures:
                yield engine_pb2.ExchangeResponse(failures=failures)

    def _add(
        self, outputs: list[tuple[str, Output]], failures: list[engine_pb2.EngineFailure], *, urgent: bool
    ) -> None:
        with self._lock:
            first = not self._outputs and not self._failures
            self._outputs += outputs
            self._failures += failures
            hurry, self._urgent = urgent and not self._urgent, self._urgent or urgent
            if self._loop is not None:
                if first:
                    self._loop.call_soon_threadsafe(self._come.set)
                if hurry:
                    self._loop.call_soon_threadsafe(self._hurry.set)


class LoadedEngine(Protocol):
    """Interface of an engine in a child process, with a loaded model."""

    gate: GenerationGate
    """Gate that decides when the engine generates."""

    def submit(self, request: Request) -> None:
        """Queue a request for generation."""

    def cancel(self, request_id: str) -> None:
        """Forget a request, without reporting its end."""

    def abort(self, request_id: str) -> None:
        """End a request's samples, which keep the tokens generated so far."""

    def pause(self, mode: PauseMode, lease_seconds: float, timeout: float) -> int:
        """Pause generation. Returns the number of samples that are held in place."""

    def sleep(self, timeout: float) -> None:
        """Wait until running samples have ended, then free the engine's memory."""

    def wake(self, parts: Collection[MemoryPart]) -> None:
        """Allocate freed parts of the engine's memory again."""

    def record(self, request: engine_pb2.RecordStepsRequest) -> list[Path]:
        """Record the engine's next steps with torch's profiler. Returns the files that will hold the recordings.

        Raises EngineError: earlier steps are being recorded.
        """

    def stats(self) -> dict[str, int]:
        """Return running_samples, waiting_samples and tokens_generated; if known, also tokens_prefilled and
        tokens_prompted."""


Engine = TypeVar("Engine", bound=LoadedEngine)


class EngineProcess(ABC, Generic[Engine], engine_pb2_grpc.EngineServicer, rollout_pb2_grpc.RolloutServicer):
    """Child process of an engine. Answers the rollout service's calls: those of Engine, and those of Rollout that
    change an engine."""

    def __init__(self) -> None:
        self.outputs = OutputStream()
        self._engine: Engine | None = None
        self.frozen = False
        """True if the loaded weights are never updated. A sleep must then preserve them."""
        self.for_logprobs = False
        """True if the engine only computes log-probs of given tokens."""
        self._recording = threading.Lock()
        """Lock that lets only one request at a time record steps."""

    def serve(self) -> None:
        """Answer the rollout service's calls until the service ends."""
        add_all = engine_pb2_grpc.add_EngineServicer_to_server, rollout_pb2_grpc.add_RolloutServicer_to_server
        ChildServer(*((add, self) for add in add_all)).serve()

    def Load(self, request: engine_pb2.LoadRequest, context: Any) -> engine_pb2.LoadResponse:
        self.frozen, self.for_logprobs = request.frozen, request.logprobs
        loaded = self.load(request.folder, RolloutConfig.model_validate_json(request.config_json), request.colocate)
        if request.frozen:
            self._loaded().gate.serve_loaded()
        return loaded

    async def Exchange(
        self, requests: AsyncIterator[engine_pb2.ExchangeRequest], context: Any
    ) -> AsyncIterator[engine_pb2.ExchangeResponse]:
        taking = asyncio.create_task(self._take(requests))
        try:
            async for message in self.outputs.messages():
                yield message
        finally:
            taking.cancel()

    def RecordSteps(self, request: engine_pb2.RecordStepsRequest, context: Any) -> engine_pb2.RecordStepsResponse:
        with self._recording:
            return engine_pb2.RecordStepsResponse(paths=map(str, self._loaded().record(request)))

    def GetEngineStats(
        self, request: engine_pb2.GetEngineStatsRequest, context: Any
    ) -> engine_pb2.GetEngineStatsResponse:
        engine = self._loaded()
        return engine_pb2.GetEngineStatsResponse(
            **engine.stats(),
            quarantined=engine.gate.quarantined,
            unconfirmed=engine.gate.unconfirmed,
            rss_bytes=self._rss_bytes(),
        )

    def PauseGeneration(
        self, request: rollout_pb2.PauseGenerationRequest, context: Any
    ) -> rollout_pb2.PauseGenerationResponse:
        timeout = max(context.time_remaining() - MARGIN_SECONDS, 0.0)
        held = self._loaded().pause(PAUSE_MODES[request.mode], request.lease_seconds, timeout)
        return rollout_pb2.PauseGenerationResponse(paused_samples=held)

    def ResumeGeneration(
        self, request: rollout_pb2.ResumeGenerationRequest, context: Any
    ) -> rollout_pb2.ResumeGenerationResponse:
        gate = self._loaded().gate
        if request.HasField("weights"):
            gate.confirm(Version.from_proto(request.weights))
        gate.resume()
        return rollout_pb2.ResumeGenerationResponse()

    @in_turn
    def ReceiveVersions(
        self, request: engine_pb2.ReceiveVersionsRequest, context: Any
    ) -> engine_pb2.ReceiveVersionsResponse | AndThen:
        gate, receive = self._loaded().gate, request.receive
        if receive.HasField("pause"):
            self._pause_first(receive)
        received = self._receive_weights(receive)
        answer = engine_pb2.ReceiveVersionsResponse(received=received)
        if not receive.resume:
            return answer
        gate.confirm(Version.from_proto(receive.weights))
        return AndThen(answer, partial(gate.resume, gate.pauses))  # resuming first would delay the answer

    def LeaveWeightGroup(
        self, request: rollout_pb2.LeaveWeightGroupRequest, context: Any
    ) -> rollout_pb2.LeaveWeightGroupResponse:
        if self._engine is None:
            return rollout_pb2.LeaveWeightGroupResponse()
        gate = self._engine.gate
        if self._leave_group(request.group_name) or gate.unconfirmed:
            gate.quarantine()
        return rollout_pb2.LeaveWeightGroupResponse(quarantined=gate.quarantined)

    def Sleep(self, request: rollout_pb2.SleepRequest, context: Any) -> rollout_pb2.SleepResponse:
        asleep = self._loaded().gate.asleep
        self._leave_groups()  # their broadcasts would write into freed memory
        memory = self._change_memory(lambda engine: engine.sleep(request.timeout_seconds))
        if not asleep:
            self._check_freed(memory)
        return rollout_pb2.SleepResponse(memory=memory)

    def Wake(self, request: rollout_pb2.WakeRequest, context: Any) -> rollout_pb2.WakeResponse:
        parts = [MEMORY_PARTS[part] for part in request.parts]
        memory = self._change_memory(lambda engine: engine.wake(parts))
        if self.frozen and not self._loaded().gate.asleep:
            self._loaded().gate.serve_loaded()
        return rollout_pb2.WakeResponse(memory=memory)

    @abstractmethod
    def load(self, folder: str, config: RolloutConfig, colocate: bool) -> engine_pb2.LoadResponse:
        """Load a model from a folder. The engine generates only after its first weight update."""

    def _loaded(self) -> Engine:
        """Return the loaded engine. Raises EngineError before a model is loaded."""
        if self._engine is None:
            raise EngineError("no model is loaded")
        return self._engine

    def _pause_first(self, request: rollout_pb2.ReceiveWeightsRequest) -> None:
        """Begin the pause that a request to receive weights contains. Overridden by engines whose `_receive_weights`
        begins it."""
        pause = request.pause
        self._loaded().pause(PAUSE_MODES[pause.mode], pause.lease_seconds, request.pause_timeout_seconds)

    @abstractmethod
    def _receive_weights(self, request: rollout_pb2.ReceiveWeightsRequest) -> rollout_pb2.ReceiveWeightsResponse:
        """Receive and commit the weights of one version while generation is paused."""

    @abstractmethod
    def _leave_group(self, name: str) -> bool:
        """Leave a weight group. Returns True if the group's transfer has changed only a part of the model."""

    @abstractmethod
    def _leave_groups(self) -> None:
        """Leave every weight group that the engine is in."""

    def _check_freed(self, memory: weights_pb2.MemoryChange) -> None:
        """Raise EngineError if a sleep has freed less memory than it must."""

    @abstractmethod
    def _rss_bytes(self) -> int:
        """Return the resident memory of the engine's processes, in bytes."""

    @abstractmethod
    def _memory_in_use(self) -> int:
        """Return the memory in use, in bytes: with GPUs, device memory of all processes on them; without, memory of the
        engine's processes."""

    async def _take(self, requests: AsyncIterator[engine_pb2.ExchangeRequest]) -> None:
        engine = self._loaded()
        async for message in requests:
            for each in message.begin:
                try:
                    engine.submit(decode_request(each))
                except Exception as error:  # the others go on
                    logger.exception("a request could not be queued")
                    self.outputs.fail(each.id, f"{type(error).__name__}: {error}")
            for request_id in message.forget:
                engine.cancel(request_id)
            for request_id in message.abort:
                engine.abort(request_id)

    def _change_memory(self, change: Callable[[Engine], None]) -> weights_pb2.MemoryChange:
        engine, before, started = self._loaded(), self._memory_in_use(), time.monotonic()
        change(engine)
        seconds = time.monotonic() - started
        return weights_pb2.MemoryChange(before_bytes=before, after_bytes=self._memory_in_use(), seconds=seconds)


def read_arguments() -> None:
    """Read the command line of an engine's process, and set up logging and telemetry."""
    parser = argparse.ArgumentParser(description="The engine of a rollout service; started by the service.")
    parser.add_argument("--role", default="rollout", help="role of the replica")
    parser.add_argument("--name", default="engine", help="id of the replica")
    parser.add_argument("--log-level", default="info")
    arguments = parser.parse_args()
    telemetry.setup_logging(f"{arguments.name}/engine", arguments.log_level)
    telemetry.setup(arguments.role, arguments.name, "engine")
