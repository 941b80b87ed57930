"""Base of the engines' child processes: handlers of the rollout service's requests, and events to it."""

import argparse
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any, Protocol

from relaxd.process.frames import MAX_FRAME_BYTES
from relaxd.process.json_child_server import Handler, HandlerError, JsonChildServer
from relaxd.telemetry import setup_logging
from services.rollout.engines.output_encoding import encode_output, pack_messages
from services.rollout.engines.types import EngineError, MemoryPart, Output, PauseMode, Request, Sampling

STATS_SECONDS = 1.0
"""Interval of "stats" events."""
MARGIN_BYTES = 1 << 20
"""Part of a message that is kept for everything but the outputs."""

logger = logging.getLogger(__name__)


class LoadedEngine(Protocol):
    """An engine with a loaded model."""

    @property
    def quarantined(self) -> bool:
        """True if a failed update left the model in an undefined state."""

    def submit(self, request: Request) -> None:
        """Queue a request."""

    def cancel(self, request_id: str) -> None:
        """Drop a request."""

    def pause(self, mode: PauseMode, lease_seconds: float, timeout: float) -> int:
        """Pause. Returns how many samples are held."""

    def resume(self) -> None:
        """End the pause."""

    def sleep(self, timeout: float) -> None:
        """Wait for running samples, then free memory."""

    def wake(self, parts: Collection[MemoryPart]) -> None:
        """Allocate memory again."""

    def stats(self) -> dict[str, int]:
        """Return running_samples, waiting_samples and tokens_generated so far."""


class EngineProcess(ABC):
    """Answers the rollout service's requests; its public methods are the handlers."""

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
        self.server = JsonChildServer(handlers)

    @abstractmethod
    def load(self, params: dict[str, Any]) -> dict[str, Any]:
        """Load a model, which generates only after a weight update. Returns vocabulary, context, end_ids and device."""

    @abstractmethod
    def join(self, params: dict[str, Any]) -> None:
        """Check a weight group's manifest and connect to the group."""

    @abstractmethod
    def receive(self, params: dict[str, Any]) -> dict[str, Any]:
        """Receive and commit one version."""

    @abstractmethod
    def leave(self, params: dict[str, Any]) -> dict[str, Any]:
        """Abort and forget a group. Does nothing for an unknown one."""

    @abstractmethod
    def _loaded(self) -> LoadedEngine:
        """Return the engine. Raises HandlerError before a model is loaded."""

    @abstractmethod
    def _rss_bytes(self) -> int:
        """Return the resident memory of the engine's processes."""

    @abstractmethod
    def _memory_in_use(self) -> int:
        """Return the bytes in use: on its GPUs by all processes; on a CPU by the engine's processes."""

    def sleep(self, params: dict[str, Any]) -> dict[str, Any]:
        """Free memory. Returns before and after (bytes in use) and seconds."""
        return self._change_memory(lambda engine: engine.sleep(params["timeout"]))

    def wake(self, params: dict[str, Any]) -> dict[str, Any]:
        """Allocate some parts of the memory again. Returns as `sleep`."""
        return self._change_memory(lambda engine: engine.wake(params["parts"]))

    def _change_memory(self, change: Callable[[LoadedEngine], None]) -> dict[str, Any]:
        engine, before, started = self._loaded(), self._memory_in_use(), time.monotonic()
        try:
            change(engine)
        except EngineError as error:
            raise HandlerError(str(error), kind="EngineError") from error
        return {"before": before, "after": self._memory_in_use(), "seconds": time.monotonic() - started}

    def generate(self, params: dict[str, Any]) -> None:
        """Queue a request; outputs come as events."""
        sampling = params.pop("sampling")
        sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
        params["prompt_tokens"] = tuple(params["prompt_tokens"])
        self._loaded().submit(Request(sampling=Sampling(**sampling), **params))

    def cancel(self, params: dict[str, Any]) -> None:
        """Drop a request."""
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
        threading.Thread(target=self._report_stats, name="stats", daemon=True).start()

    def _on_output(self, outputs: dict[str, list[Output]]) -> None:
        encoded = {request_id: [encode_output(output) for output in each] for request_id, each in outputs.items()}
        messages, too_large = pack_messages(encoded, MAX_FRAME_BYTES - MARGIN_BYTES)
        for message in messages:
            self.server.emit("output", {"requests": message})
        for request_id, size in too_large.items():
            reason = f"one answer is a message of {size} bytes; at most {MAX_FRAME_BYTES} are allowed"
            self.server.emit("failed", {"request_id": request_id, "reason": reason, "too_large": True})
            self._loaded().cancel(request_id)

    def _on_failure(self, request_id: str, reason: str) -> None:
        self.server.emit("failed", {"request_id": request_id, "reason": reason})

    def _report_stats(self) -> None:
        while True:
            engine = self._loaded()
            stats = {**engine.stats(), "quarantined": engine.quarantined, "rss_bytes": self._rss_bytes()}
            self.server.emit("stats", stats)
            time.sleep(STATS_SECONDS)


def read_arguments() -> None:
    """Read the command line of an engine's process and set up logging."""
    parser = argparse.ArgumentParser(description="The engine of a rollout service; started by the service.")
    parser.add_argument("--name", default="engine", help="name in the logs")
    parser.add_argument("--log-level", default="info")
    arguments = parser.parse_args()
    setup_logging(arguments.name, arguments.log_level)
