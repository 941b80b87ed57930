"""Requests to an external SGLang server."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from relaxd.process.child import ChildError, ChildRequestError
from services.rollout.engines.base import Output, RequestFailed, Sampling, Version
from services.rollout.engines.model_folder import ModelFolder
from services.rollout.engines.sglang_server.http import ServerGone, SGLangClient
from services.rollout.engines.sglang_server.samples import EVENT_TOKENS, ONLY_AT_END, EventStyle, ExternalSample, label
from services.rollout.engines.sglang_server.server import ServerFacts

ABORT_SECONDS = 10.0
SHARED_PROMPT_TOKENS = 64
"""A prompt of so many tokens is computed first and then shared by its samples; SGLang would compute it for each."""

logger = logging.getLogger(__name__)


class _Request:
    """n samples under way."""

    def __init__(self, n: int, *, stream: bool) -> None:
        identity = uuid.uuid4().hex
        # Of equal length: the server's abort takes what it is given for a prefix.
        self.sample_ids = [f"{identity}-{index:04d}" for index in range(n)]
        self.stream = stream
        self.samples: list[ExternalSample] = []
        """Empty until it is sent."""
        self.outputs: asyncio.Queue[Output | Exception] = asyncio.Queue()
        self.reading: asyncio.Task[None] | None = None

    @property
    def open_ids(self) -> list[str]:
        """Of the samples that have been sent and not ended."""
        return [name for name, sample in zip(self.sample_ids, self.samples, strict=False) if not sample.ended]


class ExternalRequests:
    """What one server is asked to generate."""

    def __init__(
        self,
        client: SGLangClient,
        facts: ServerFacts,
        model: ModelFolder,
        wait_open: Callable[[], Awaitable[Version]],
        on_gone: Callable[[str], None],
    ) -> None:
        """`wait_open` returns the weights that are served as soon as requests may be sent; `on_gone` is called when
        the server is found gone."""
        self.tokens = 0
        """Generated so far."""
        self.idle = asyncio.Event()
        """Whether the server works on nothing of ours."""
        self.idle.set()
        self._client = client
        self._facts = facts
        self._model = model
        self._wait_open = wait_open
        self._on_gone = on_gone
        self._requests: dict[str, _Request] = {}
        self._sent = 0
        self._gone = False
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def running_ids(self) -> list[str]:
        """Of all samples that the server works on."""
        return [sample_id for request in self._requests.values() for sample_id in request.open_ids]

    @property
    def waiting_samples(self) -> int:
        """How many wait for the end of a pause."""
        return sum(len(request.sample_ids) for request in self._requests.values() if not request.samples)

    async def generate(
        self, prompt: tuple[int, ...], n: int, sampling: Sampling, *, stream: bool
    ) -> AsyncIterator[Output]:
        """See ExternalEngine.generate."""
        request = _Request(n, stream=stream)
        self._requests[request.sample_ids[0]] = request
        request.reading = asyncio.create_task(self._read(request, prompt, sampling), name="read a request")
        request.reading.add_done_callback(lambda task: self._finish_reading(request, task))
        ended = 0
        try:
            while ended < n:
                output = await request.outputs.get()
                if isinstance(output, Exception):
                    raise output
                ended += output.finish_reason is not None
                yield output
        finally:
            request.reading.cancel()
            self._requests.pop(request.sample_ids[0], None)
            self._abort_later(request.open_ids)

    def end_all(self) -> None:
        """End every request, with what it has."""
        for request in self._requests.values():
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
        """The server is gone, or let go."""
        self._gone = True
        for request in self._requests.values():
            request.outputs.put_nowait(ServerGone(reason))

    async def abort(self, sample_ids: Sequence[str]) -> None:
        """Have the server give samples up."""
        calls = (self._client.call("/abort_request", {"rid": name}, timeout=ABORT_SECONDS) for name in sample_ids)
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, ChildError):
                logger.warning("a request could not be aborted, it runs to its end: %s", result)

    async def close(self) -> None:
        """Leave nothing running here."""
        readers = [request.reading for request in self._requests.values() if request.reading is not None]
        tasks = [*readers, *self._aborts]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, request: _Request, prompt: tuple[int, ...], sampling: Sampling) -> None:
        weights = await self._wait_open()
        n = len(request.sample_ids)
        while n > 1 and len(prompt) >= SHARED_PROMPT_TOKENS and self._facts.prefix_cache:
            await self._compute_prompt(prompt, weights)
            before, weights = weights, await self._wait_open()
            if weights == before:
                break
        request.samples = self._samples(request, weights)
        body = {
            "input_ids": [prompt] * n,
            "rid": request.sample_ids,
            "extra_key": label(weights),  # the prefix cache never mixes versions
            "sampling_params": [self._sampling(sampling, index, request.stream) for index in range(n)],
            "return_logprob": True,
            "stream": True,
        }
        with self._sending():
            async for event in self._client.stream("/generate", body):
                sample = request.samples[event["index"]]
                told = sample.tokens
                sample.take(event)
                self.tokens += sample.tokens - told
                if request.stream or sample.ended:
                    request.outputs.put_nowait(sample.undelivered())
                if all(sample.ended for sample in request.samples):
                    return

    async def _compute_prompt(self, prompt: tuple[int, ...], weights: Version) -> None:
        """Have the server put a prompt into its prefix cache."""
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

    def _finish_reading(self, request: _Request, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if isinstance(error, ServerGone):
            request.outputs.put_nowait(error)
            self._on_gone(str(error))
        else:
            if not isinstance(error, RequestFailed | ChildRequestError):
                logger.error("a request failed", exc_info=error)
            request.outputs.put_nowait(RequestFailed(str(error) or type(error).__name__))

    def _abort_later(self, sample_ids: Sequence[str]) -> None:
        if sample_ids and not self._gone:
            task = asyncio.create_task(self.abort(sample_ids), name="abort a request")
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    def _samples(self, request: _Request, weights: Version) -> list[ExternalSample]:
        style = EventStyle(self._facts.incremental, self._interval(request.stream), self._facts.late_tokens)
        return [ExternalSample(index, style, weights, self._decode) for index in range(len(request.sample_ids))]

    def _sampling(self, sampling: Sampling, index: int, stream: bool) -> dict[str, Any]:
        stop_ids = () if sampling.ignore_eos else sampling.stop_token_ids or self._model.end_ids
        return {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "stop_token_ids": stop_ids,
            "ignore_eos": sampling.ignore_eos,
            "sampling_seed": (sampling.seed + index) & 0x7FFFFFFF,
            "stream_interval": self._interval(stream),
        }

    def _interval(self, stream: bool) -> int:
        if stream:
            return 1
        return EVENT_TOKENS if self._facts.incremental else ONLY_AT_END

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._model.tokenizer.decode(list(tokens), skip_special_tokens=False))
