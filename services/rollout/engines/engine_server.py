"""What the processes of all engines share: requests from the rollout service, events to it."""

import argparse
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any, Protocol

from relaxd.process.child_server import ChildServer, Handler, HandlerError
from relaxd.process.frames import MAX_FRAME_BYTES
from relaxd.telemetry import setup_logging
from services.rollout.engines.base import EngineError, MemoryPart, Output, PauseMode, Request, Sampling
from services.rollout.engines.wire import batches, encode_output

STATS_SECONDS = 1.0
MARGIN_BYTES = 1 << 20
"""Room in a message for what is around the outputs."""

logger = logging.getLogger(__name__)


class ServedEngine(Protocol):
    """What an engine offers to its process."""

    @property
    def quarantined(self) -> bool:
        """Whether a broken update touched the model."""

    def submit(self, request: Request) -> None:
        """Queue a request."""

    def cancel(self, request_id: str) -> None:
        """Forget a request."""

    def pause(self, mode: PauseMode, lease_seconds: float, timeout: float) -> int:
        """Pause; returns how many samples are held."""

    def resume(self) -> None:
        """End the pause."""

    def sleep(self, timeout: float) -> None:
        """Give memory back, once what has begun has ended."""

    def wake(self, parts: Collection[MemoryPart]) -> None:
        """Take memory back."""

    def stats(self) -> dict[str, int]:
        """running_samples, waiting_samples and tokens_generated so far."""


class EngineServer(ABC):
    """Answers the rollout service's requests; the methods without underscore are their handlers."""

    def __init__(self) -> None:
        handlers: dict[str, Handler] = {
            "load": self.load,
            "generate": self.generate,
            "cancel": self.cancel,
            "pause": self.pause,
            "resume": self.resume,
            "sleep": self.sleep,
            "wake": self.wake,
            "join": self.join,
            "receive": self.receive,
            "leave": self.leave,
        }
        self.server = ChildServer(handlers)

    @abstractmethod
    def load(self, params: dict[str, Any]) -> dict[str, Any]:
        """Load a model; nothing is generated before its weights came. Returns what requests are checked against."""

    @abstractmethod
    def join(self, params: dict[str, Any]) -> None:
        """Connect with a weight group, after checking what it will send."""

    @abstractmethod
    def receive(self, params: dict[str, Any]) -> dict[str, Any]:
        """Receive and commit one version."""

    @abstractmethod
    def leave(self, params: dict[str, Any]) -> dict[str, Any]:
        """Abort and forget a group; one that is not there is left already."""

    @abstractmethod
    def _loaded(self) -> ServedEngine:
        """The engine. Raises HandlerError while there is none."""

    @abstractmethod
    def _rss_bytes(self) -> int:
        """Memory of the engine's processes."""

    @abstractmethod
    def _memory_in_use(self) -> int:
        """Bytes: of the engine's GPUs, whoever uses them; on a CPU of the engine's processes."""

    def sleep(self, params: dict[str, Any]) -> dict[str, Any]:
        """Give memory back; returns before and after (bytes in use) and seconds."""
        return self._change_memory(lambda engine: engine.sleep(params["timeout"]))

    def wake(self, params: dict[str, Any]) -> dict[str, Any]:
        """Take memory back, part by part; returns as `sleep`."""
        return self._change_memory(lambda engine: engine.wake(params["parts"]))

    def _change_memory(self, change: Callable[[ServedEngine], None]) -> dict[str, Any]:
        engine, before, started = self._loaded(), self._memory_in_use(), time.monotonic()
        try:
            change(engine)
        except EngineError as error:
            raise HandlerError(str(error), kind="EngineError") from error
        return {"before": before, "after": self._memory_in_use(), "seconds": time.monotonic() - started}

    def generate(self, params: dict[str, Any]) -> None:
        """Queue a request; its tokens come as events."""
        sampling = params.pop("sampling")
        sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
        params["prompt_tokens"] = tuple(params["prompt_tokens"])
        self._loaded().submit(Request(sampling=Sampling(**sampling), **params))

    def cancel(self, params: dict[str, Any]) -> None:
        """Forget a request."""
        self._loaded().cancel(params["request_id"])

    def pause(self, params: dict[str, Any]) -> dict[str, Any]:
        """Pause generation."""
        try:
            return {"paused_samples": self._loaded().pause(params["mode"], params["lease_seconds"], params["timeout"])}
        except EngineError as error:
            raise HandlerError(str(error), kind="EngineError") from error

    def resume(self, params: dict[str, Any]) -> None:
        """End the pause."""
        try:
            self._loaded().resume()
        except EngineError as error:
            raise HandlerError(str(error), kind="EngineError") from error

    def _start_stats(self) -> None:
        threading.Thread(target=self._tell_stats, name="stats", daemon=True).start()

    def _on_output(self, outputs: dict[str, list[Output]]) -> None:
        words = {request_id: [encode_output(output) for output in each] for request_id, each in outputs.items()}
        messages, too_large = batches(words, MAX_FRAME_BYTES - MARGIN_BYTES)
        for message in messages:
            self.server.emit("output", {"requests": message})
        for request_id, size in too_large.items():
            reason = f"one answer is a message of {size} bytes; at most {MAX_FRAME_BYTES} are allowed"
            self.server.emit("failed", {"request_id": request_id, "reason": reason, "too_large": True})
            self._loaded().cancel(request_id)

    def _on_failure(self, request_id: str, reason: str) -> None:
        self.server.emit("failed", {"request_id": request_id, "reason": reason})

    def _tell_stats(self) -> None:
        while True:
            engine = self._loaded()
            stats = {**engine.stats(), "quarantined": engine.quarantined, "rss_bytes": self._rss_bytes()}
            self.server.emit("stats", stats)
            time.sleep(STATS_SECONDS)


def read_arguments() -> None:
    """Read the command line of an engine's process and set up its logging."""
    parser = argparse.ArgumentParser(description="The engine of a rollout service; started by the service.")
    parser.add_argument("--name", default="engine", help="name in the logs")
    parser.add_argument("--log-level", default="info")
    arguments = parser.parse_args()
    setup_logging(arguments.name, arguments.log_level)
