"""Requests to an external SGLang server."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from relaxd.rpc.errors import InvalidArgument, RpcError
from services.rollout.engines.model_folder import ModelFolder
from services.rollout.engines.request_types import Output, Request, RequestFailed, Version
from services.rollout.engines.sglang_external.external_samples import (
    EVENT_TOKENS,
    ONLY_AT_END,
    EventStyle,
    ExternalSample,
    label,
)
from services.rollout.engines.sglang_external.server_client import ServerGone, ServerInfo, SGLangClient

ABORT_SECONDS = 10.0
SHARED_PROMPT_TOKENS = 64
"""Minimum length of a prompt that is prefilled before its samples are sent, because SGLang would prefill it for
each."""

logger = logging.getLogger(__name__)


class _RunningRequest:
    """A request and its samples."""

    def __init__(self, request: Request) -> None:
        identity = uuid.uuid4().hex
        # Of equal length, because the server's abort matches prefixes.
        self.sample_ids = [f"{identity}-{index:04d}" for index in request.samples]
        self.request = request
        self.samples: list[ExternalSample] = []
        """Samples of the request; empty before it is sent."""
        self.outputs: asyncio.Queue[Output | Exception] = asyncio.Queue()
        self.reading: asyncio.Task[None] | None = None

    @property
    def open_ids(self) -> list[str]:
        """Ids of the samples that were sent and have not ended."""
        return [name for name, sample in zip(self.sample_ids, self.samples, strict=False) if not sample.ended]


class ExternalRequests:
    """The requests to one server."""

    def __init__(
        self,
        client: SGLangClient,
        facts: ServerInfo,
        model: ModelFolder,
        wait_open: Callable[[], Awaitable[Version]],
        on_gone: Callable[[str], None],
    ) -> None:
        """`wait_open` waits until requests may be sent and returns the served weights; `on_gone` is called with the
        reason when the server is lost."""
        self.tokens = 0
        """Tokens generated so far."""
        self.idle = asyncio.Event()
        """Set while the server has no request of this engine."""
        self.idle.set()
        self._client = client
        self._facts = facts
        self._model = model
        self._wait_open = wait_open
        self._on_gone = on_gone
        self._requests: dict[str, _RunningRequest] = {}
        self._sent = 0
        self._gone = False
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def running_ids(self) -> list[str]:
        """Ids of all samples that the server works on."""
        return [sample_id for request in self._requests.values() for sample_id in request.open_ids]

    @property
    def waiting_samples(self) -> int:
        """Number of samples that wait for the end of a pause."""
        return sum(len(request.sample_ids) for request in self._requests.values() if not request.samples)

    async def generate(self, request: Request) -> AsyncIterator[Output]:
        sampling = request.sampling
        if (sampling.stop or sampling.min_new_tokens) and not self._facts.tokenizer:
            raise InvalidArgument(
                "sampling.stop and sampling.min_new_tokens need a tokenizer, which the server was started without "
                "(--skip-tokenizer-init)"
            )
        running = _RunningRequest(request)
        self._requests[request.request_id] = running
        running.reading = asyncio.create_task(self._read(running), name="read a request")
        running.reading.add_done_callback(lambda task: self._finish_reading(running, task))
        ended = 0
        try:
            while ended < len(request.samples):
                output = await running.outputs.get()
                if isinstance(output, Exception):
                    raise output
                ended += output.finish_reason is not None
                yield output
        finally:
            running.reading.cancel()
            self._requests.pop(request.request_id, None)
            self._abort_later(running.open_ids)

    def end_all(self) -> None:
        """End every request with its tokens so far."""
        for request_id in self._requests:
            self.end(request_id)

    def end(self, request_id: str) -> None:
        """End a request with its tokens so far."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if request.reading is not None:
            request.reading.cancel()
        self._abort_later(request.open_ids)
        if not request.samples:
            request.samples = self._samples(request, Version(0, 0))
        for sample in request.samples:
            if not sample.ended:
                sample.end("abort")
                request.outputs.put_nowait(sample.undelivered())

    def fail_all(self, reason: str) -> None:
        """Fail every request with ServerGone, and send nothing more."""
        self._gone = True
        for request in self._requests.values():
            request.outputs.put_nowait(ServerGone(reason))

    async def abort(self, sample_ids: Sequence[str]) -> None:
        """Have the server abort samples."""
        calls = (self._client.call("/abort_request", {"rid": name}, timeout=ABORT_SECONDS) for name in sample_ids)
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, RpcError):
                logger.warning("a request could not be aborted and runs to its end: %s", result)

    async def close(self) -> None:
        """Cancel all tasks."""
        readers = [request.reading for request in self._requests.values() if request.reading is not None]
        tasks = [*readers, *self._aborts]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, request: _RunningRequest) -> None:
        asked = request.request
        weights, prompt, n = await self._wait_open(), asked.prompt_tokens, len(asked.samples)
        while n > 1 and len(prompt) >= SHARED_PROMPT_TOKENS and self._facts.prefix_cache:
            await self._prefill(prompt, weights)
            before, weights = weights, await self._wait_open()
            if weights == before:
                break
        request.samples = self._samples(request, weights)
        body = {
            "input_ids": [(*prompt, *asked.tokens_of(index)) for index in asked.samples],
            "rid": request.sample_ids,
            "extra_key": label(weights),  # keeps versions apart in the prefix cache
            "sampling_params": [self._sampling(asked, index) for index in asked.samples],
            "return_logprob": True,
            "stream": True,
        }
        with self._sending():
            async for event in self._client.stream("/generate", body):
                sample = request.samples[event["index"]]
                if sample.ended:
                    continue
                count = sample.tokens
                sample.take(event)
                self.tokens += sample.tokens - count
                if sample.ended_here:
                    self._abort_later([request.sample_ids[event["index"]]])
                if sample.ended or (asked.stream and sample.undelivered_tokens >= asked.report_every):
                    request.outputs.put_nowait(sample.undelivered())
                if all(sample.ended for sample in request.samples):
                    return
        missing = [f"{sample.tokens} tokens of sample {sample.index}" for sample in request.samples if not sample.ended]
        raise RequestFailed(
            f"{self._client.url} ended its answer to /generate before all samples had ended: "
            f"it has sent {', '.join(missing)} without a finish_reason"
        )

    async def _prefill(self, prompt: tuple[int, ...], weights: Version) -> None:
        """Have the server compute a prompt for its prefix cache."""
        body = {
            "input_ids": prompt,
            "extra_key": label(weights),
            "sampling_params": {"max_new_tokens": 0},
            "stream": True,
        }
        with self._sending():
            async for _ in self._client.stream("/generate", body):
                pass

    @contextmanager
    def _sending(self) -> Iterator[None]:
        self._sent += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._sent -= 1
            if not self._sent:
                self.idle.set()

    def _finish_reading(self, request: _RunningRequest, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if isinstance(error, ServerGone):
            request.outputs.put_nowait(error)
            self._on_gone(str(error))
        else:
            if not isinstance(error, RpcError):
                logger.error("a request failed", exc_info=error)
            request.outputs.put_nowait(RequestFailed(str(error) or type(error).__name__))

    def _abort_later(self, sample_ids: Sequence[str]) -> None:
        if sample_ids and not self._gone:
            task = asyncio.create_task(self.abort(sample_ids), name="abort a request")
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    def _samples(self, request: _RunningRequest, weights: Version) -> list[ExternalSample]:
        asked = request.request
        style = EventStyle(self._facts.incremental, self._interval(asked), self._facts.late_tokens)
        return [
            ExternalSample(index, style, weights, self._decode, asked.tokens_of(index), asked.sampling)
            for index in asked.samples
        ]

    def _sampling(self, request: Request, index: int) -> dict[str, Any]:
        sampling, begun = request.sampling, len(request.tokens_of(index))
        stop_ids = () if sampling.ignore_eos else sampling.stop_token_ids or self._model.end_ids
        return {
            "max_new_tokens": sampling.max_new_tokens - begun,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "stop_token_ids": stop_ids,
            "ignore_eos": sampling.ignore_eos,
            "stop": list(sampling.stop),
            "min_new_tokens": max(0, sampling.min_new_tokens - begun),
            "sampling_seed": (sampling.seed + index) & 0x7FFFFFFF,
            "stream_interval": self._interval(request),
        }

    def _interval(self, request: Request) -> int:
        """Return the tokens per event."""
        if request.stream:
            return min(request.report_every, EVENT_TOKENS)
        return EVENT_TOKENS if self._facts.incremental else ONLY_AT_END

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._model.tokenizer.decode(list(tokens), skip_special_tokens=False))
