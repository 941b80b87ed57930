"""Scripted engine of a rehearsal, which has neither a model nor a child process.

Its answers have random lengths and take the time that `[rehearsal]` states.
"""

import asyncio
import heapq
import itertools
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxd.config import RehearsalConfig, RolloutConfig
from relaxd.config.operation import EXPERTS
from relaxd.models.shape import expert_dtype
from relaxd.v1 import rollout_pb2
from services.rollout.engines.engine_interface import EngineStart, RolloutEngine
from services.rollout.engines.request_types import PAUSE_MODES, Output, PauseMode, Request, Version

ROUNDING_TOKENS = 1e-3
"""Tolerance for rounding errors, in tokens. A sample that is this close to its length has ended."""


class Decoder:
    """Simulates the decoding of concurrent samples, all at the same speed. Use it in one event loop.

    `position` counts the tokens that an endless sample would have: a sample of L tokens that starts at position p ends
    at position p + L, even if the speed changes.
    """

    def __init__(
        self,
        tokens_per_second: float,
        sample_tokens_per_second: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tokens_per_second`: maximum speed of all samples together. `sample_tokens_per_second`: maximum speed of one
        sample."""
        self._all, self._one = tokens_per_second, sample_tokens_per_second
        self._clock = clock
        self._last = clock()
        self._position = 0.0
        self._paused = False
        self._ends: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self.tokens = 0.0
        """Number of tokens decoded so far, summed over all samples."""

    @property
    def running(self) -> int:
        """Number of samples in progress."""
        return len(self._ends)

    @property
    def speed(self) -> float:
        """Current tokens per second of each sample."""
        if self._paused or not self._ends:
            return 0.0
        return min(self._one, self._all / len(self._ends))

    @property
    def position(self) -> float:
        """Number of tokens that a sample would have now if it had run since the decoder's beginning."""
        now = self._clock()
        passed = self.speed * (now - self._last)
        self._position += passed
        self.tokens += passed * len(self._ends)
        self._last = now
        return self._position

    def pause(self, paused: bool) -> None:
        """Pause the decoding of all samples, or let it continue."""
        self._advance()
        self._paused = paused
        self._plan()

    async def decode(self, length: int, begin: float | None = None) -> None:
        """Wait until a sample has `length` tokens. `begin`: decoder position at which the sample started; None if it
        starts now."""
        end = asyncio.get_running_loop().create_future()
        self._advance()
        start = self._position if begin is None else begin
        heapq.heappush(self._ends, (start + length, next(self._numbers), end))
        self._plan()
        try:
            await end
        except asyncio.CancelledError:
            self._advance()
            self._ends = [entry for entry in self._ends if entry[2] is not end]
            heapq.heapify(self._ends)
            self._plan()
            raise

    def _advance(self) -> None:
        """Add the tokens decoded since the last change, and end the samples that are complete."""
        position = self.position
        while self._ends and self._ends[0][0] <= position + ROUNDING_TOKENS:
            _, _, end = heapq.heappop(self._ends)
            if not end.done():
                end.set_result(None)

    def _plan(self) -> None:
        """Set the timer to the moment when the next sample will be complete at the current speed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if speed := self.speed:
            seconds = max(0.0, (self._ends[0][0] - self._position) / speed)
            self._timer = asyncio.get_running_loop().call_later(seconds, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._advance()
        self._plan()


def draw_lengths(config: RehearsalConfig, n: int, max_new_tokens: int, seed: int) -> NDArray[np.int64]:
    """Return the lengths of n answers, int64 [n], each 1 to max_new_tokens. The same seed gives the same lengths."""
    median = config.median_tokens or max(1, max_new_tokens // 8)
    drawn = median * np.exp(config.spread * np.random.default_rng(seed).standard_normal(n))
    return np.clip(np.rint(drawn), 1, max_new_tokens).astype(np.int64)


CHECKSUM = {"scripted": 1}
"""Weight checksums, by tensor name, that trainer and engines report in a rehearsal."""
VOCABULARY = 1 << 31
TEXT_BYTES = 4
"""Average number of bytes of text per token."""
_POOL = 1 << 20
"""Number of tokens in the pool of random tokens."""


class _Pool:
    """Random tokens, log-probs and text from which all answers are sliced, so that making an answer costs nothing."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.tokens = random.integers(100, 150_000, _POOL, dtype=np.int32)
        self.logprobs = -random.exponential(0.5, _POOL).astype(np.float32)
        self.text = bytes(random.integers(97, 123, _POOL, dtype=np.uint8)).decode()

    def array(self, name: str, length: int) -> Any:
        """Return the first `length` values of the pool's array `name`, which is repeated if it is shorter."""
        values = getattr(self, name)
        return values[:length] if length <= _POOL else np.resize(values, length)


@dataclass
class _Sample:
    """A sample that the scripted engine is decoding."""

    request: Request
    index: int
    length: int
    begin: float
    """Position of the decoder when the sample's request began."""
    version: int
    """Version of the weights when the sample's request began."""
    reported: int = 0
    """Number of the sample's tokens that are reported already, including those from before the request."""

    def __post_init__(self) -> None:
        self.reported = self.begun

    @property
    def begun(self) -> int:
        """Number of tokens that the sample had before this request."""
        return len(self.request.tokens_of(self.index))


_pool = cache(_Pool)
"""Returns the pool of random tokens that all scripted engines of this process share."""


async def start_engine(start: EngineStart) -> "ScriptedEngine":
    """Return a scripted engine for a rollout replica."""
    return ScriptedEngine(start.config.rollout, start.config.rehearsal)


class ScriptedEngine(RolloutEngine):
    """An engine without a model, whose answers take exactly the time that `[rehearsal]` states."""

    vocabulary = VOCABULARY
    context = 0
    device = "cpu"

    def __init__(self, rollout: RolloutConfig, rehearsal: RehearsalConfig) -> None:
        super().__init__()
        self.takes_media = True
        self._rollout, self._rehearsal = rollout, rehearsal
        self._decoder = Decoder(rehearsal.tokens_per_second, rehearsal.sample_tokens_per_second)
        self._pool = _pool()
        self._changes: list[tuple[float, int]] = []
        """Weight updates so far: decoder position at the update, and new version."""
        self._resume: asyncio.TimerHandle | None = None
        self._tasks: dict[str, set[asyncio.Task[None]]] = {}
        self._aborted: set[str] = set()
        """Ids of the requests that `abort` has ended."""
        self._alive = True

    @property
    def tokens(self) -> int:
        return int(self._decoder.tokens)

    @property
    def alive(self) -> bool:
        """True until the engine's `stop` is called."""
        return self._alive

    async def _generate(self, request: Request) -> AsyncIterator[Output]:
        lengths = draw_lengths(self._rehearsal, request.n, request.sampling.max_new_tokens, request.sampling.seed)
        outputs: asyncio.Queue[Output | None] = asyncio.Queue()
        tasks = {
            asyncio.create_task(self._sample(request, index, int(lengths[index]), outputs)) for index in request.samples
        }
        self._tasks[request.request_id] = tasks
        self._report()
        ended = 0
        try:
            while ended < len(tasks):
                output = await outputs.get()
                if output is None:
                    raise asyncio.CancelledError  # the engine was stopped
                ended += output.finish_reason is not None
                yield output
        finally:
            self._tasks.pop(request.request_id, None)
            self._aborted.discard(request.request_id)
            for task in tasks:
                task.cancel()
            self._report()

    async def _sample(self, request: Request, index: int, length: int, outputs: "asyncio.Queue[Output | None]") -> None:
        """Put the outputs of a sample into `outputs`; None if its task is cancelled without `abort`. `length` includes
        earlier tokens."""
        sample = _Sample(request, index, length, self._decoder.position, self.weights.version if self.weights else 0)
        every = request.report_every if request.stream else length
        try:
            ended = False
            while not ended:
                end = min(sample.reported + max(every, 1), length)
                await self._decoder.decode(end - sample.begun, sample.begin)
                outputs.put_nowait(output := self._output(sample, end))
                ended = output.finish_reason is not None
        except asyncio.CancelledError:
            if request.request_id not in self._aborted:
                outputs.put_nowait(None)
                raise
            end = min(sample.begun + int(self._decoder.position - sample.begin), length)
            outputs.put_nowait(self._output(sample, max(end, sample.reported), aborted=True))

    def _output(self, sample: "_Sample", end: int, *, aborted: bool = False) -> Output:
        """Return an output with a sample's unreported tokens up to token number `end`."""
        start, sample.reported = sample.reported, end
        versions: Any = np.full(end - start, sample.version, dtype=np.int64)
        newer = self._changes[bisect_right(self._changes, sample.begin, key=itemgetter(0)) :]
        for position, number in newer:
            versions[max(0, int(position - sample.begin) + sample.begun - start) :] = number
        output = Output(
            sample.index,
            self._pool.array("tokens", end)[start:],
            self._pool.array("logprobs", end)[start:],
            versions,
            spans_weight_update=bool(newer),
        )
        limit = sample.request.sampling.max_new_tokens
        if end == sample.length or aborted:
            output.finish_reason = "abort" if end < sample.length else "length" if end == limit else "stop"
            output.text = (self._pool.text * (1 + TEXT_BYTES * end // _POOL))[: TEXT_BYTES * end]
            output.routed_experts = self._experts(len(sample.request.prompt_tokens) + end - 1)
        return output

    def _experts(self, tokens: int) -> Any:
        """Return made-up expert ids, uint8 or uint16 [tokens, layers, top k]; None if the run doesn't return
        experts."""
        if not self._rollout.return_routed_experts:
            return None
        layers, top_k = self._rehearsal.experts
        return np.resize(np.arange(EXPERTS, dtype=expert_dtype(EXPERTS)), (tokens, layers, top_k))

    async def abort(self, request_id: str) -> None:
        self._aborted.add(request_id)
        for task in self._tasks.get(request_id, ()):
            task.cancel()

    async def pause(self, mode: PauseMode, lease_seconds: float, timeout: float) -> int:
        """Pause decoding until a resume or the end of the lease. If the weights are unconfirmed, the pause outlasts the
        lease."""
        self._end_lease()
        if mode == "abort":
            for request_id in list(self._tasks):
                await self.abort(request_id)
        elif mode == "drain" and (running := set[asyncio.Task[None]]().union(*self._tasks.values())):
            await asyncio.wait(running, timeout=timeout)
        self._decoder.pause(True)
        self._resume = asyncio.get_running_loop().call_later(lease_seconds, self._lease_over)
        return self._decoder.running

    async def _continue(self, weights: Version | None) -> None:
        self._end_lease()
        self._decoder.pause(False)

    async def join(self, request: rollout_pb2.JoinWeightGroupRequest) -> None:
        """Do nothing: a rehearsal sends no weights."""

    async def receive(self, request: rollout_pb2.ReceiveWeightsRequest) -> rollout_pb2.ReceiveWeightsResponse:
        """Take the sent version as the engine's weights, after the simulated time of a broadcast."""
        if request.HasField("pause"):
            mode = PAUSE_MODES[request.pause.mode]
            await self.pause(mode, request.pause.lease_seconds, request.pause_timeout_seconds)
        await asyncio.sleep(self._rehearsal.sync_seconds)
        weights, checksums = request.weights, CHECKSUM if request.checksum else {}
        self.take_up(Version.from_proto(weights), checksums, resume=request.resume)
        self._changes.append((self._decoder.position, weights.version))
        if request.resume:
            await self.resume()
        return rollout_pb2.ReceiveWeightsResponse(seconds=self._rehearsal.sync_seconds, checksums=checksums)

    async def leave(self, group_name: str) -> bool:
        self.quarantined = self.quarantined or self.unconfirmed
        return self.quarantined

    async def stop(self) -> None:
        """End the engine and all its samples."""
        self._alive = False
        self._end_lease()
        for tasks in list(self._tasks.values()):
            for task in tasks:
                task.cancel()

    def _lease_over(self) -> None:
        self.quarantined = self.quarantined or self.unconfirmed
        self._decoder.pause(self.quarantined)

    def _end_lease(self) -> None:
        if self._resume is not None:
            self._resume.cancel()
            self._resume = None

    def _report(self) -> None:
        self.gauges = {
            "tokens_per_second": self._decoder.speed * self._decoder.running,
            "running_samples": float(self._decoder.running),
            "waiting_samples": 0.0,
        }
