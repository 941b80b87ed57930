"""The parent's side of an engine: starts its child process, sends it requests, and receives outputs."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from relaxd.config import RolloutConfig
from relaxd.process.child import ChildError, ChildExit, ChildExited
from relaxd.process.gpu_lease import GpuLease
from relaxd.process.json_child import JsonChild
from services.rollout.engines.output_encoding import decode_output
from services.rollout.engines.types import (
    AnswerTooLarge,
    EngineError,
    MemoryPart,
    Output,
    Request,
    RequestFailed,
    Sampling,
    Version,
)

if TYPE_CHECKING:
    from services.rollout.engines.sglang_external.engine import ExternalEngine

AnyEngine: TypeAlias = "ChildEngine | ExternalEngine"
"""An engine in a child process or an external server. Both have the same methods."""
MODULES = {
    "transformers": "services.rollout.engines.transformers.process",
    "sglang": "services.rollout.engines.sglang.process",
}
"""Modules of the engines' processes, by rollout.engine."""
ALL_MEMORY: frozenset[MemoryPart] = frozenset({"weights", "kv_cache"})
CONTROL_SECONDS = 10.0
"""Deadline of requests that only change a flag."""
MARGIN_SECONDS = 5.0
"""Time for an answer beyond a deadline that the engine enforces itself."""


class ChildEngine:
    """One engine process with a loaded model. Use it only in the event loop that started it."""

    def __init__(self, on_exit: Callable[[ChildExit], None], on_tokens: Callable[[int, float], None]) -> None:
        self._on_exit = on_exit
        self._on_tokens = on_tokens
        self._child: JsonChild | None = None
        self._queues: dict[str, asyncio.Queue[Output | Exception]] = {}
        self._numbers = itertools.count()
        self._measured = (time.monotonic(), 0)
        self.vocabulary = 0
        """Token ids are below this."""
        self.context = 0
        """Most tokens of prompt and answer together; 0 when the model doesn't say."""
        self.device = "cpu"
        """Device of the model: "cpu" or "cuda"."""
        self.weights: Version | None = None
        """The weights that it serves; None until the first commit."""
        self.quarantined = False
        """True if a failed update left the model between two versions."""
        self.asleep: frozenset[MemoryPart] = frozenset()
        """The parts of its memory that it has freed."""
        self.tokens = 0
        """Tokens generated since the start, by its last report."""
        self.gauges: dict[str, float] = {}
        """Last report of tokens_per_second, running_samples, waiting_samples and engine_rss_bytes."""

    @classmethod
    async def start(
        cls,
        folder: Path,
        config: RolloutConfig,
        *,
        environment: Mapping[str, str],
        name: str,
        log_level: str,
        python: str = "",
        on_exit: Callable[[ChildExit], None],
        on_tokens: Callable[[int, float], None],
        colocate: bool = False,
        gpu_lease: GpuLease | None = None,
    ) -> "ChildEngine":
        """Start a process and load the model in `folder`. Raises ChildError.

        Args:
            folder: the model.
            config: the run's [rollout] table.
            environment: set on top of this process's; names the GPUs that the engine may use.
            name: name of the replica, for logs.
            log_level: log level.
            python: another interpreter than this process's.
            on_exit: called when the process ends unexpectedly, before running requests fail.
            on_tokens: called about every second with the number of tokens generated since, and tokens per second.
            colocate: whether the engine has to sleep and wake up.
            gpu_lease: lease on the engine's GPUs, if it uses any.
        """
        engine = cls(on_exit, on_tokens)
        threads = {"OMP_NUM_THREADS": str(config.threads)} if config.threads else {}
        child = await JsonChild.start(
            MODULES[config.engine],
            ["--name", f"{name}/engine", "--log-level", log_level],
            {**environment, **threads},
            python=python or None,
            name="the engine",
            on_event=engine._on_event,
            gpu_lease=gpu_lease,
        )
        engine._child = child
        child.exited.add_done_callback(lambda exited: engine._on_child_exit(exited.result()))
        params = {
            "folder": str(folder),
            "dtype": config.dtype,
            "max_running_samples": config.max_running_samples,
            "threads": config.threads,
            "tensor_parallel": config.tensor_parallel,
            "memory_fraction": config.memory_fraction,
            "return_routed_experts": config.return_routed_experts,
            "options": config.sglang,
            "colocate": colocate,
        }
        try:
            # Without a deadline: the coordinator restarts a replica whose loading makes no progress.
            loaded = await child.request("load", params, None)
        except BaseException:
            await engine.stop()
            raise
        engine.vocabulary, engine.context = loaded["vocabulary"], loaded["context"]
        engine.device = loaded["device"]
        return engine

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._child is not None
        return self._child.pid

    @property
    def alive(self) -> bool:
        """True if the process runs."""
        return self._child is not None and self._child.alive

    @property
    def serving(self) -> bool:
        """True if it generates, or will when its pause ends."""
        return self.alive and self.weights is not None and not self.quarantined and not self.asleep

    async def generate(
        self, prompt_tokens: tuple[int, ...], n: int, sampling: Sampling, *, stream: bool = False
    ) -> AsyncIterator[Output]:
        """Yield the outputs of n samples until all have ended. Leaving the iteration early cancels the rest.

        Raises RequestFailed, or ChildExited when the engine exits.
        """
        request = Request(f"request-{next(self._numbers)}", prompt_tokens, n, sampling, stream)
        queue: asyncio.Queue[Output | Exception] = asyncio.Queue()
        self._queues[request.request_id] = queue
        ended = 0
        try:
            await self._request("generate", asdict(request), CONTROL_SECONDS)
            while ended < n:
                output = await queue.get()
                if isinstance(output, Exception):
                    ended = n
                    raise output
                ended += output.finish_reason is not None
                yield output
        finally:
            del self._queues[request.request_id]
            if ended < n and self.alive:
                with suppress(ChildError):
                    await self._request("cancel", {"request_id": request.request_id}, CONTROL_SECONDS)

    async def pause(self, mode: str, lease_seconds: float, timeout: float) -> int:
        """Pause generation. Returns the number of samples held in place."""
        params = {"mode": mode, "lease_seconds": lease_seconds, "timeout": timeout}
        return int((await self._request("pause", params, timeout + MARGIN_SECONDS))["paused_samples"])

    async def resume(self) -> None:
        """End the pause."""
        await self._request("resume", {}, CONTROL_SECONDS)

    async def sleep(self, timeout: float) -> dict[str, Any]:
        """Wait for running samples, then free memory. Returns before and after (bytes in use) and seconds."""
        served, self.weights = self.weights, None
        try:
            change: dict[str, Any] = await self._request("sleep", {"timeout": timeout}, timeout + MARGIN_SECONDS)
        except BaseException:
            self.weights = served
            raise
        self.asleep = ALL_MEMORY
        return change

    async def wake(self, parts: Collection[MemoryPart], timeout: float) -> dict[str, Any]:
        """Allocate memory again. Returns as `sleep`."""
        params = {"parts": sorted(parts)}
        change: dict[str, Any] = await self._request("wake", params, timeout)
        self.asleep -= frozenset(parts)
        return change

    async def join(self, group: Mapping[str, Any], timeout: float) -> None:
        """Connect to a weight group: name, transport, store_host, store_port, rank, world_size, manifest (base64)."""
        await self._request("join", {**group, "timeout": timeout}, timeout + MARGIN_SECONDS)

    async def receive(self, group_name: str, weights: Version, timeout: float, *, checksum: bool) -> dict[str, Any]:
        """Receive and commit one version. Returns seconds and checksums."""
        params = {"name": group_name, **asdict(weights), "timeout": timeout, "checksum": checksum}
        result: dict[str, Any] = await self._request("receive", params, timeout + MARGIN_SECONDS)
        self.weights, self.quarantined = weights, False
        return result

    async def leave(self, group_name: str, *, quarantine: bool) -> bool:
        """Abort and forget a weight group, and quarantine the engine if asked. Returns whether it is quarantined."""
        params = {"name": group_name, "quarantine": quarantine}
        self.quarantined = (await self._request("leave", params, CONTROL_SECONDS))["quarantined"]
        return self.quarantined

    async def stop(self) -> None:
        """Kill the process."""
        self._on_exit = lambda ended: None
        if self._child is not None:
            self._child.kill()  # it has nothing to clean up
            await asyncio.shield(self._child.exited)

    async def _request(self, method: str, params: dict[str, Any], timeout: float) -> Any:
        if self._child is None:
            raise EngineError("the engine has not been started")
        return await self._child.request(method, params, timeout)

    def _on_event(self, event: str, params: dict[str, Any]) -> None:
        if event == "stats":
            self._take_stats(params)
            return
        if event == "failed":
            kind = AnswerTooLarge if params.get("too_large") else RequestFailed
            self._deliver(params["request_id"], [kind(params["reason"])])
        else:
            for request_id, outputs in params["requests"].items():
                self._deliver(request_id, [decode_output(encoded) for encoded in outputs])

    def _deliver(self, request_id: str, outputs: Sequence[Output | Exception]) -> None:
        queue = self._queues.get(request_id)
        if queue is not None:  # else it was cancelled
            for output in outputs:
                queue.put_nowait(output)

    def _take_stats(self, stats: dict[str, Any]) -> None:
        now, tokens = time.monotonic(), stats["tokens_generated"]
        self.tokens = tokens
        before, tokens_before = self._measured
        self._measured = (now, tokens)
        self.quarantined = stats["quarantined"]
        per_second = (tokens - tokens_before) / max(now - before, 1e-3)
        self._on_tokens(tokens - tokens_before, per_second)
        self.gauges = {
            "tokens_per_second": per_second,
            "running_samples": stats["running_samples"],
            "waiting_samples": stats["waiting_samples"],
            "engine_rss_bytes": stats["rss_bytes"],
        }

    def _on_child_exit(self, ended: ChildExit) -> None:
        self.weights = None
        self.gauges = {}
        self._on_exit(ended)
        for queue in self._queues.values():
            queue.put_nowait(ChildExited("the engine", ended.exit_code, ended.last_lines))
