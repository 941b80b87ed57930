"""Outputs on their way from an engine's threads to the service. Ended samples go at once, others when it is time."""

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress

from relaxd.v1 import engine_pb2
from services.rollout.engines.output_encoding import encode_output, join_outputs, pack_messages
from services.rollout.engines.types import Output

FLUSH_SECONDS = 0.05
"""Longest time for which tokens of a sample that goes on are held back: a message for each would cost too much."""
MESSAGE_BYTES = 8 << 20
MAX_OUTPUT_BYTES = 1 << 30
"""protobuf's limit is 2 GiB."""


class OutputStream:
    """Takes outputs and failures from any thread, and gives them to one stream in messages."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outputs: list[tuple[str, Output]] = []
        self._failures: list[engine_pb2.EngineFailure] = []
        self._urgent = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._come = asyncio.Event()
        self._hurry = asyncio.Event()

    def put(self, outputs: Mapping[str, Sequence[Output]]) -> None:
        """Add the new outputs of requests."""
        new = [(request_id, output) for request_id, each in outputs.items() for output in each]
        self._add(new, [], urgent=any(output.finish_reason is not None for _, output in new))

    def fail(self, request_id: str, reason: str) -> None:
        """Add a failure."""
        self._add([], [engine_pb2.EngineFailure(request_id=request_id, reason=reason)], urgent=True)

    async def messages(self) -> AsyncIterator[engine_pb2.ExchangeResponse]:
        """Yield everything, as it comes. Only one reader at a time."""
        with self._lock:
            self._loop = asyncio.get_running_loop()
            waiting = bool(self._outputs or self._failures)
        if waiting:
            self._come.set()
        while True:
            await self._come.wait()  # idle: there is nothing to send
            if not self._hurry.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._hurry.wait(), FLUSH_SECONDS)  # brief: FLUSH_SECONDS
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
