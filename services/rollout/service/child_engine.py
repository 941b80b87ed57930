"""Client of an engine in a child process: starts the process, sends requests, and receives outputs."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from relaxd.config import RolloutConfig
from relaxd.engines import ENGINES
from relaxd.process.child import Child, ChildExit, ChildExited
from relaxd.process.child_channel import Requests, RequestStream
from relaxd.process.gpu_lease import GpuLease
from relaxd.roles import ROLLOUT
from relaxd.rpc.errors import Aborted, RpcError
from relaxd.v1 import engine_pb2, engine_pb2_grpc, rollout_pb2, rollout_pb2_grpc, weights_pb2
from services.rollout.engines.engine_interface import EngineStart, RolloutEngine
from services.rollout.engines.request_types import (
    MARGIN_SECONDS,
    MEMORY_PARTS,
    PAUSE_MODES,
    AnswerTooLarge,
    MemoryPart,
    Output,
    PauseMode,
    Request,
    RequestFailed,
    Version,
    WrongMedia,
    decode_output,
    encode_request,
)

GivenLogprobs = tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]
"""Scores of n given tokens: their log-probs [n], ids of the k likeliest tokens at each position [n, k], and those
tokens' log-probs [n, k]."""
ALL_MEMORY: frozenset[MemoryPart] = frozenset({"weights", "kv_cache"})
CONTROL_SECONDS = 10.0
"""Deadline of calls that resume generation, leave a weight group or start a recording, in seconds."""
STATS_SECONDS = 1.0
"""Interval between requests for the engine's statistics, in seconds."""
STATS_TIMEOUT_SECONDS = 60.0
"""Deadline of a request for the engine's statistics, in seconds."""

logger = logging.getLogger(__name__)


async def start_engine(start: EngineStart) -> "ChildEngine":
    """Start the engine's process for a rollout replica, and load its model. Raises ChildError."""

    def on_exit(ended: ChildExit) -> None:
        start.on_exit(f"the engine {ended}: starting another")

    start.set_detail(f"loading {start.folder.name}")
    engine = await ChildEngine.start(
        start.folder,
        start.config.rollout,
        environment=start.environment,
        name=start.settings.replica_id,
        log_level=start.settings.log_level,
        python=start.settings.engine_python,
        on_exit=on_exit,
        on_tokens=start.on_tokens,
        colocate=start.config.run.colocate,
        gpu_lease=start.gpu_lease,
    )
    logger.info("%s is loaded (process %d), waiting for weights", start.folder.name, engine.pid)
    return engine


class ChildEngine(RolloutEngine):
    """Engine that runs in a child process."""

    def __init__(self, on_exit: Callable[[ChildExit], None], on_tokens: Callable[[int, float], None]) -> None:
        super().__init__()
        self._on_exit = on_exit
        self._on_tokens = on_tokens
        self._child: Child
        self._engine: Any
        """Stub of the child's Engine service."""
        self._rollout: Any
        """Stub of the child's Rollout service: pauses, weights and memory."""
        self._versions: RequestStream
        """Stream of requests to receive weights."""
        self._queues: dict[str, asyncio.Queue[Output | Exception]] = {}
        self._unsent = engine_pb2.ExchangeRequest()
        self._to_send = asyncio.Event()
        self._frozen = False
        self._changes = 0
        """Number of completed calls that may have changed `quarantined` or `unconfirmed`."""
        self._tasks: list[asyncio.Task[None]] = []
        self._measured = (time.monotonic(), 0)
        self.vocabulary, self.context, self.device = 0, 0, "cpu"
        self.prefilled_tokens = 0
        """Number of prompt tokens and given tokens that the model has prefilled, by its last report."""

    @classmethod
    async def start(
        cls,
        folder: Path,
        config: RolloutConfig,
        *,
        environment: Mapping[str, str],
        name: str,
        role: str = ROLLOUT,
        log_level: str,
        python: str = "",
        on_exit: Callable[[ChildExit], None],
        on_tokens: Callable[[int, float], None],
        colocate: bool = False,
        frozen: bool = False,
        for_logprobs: bool = False,
        gpu_lease: GpuLease | None = None,
    ) -> "ChildEngine":
        """Start a process and load the model in `folder`. Raises ChildError.

        Args:
            folder: the model's folder.
            config: the run's [rollout] table.
            environment: variables added to this process's; they name the GPUs that the engine may use.
            name: id of the replica, for logs and traces.
            role: role of the replica, for traces.
            log_level: log level.
            python: interpreter of the process; "" for this process's.
            on_exit: called if the process ends unexpectedly, before running requests fail.
            on_tokens: called about every second with the number of tokens since the last call, and tokens per second.
            colocate: True if the engine must be able to sleep.
            frozen: True if the engine serves the loaded weights, as version 0 of term 0.
            for_logprobs: True if the engine only computes log-probs of given tokens, at `config.temperature` (SGLang).
            gpu_lease: lease on the engine's GPUs; None without GPUs.
        """
        engine = cls(on_exit, on_tokens)
        threads = {"OMP_NUM_THREADS": str(config.threads)} if config.threads else {}
        child = await Child.start(
            ENGINES[config.engine].process,
            ["--role", role, "--name", name, "--log-level", log_level],
            {**environment, **threads},
            python=python or None,
            name="the engine",
            gpu_lease=gpu_lease,
        )
        engine._child = child
        engine._engine = engine_pb2_grpc.EngineStub(child.channel)
        engine._rollout = rollout_pb2_grpc.RolloutStub(child.channel)
        engine._versions = RequestStream(engine._engine.ReceiveVersions, "ReceiveVersions of the engine")
        child.exited.add_done_callback(lambda exited: engine._on_child_exit(exited.result()))
        model = engine_pb2.LoadRequest(
            folder=str(folder),
            config_json=config.model_dump_json(),
            colocate=colocate,
            frozen=frozen,
            logprobs=for_logprobs,
        )
        try:
            # Without a deadline: the coordinator restarts a replica whose loading makes no progress.
            loaded = await engine._engine.Load(model, timeout=None)
        except BaseException:
            await engine.stop()
            raise
        engine.vocabulary, engine.context, engine.device = loaded.vocabulary, loaded.context, loaded.device
        engine.takes_media = bool(ENGINES[config.engine].media)
        engine._frozen = frozen
        engine.weights = Version(0, 0) if frozen else None
        engine._tasks = [asyncio.create_task(work()) for work in (engine._exchange, engine._watch_stats)]
        return engine

    @property
    def pid(self) -> int:
        """Process id of the engine's child process."""
        return self._child.pid

    @property
    def tokens(self) -> int:
        """Number of tokens generated, by the engine's last report."""
        return self._measured[1]

    @property
    def alive(self) -> bool:
        return self._child.alive

    async def _generate(self, request: Request) -> AsyncIterator[Output]:
        count = len(request.samples)
        queue: asyncio.Queue[Output | Exception] = asyncio.Queue()
        self._queues[request.request_id] = queue
        ended = 0
        try:
            await self._child.wait_connected()
            self._send(begin=[encode_request(request)])
            while ended < count:
                output = await queue.get()
                if isinstance(output, Exception):
                    ended = count
                    raise output
                ended += output.finish_reason is not None
                yield output
        finally:
            del self._queues[request.request_id]
            if ended < count:
                self._send(forget=[request.request_id])

    async def compute_logprobs(
        self, tokens: NDArray[np.integer], start: int, top_k: int, timeout: float
    ) -> GivenLogprobs:
        """Return log-probs of a sequence's tokens from index `start` on. The engine must be started `for_logprobs`.

        Args:
            tokens: token ids [L].
            start: index of the first token to score; at least 1.
            top_k: number of likeliest tokens to return at each position; 0 for none.
            timeout: deadline in seconds.

        Returns:
            Log-probs [n], ids of the likeliest tokens [n, top_k], likeliest first, and their log-probs [n, top_k].
            n is the engine's number of log-probs, which is not checked.

        Raises:
            RequestFailed: the engine failed the request, or the shapes of its answer don't fit together.
            ChildExited: the engine exited.
            DeadlineExceeded: the engine didn't answer in time.
        """
        request = engine_pb2.ComputeLogprobsRequest(
            tokens=np.asarray(tokens, dtype=np.int32).tobytes(), start=start, top_k=top_k
        )
        try:
            answer = await self._engine.ComputeLogprobs(request, timeout=timeout)
        except Aborted as error:
            raise RequestFailed(str(error)) from error
        logprobs = np.frombuffer(answer.logprobs, dtype=np.float32)
        ids = np.frombuffer(answer.likeliest, dtype=np.int32)
        values = np.frombuffer(answer.likeliest_logprobs, dtype=np.float32)
        if not len(ids) == len(values) == len(logprobs) * top_k:
            raise RequestFailed(
                f"the engine gave {len(logprobs)} log-probs, but {len(ids)} likeliest tokens with {len(values)} "
                f"log-probs, not {top_k} in each place"
            )
        return logprobs, ids.reshape(len(logprobs), top_k), values.reshape(len(logprobs), top_k)

    async def abort(self, request_id: str) -> None:
        self._send(abort=[request_id])

    async def pause(self, mode: PauseMode, lease_seconds: float, timeout: float) -> int:
        request = rollout_pb2.PauseGenerationRequest(mode=_number(PAUSE_MODES, mode), lease_seconds=lease_seconds)
        answer = await self._rollout.PauseGeneration(request, timeout=timeout + MARGIN_SECONDS)
        return int(answer.paused_samples)

    async def _continue(self, weights: Version | None) -> None:
        named = weights.to_proto() if weights is not None else None
        request = rollout_pb2.ResumeGenerationRequest(weights=named)
        await self._rollout.ResumeGeneration(request, timeout=CONTROL_SECONDS)
        self._changes += 1

    async def record(self, profile: rollout_pb2.ProfileRequest, folder: Path, name: str) -> list[str]:
        """Record the next model steps with torch's profiler. Returns the files that will hold the recordings.

        Raises EngineError if a recording is running already.
        """
        request = engine_pb2.RecordStepsRequest(profile=profile, folder=str(folder), name=name)
        answer = await self._engine.RecordSteps(request, timeout=CONTROL_SECONDS + MARGIN_SECONDS)
        return list(answer.paths)

    async def sleep(self, timeout: float) -> weights_pb2.MemoryChange:
        """Wait up to `timeout` seconds for running samples, then free the engine's weights and key-value cache."""
        served, self.weights = self.weights, None
        try:
            request = rollout_pb2.SleepRequest(timeout_seconds=timeout)
            answer = await self._rollout.Sleep(request, timeout=timeout + MARGIN_SECONDS)
        except BaseException:
            self.weights = served
            raise
        self.asleep = ALL_MEMORY
        return answer.memory

    async def wake(self, parts: Collection[MemoryPart], timeout: float) -> weights_pb2.MemoryChange:
        """Allocate freed memory parts of the engine again."""
        request = rollout_pb2.WakeRequest(parts=[_number(MEMORY_PARTS, part) for part in sorted(parts)])
        answer = await self._rollout.Wake(request, timeout=timeout)
        self.asleep -= frozenset(parts)
        if self._frozen and not self.asleep:
            self.weights = Version(0, 0)
        return answer.memory

    async def join(self, request: rollout_pb2.JoinWeightGroupRequest) -> None:
        await self._rollout.JoinWeightGroup(request, timeout=request.group.timeout_seconds + MARGIN_SECONDS)

    async def receive(self, request: rollout_pb2.ReceiveWeightsRequest) -> rollout_pb2.ReceiveWeightsResponse:
        timeout = request.pause_timeout_seconds + request.timeout_seconds + MARGIN_SECONDS
        answer = await self._versions.ask(engine_pb2.ReceiveVersionsRequest(receive=request), timeout=timeout)
        self.take_up(Version.from_proto(request.weights), answer.received.checksums, resume=request.resume)
        self._changes += 1
        return answer.received

    async def leave(self, group_name: str) -> bool:
        request = rollout_pb2.LeaveWeightGroupRequest(group_name=group_name)
        answer = await self._rollout.LeaveWeightGroup(request, timeout=CONTROL_SECONDS)
        self.quarantined = answer.quarantined
        self._changes += 1
        return self.quarantined

    async def stop(self) -> None:
        self._on_exit = lambda ended: None
        self._child.kill()  # it has nothing to clean up
        await asyncio.shield(self._child.exited)

    def _send(self, **fields: Any) -> None:
        """Queue fields of an ExchangeRequest; they are merged with other unsent fields and sent together."""
        self._unsent.MergeFrom(engine_pb2.ExchangeRequest(**fields))
        self._to_send.set()

    async def _next_request(self) -> engine_pb2.ExchangeRequest | None:
        """Wait until fields are queued, and return them as one request; None if the child process has ended."""
        if not self.alive:
            return None
        await self._to_send.wait()  # for as long as there is nothing to send
        self._to_send.clear()
        request, self._unsent = self._unsent, engine_pb2.ExchangeRequest()
        return request

    async def _exchange(self) -> None:
        """Send requests to the child process and deliver its outputs until it ends. Kill it on an error."""
        try:
            async for answer in self._engine.Exchange(Requests(self._next_request), timeout=None):
                for output in answer.outputs:
                    self._deliver(output.request_id, decode_output(output))
                for failure in answer.failures:
                    kind = WrongMedia if failure.wrong_media else RequestFailed
                    kind = AnswerTooLarge if failure.too_large else kind
                    self._deliver(failure.request_id, kind(failure.reason))
        except ChildExited:
            return
        except RpcError as error:
            logger.error("killing the engine, which does not take requests any more: %s", error)
        except Exception:  # such as an output that can't be decoded: nothing more would be delivered
            logger.exception("killing the engine, whose answers can't be read")
        self._child.kill()

    def _deliver(self, request_id: str, output: Output | Exception) -> None:
        queue = self._queues.get(request_id)
        if queue is not None:  # else it was cancelled
            queue.put_nowait(output)

    async def _watch_stats(self) -> None:
        while True:
            changes = self._changes
            try:
                stats = await self._engine.GetEngineStats(
                    engine_pb2.GetEngineStatsRequest(), timeout=STATS_TIMEOUT_SECONDS
                )
            except ChildExited:
                return
            except RpcError as error:
                logger.warning("reporting the engine's last statistics again: %s", error)
            else:
                if changes == self._changes:  # else it may be from before the change
                    self.quarantined, self.unconfirmed = stats.quarantined, stats.unconfirmed
                self._take_stats(stats)
            await asyncio.sleep(STATS_SECONDS)  # idle: looks again

    def _take_stats(self, stats: engine_pb2.GetEngineStatsResponse) -> None:
        now, tokens = time.monotonic(), stats.tokens_generated
        before, tokens_before = self._measured
        self._measured = (now, tokens)
        self.prefilled_tokens = stats.tokens_prefilled
        per_second = (tokens - tokens_before) / max(now - before, 1e-3)
        self._on_tokens(tokens - tokens_before, per_second)
        self.gauges = {
            "tokens_per_second": per_second,
            "running_samples": stats.running_samples,
            "waiting_samples": stats.waiting_samples,
            "engine_rss_bytes": stats.rss_bytes,
        }
        if stats.tokens_prompted:
            self.gauges |= {
                "engine_prompted_tokens": stats.tokens_prompted,
                "engine_prefilled_tokens": stats.tokens_prefilled,
            }

    def _on_child_exit(self, ended: ChildExit) -> None:
        self.weights = None
        self.gauges = {}
        self._on_exit(ended)
        self._to_send.set()  # ends the requests
        for task in self._tasks:
            task.cancel()
        for queue in self._queues.values():
            queue.put_nowait(ChildExited("the engine", ended.exit_code, ended.last_lines))


def _number(words: Mapping[int, str], word: str) -> Any:
    """Return the highest enum number whose word is `word`; the default 0 may have the same word."""
    return max(number for number, each in words.items() if each == word)


def loaded_mebibytes(parent: psutil.Process) -> int:
    """Return the data that the descendants of `parent` have loaded: bytes read plus resident memory, in MiB.

    Resident memory counts because mapped files are loaded without read calls.
    """
    total = 0
    for process in parent.children(recursive=True):
        with suppress(psutil.Error):
            total += process.memory_info().rss
            total += process.io_counters().read_chars if psutil.LINUX else 0
    return total >> 20
