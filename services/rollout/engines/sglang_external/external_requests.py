"""Requests to an external SGLang server. Converts its stream events to Outputs, with each token's weight version."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from relaxd.rpc.errors import InvalidArgument, RpcError
from services.rollout.engines.model_folder import ModelFolder
from services.rollout.engines.request_types import (
    FinishReason,
    Output,
    Request,
    RequestFailed,
    Sampling,
    Version,
    cut_at_stop,
    end_across,
)
from services.rollout.engines.sglang_external.server_client import ServerGone, ServerInfo, SGLangClient

EVENT_TOKENS = 32
"""Maximum number of tokens per event in a server's stream. Smaller events would slow the server down; larger ones would
leave the version of more tokens uncertain at an update (see ExternalSample)."""
ONLY_AT_END = 1 << 30
"""Number of tokens per event in a request that doesn't stream: more than any sample has, so that a sample's only event
comes at its end."""


@dataclass(frozen=True)
class EventStyle:
    """Format of the events in which a server streams samples."""

    incremental: bool
    """True if an event contains only new tokens; False if it contains all tokens of the sample so far."""
    interval: int
    """Number of tokens per event. The first token always has a separate event."""
    late: int
    """Number of tokens per sample that the server may report under newer weights than produced them: 1 if its scheduler
    runs a batch while it reports the previous one, else 0."""


def label(weights: Version) -> str:
    """Return the label "term:version" under which the server serves these weights."""
    return f"{weights.term}:{weights.version}"


def parse_label(text: object) -> Version | None:
    """Return the weight version that a server's label names; None if relaxd did not set the label."""
    term, colon, version = str(text).partition(":")
    return Version(int(term), int(version)) if colon and term.isdigit() and version.isdigit() else None


class ExternalSample:
    """One sample of a request, with the tokens reported so far.

    Every event has the label of the weights that the server serves then. If the label has changed, either version may
    have produced the tokens since the last event. These get the older version, so that none counts as fresher than it
    is. If a request has an event for each token, at most `late` tokens are uncertain.
    """

    def __init__(
        self,
        index: int,
        style: EventStyle,
        weights: Version,
        decode: Callable[[Sequence[int]], str],
        begun: Sequence[int] = (),
        sampling: Sampling | None = None,
    ) -> None:
        """`weights`: version served when the request was sent; `begun`: the sample's tokens from before the request.

        `sampling`: contains the stop strings, to find those that begin in `begun`.
        """
        self.ended = False
        self.ended_here = False
        """True if relaxd ended the sample at a stop string that the server didn't notice."""
        self._begun = len(begun)
        self._sampling = sampling
        self._tokens: list[int] = list(begun)
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._output = Output(index, self._tokens, self._logprobs, self._versions)
        self._style = style
        self._decode = decode
        self._weights = weights
        self._older = weights
        self._uncertain_until = 0
        self._delivered = 0
        """Number of new tokens that `undelivered` has returned so far."""

    @property
    def index(self) -> int:
        """Index of the sample in its request."""
        return self._output.sample

    @property
    def tokens(self) -> int:
        """Number of new tokens that the server has reported."""
        return len(self._logprobs)

    @property
    def undelivered_tokens(self) -> int:
        """Number of new tokens that `undelivered` has not returned yet."""
        return len(self._logprobs) - self._delivered

    def take(self, event: dict[str, Any]) -> None:
        """Add the tokens of a server's event.

        Raises ServerGone if the event is invalid or names weights that relaxd did not give the server, RequestFailed if
        the server failed the sample.
        """
        count, output, meta = len(self._logprobs), self._output, event["meta_info"]
        tokens: list[int] = event["output_ids"]
        logprobs: list[list[Any]] = meta.get("output_token_logprobs", [])
        if not self._style.incremental:
            tokens, logprobs = tokens[count:], logprobs[count:]
        if len(tokens) != len(logprobs):
            raise ServerGone(f"the server reports {len(tokens)} tokens and {len(logprobs)} log-probs")
        weights = parse_label(meta["weight_version"])
        if weights is None:
            raise ServerGone(f"the server serves weights {meta['weight_version']!r}, which relaxd did not give it")
        if weights != self._weights:
            self._older, self._weights = self._weights, weights
            self._uncertain_until = count + self._style.late + (self._style.interval - 1 if count else 0)
            output.spans_weight_update = True
        for place, (token, entry) in enumerate(zip(tokens, logprobs, strict=True), count):
            self._tokens.append(token)
            self._logprobs.append(entry[0])
            self._versions.append((self._older if place < self._uncertain_until else weights).version)
        if self._ends_across(self._begun + count):
            return
        finish = meta["finish_reason"]
        if finish is not None:
            if finish["type"] == "abort" and finish.get("status_code"):
                raise RequestFailed(f"the server failed a sample: {finish.get('message')}")
            self.end(cast(FinishReason, finish["type"]), finish.get("matched"))

    def _ends_across(self, checked: int) -> bool:
        """End the sample at a stop string that begins in tokens from before the request. Returns True if one is found.

        `checked`: number of tokens searched before.
        """
        sampling = self._sampling
        if sampling is None:
            return False
        stop, least = sampling.stop, sampling.min_new_tokens
        found = end_across(self._tokens, self._begun, checked, stop, least, self._decode)
        if found is None:
            return False
        length, matched = found
        new = length - self._begun
        del self._tokens[length:], self._logprobs[new:], self._versions[new:]
        self.ended_here = True
        self.end("stop", matched)
        return True

    def end(self, reason: FinishReason, matched: int | str | None = None) -> None:
        """Set the sample's finish reason and text. `matched`: the end token or stop string that ended the sample."""
        output = self._output
        output.finish_reason, self.ended = reason, True
        if isinstance(matched, str):
            output.text = cut_at_stop(self._decode(output.tokens), [matched])
        else:
            output.text = self._decode(output.tokens[:-1] if reason == "stop" else output.tokens)

    def undelivered(self) -> Output:
        """Return the output since the last call: new tokens, and the text once the sample has ended."""
        start, output = self._delivered, self._output
        self._delivered = len(self._logprobs)
        return Output(
            output.sample,
            output.tokens[self._begun + start :],
            output.logprobs[start:],
            output.versions[start:],
            output.finish_reason,
            output.text if self.ended else "",
            output.spans_weight_update,
        )


ABORT_SECONDS = 10.0
"""Deadline of a call that aborts a sample, in seconds."""
SHARED_PROMPT_TOKENS = 64
"""Minimum length of a prompt that is prefilled before its samples, in tokens. SGLang would prefill it per sample."""

logger = logging.getLogger(__name__)


class _RunningRequest:
    """A generation request with the state of its samples."""

    def __init__(self, request: Request) -> None:
        identity = uuid.uuid4().hex
        # Ids have equal lengths because the server's abort matches prefixes.
        self.sample_ids = [f"{identity}-{index:04d}" for index in request.samples]
        self.request = request
        self.samples: list[ExternalSample] = []
        """Samples of the request; empty before it is sent."""
        self.outputs: asyncio.Queue[Output | Exception] = asyncio.Queue()
        self.reading: asyncio.Task[None] | None = None

    @property
    def open_ids(self) -> list[str]:
        """Ids of the sent samples that have not ended."""
        return [name for name, sample in zip(self.sample_ids, self.samples, strict=False) if not sample.ended]


class ExternalRequests:
    """Sends generation requests to one external server, and tracks their samples."""

    def __init__(
        self,
        client: SGLangClient,
        facts: ServerInfo,
        model: ModelFolder,
        wait_open: Callable[[], Awaitable[Version]],
        on_gone: Callable[[str], None],
    ) -> None:
        """`wait_open`: function that waits until requests may be sent, and returns the served version.

        `on_gone`: called with the reason if the server is lost.
        """
        self.tokens = 0
        """Number of tokens generated since the engine started, in all requests."""
        self.idle = asyncio.Event()
        """Event that is set while the server has no request of this engine."""
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
        """Ids of all samples that the server is generating."""
        return [sample_id for request in self._requests.values() for sample_id in request.open_ids]

    @property
    def waiting_samples(self) -> int:
        """Number of samples not sent to the server yet: in a pause, or until their prompt is prefilled."""
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
        """End every request now; samples keep their tokens so far."""
        for request_id in self._requests:
            self.end(request_id)

    def end(self, request_id: str) -> None:
        """End a request now; samples keep their tokens so far."""
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
        """Make the server abort samples; failures are only logged."""
        calls = (self._client.call("/abort_request", {"rid": name}, timeout=ABORT_SECONDS) for name in sample_ids)
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, RpcError):
                logger.warning("a request could not be aborted and runs to its end: %s", result)

    async def close(self) -> None:
        """Cancel all tasks that read answers or abort samples."""
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
        """Make the server prefill a prompt into its prefix cache."""
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
        """Return the number of tokens per event to ask for in a request."""
        if request.stream:
            return min(request.report_every, EVENT_TOKENS)
        return EVENT_TOKENS if self._facts.incremental else ONLY_AT_END

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._model.tokenizer.decode(list(tokens), skip_special_tokens=False))
