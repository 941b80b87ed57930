"""The scripted engine: answers of drawn lengths after the time that they would take."""

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any

import numpy as np

from relaxd.config import RehearsalConfig, RolloutConfig
from relaxd.config.operation import EXPERTS
from relaxd.models.shape import expert_dtype
from relaxd.v1 import rollout_pb2
from services.rollout.engines.engine import RolloutEngine
from services.rollout.engines.scripted.decoder import Decoder
from services.rollout.engines.scripted.lengths import draw_lengths
from services.rollout.engines.types import PAUSE_MODES, Output, PauseMode, Request, Version

CHECKSUM = {"scripted": 1}
"""Checksums that trainer and engines of a rehearsal report."""
VOCABULARY = 1 << 31
TEXT_BYTES = 4
"""Bytes of a token's text, on average."""
_POOL = 1 << 20


class _Pool:
    """Tokens and log-probs that all answers share: slices of them cost nothing."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.tokens = random.integers(100, 150_000, _POOL, dtype=np.int32)
        self.logprobs = -random.exponential(0.5, _POOL).astype(np.float32)
        self.text = bytes(random.integers(97, 123, _POOL, dtype=np.uint8)).decode()

    def array(self, name: str, length: int) -> Any:
        """Return `length` values of one of its arrays."""
        values = getattr(self, name)
        return values[:length] if length <= _POOL else np.resize(values, length)


@dataclass
class _Sample:
    """A sample that is being decoded."""

    request: Request
    index: int
    length: int
    begin: float
    """Position of the decoder at which the request began."""
    version: int
    """Version of the weights then."""
    reported: int = 0
    """Number of tokens that were reported, or that it had before the request."""

    def __post_init__(self) -> None:
        self.reported = self.begun

    @property
    def begun(self) -> int:
        """Number of tokens that it had before the request."""
        return len(self.request.tokens_of(self.index))


@cache
def _pool() -> _Pool:
    """Return the pool of this process, which may have many engines."""
    return _Pool()


class ScriptedEngine(RolloutEngine):
    """An engine that has no model and needs no time but that which `[rehearsal]` states."""

    vocabulary = VOCABULARY
    context = 0
    device = "cpu"

    def __init__(self, rollout: RolloutConfig, rehearsal: RehearsalConfig) -> None:
        super().__init__()
        self._rollout, self._rehearsal = rollout, rehearsal
        self._decoder = Decoder(rehearsal.tokens_per_second, rehearsal.sample_tokens_per_second)
        self._pool = _pool()
        self._changes: list[tuple[float, int]] = []
        """Position of the decoder at which each version began."""
        self._resume: asyncio.TimerHandle | None = None
        self._tasks: dict[str, set[asyncio.Task[None]]] = {}
        self._aborted: set[str] = set()
        """Requests that `abort` has ended."""
        self._alive = True

    @property
    def tokens(self) -> int:
        return int(self._decoder.tokens)

    @property
    def alive(self) -> bool:
        """True until `stop`."""
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
        """Report a sample of `length` tokens, with those that it has already; None if it is cancelled."""
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
        """Return the tokens of a sample up to `end` that weren't reported."""
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
        )
        limit = sample.request.sampling.max_new_tokens
        if end == sample.length or aborted:
            output.finish_reason = "abort" if end < sample.length else "length" if end == limit else "stop"
            output.text = (self._pool.text * (1 + TEXT_BYTES * end // _POOL))[: TEXT_BYTES * end]
            output.spans_weight_update = bool(newer)
            output.routed_experts = self._experts(len(sample.request.prompt_tokens) + end - 1)
        return output

    def _experts(self, tokens: int) -> Any:
        """Return experts [tokens, layers, top k], if the run wants them."""
        if not self._rollout.return_routed_experts:
            return None
        layers, top_k = self._rehearsal.experts
        return np.resize(np.arange(EXPERTS, dtype=expert_dtype(EXPERTS)), (tokens, layers, top_k))

    async def abort(self, request_id: str) -> None:
        self._aborted.add(request_id)
        for task in self._tasks.get(request_id, ()):
            task.cancel()

    async def pause(self, mode: PauseMode, lease_seconds: float, timeout: float) -> int:
        """See RolloutEngine. Decoding goes on when the lease ends, at the latest."""
        self._end_lease()
        if mode == "abort":
            for request_id in list(self._tasks):
                await self.abort(request_id)
        elif mode == "drain" and (running := set[asyncio.Task[None]]().union(*self._tasks.values())):
            await asyncio.wait(running, timeout=timeout)
        self._decoder.pause(True)
        self._resume = asyncio.get_running_loop().call_later(lease_seconds, self._decoder.pause, False)
        return self._decoder.running

    async def resume(self) -> None:
        self._end_lease()
        self._decoder.pause(False)

    async def join(self, request: rollout_pb2.JoinWeightGroupRequest) -> None:
        """Join no group: nothing is sent."""

    async def receive(self, request: rollout_pb2.ReceiveWeightsRequest) -> rollout_pb2.ReceiveWeightsResponse:
        """Take up a version after the time that a broadcast takes."""
        if request.HasField("pause"):
            mode = PAUSE_MODES[request.pause.mode]
            await self.pause(mode, request.pause.lease_seconds, request.pause_timeout_seconds)
        await asyncio.sleep(self._rehearsal.sync_seconds)
        self.weights = Version(request.weights.term, request.weights.version)
        self._changes.append((self._decoder.position, self.weights.version))
        if request.resume:
            await self.resume()
        checksums = CHECKSUM if request.checksum else {}
        return rollout_pb2.ReceiveWeightsResponse(seconds=self._rehearsal.sync_seconds, checksums=checksums)

    async def leave(self, group_name: str, *, quarantine: bool) -> bool:
        return False

    async def stop(self) -> None:
        """End all samples."""
        self._alive = False
        self._end_lease()
        for tasks in list(self._tasks.values()):
            for task in tasks:
                task.cancel()

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
