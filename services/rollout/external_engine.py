"""An SGLang server that somebody else runs, in the place of an engine of one's own.

It has the methods of `services.rollout.engine.Engine`, and speaks HTTP with the server (SGLang 0.5.15's native API).
What the server itself cannot do is done here: the lease of a pause, the abort of requests, the version of each token,
deadlines.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from relaxd.config import RolloutConfig
from relaxd.rpc.child import ChildError, ChildRequestError, ChildTimeout
from services.rollout.engine import Engine, RequestFailed
from services.rollout.engines.base import Output, PauseMode, Sampling, Version
from services.rollout.external_samples import EVENT_TOKENS, ONLY_AT_END, EventStyle, ExternalSample, label
from services.rollout.external_server import KEEP_MEMORY, ServerFacts, connect
from services.rollout.external_weights import ExternalWeights
from services.rollout.model_folder import ModelFolder, read_model_folder
from services.rollout.sglang_http import ServerGone, SGLangClient

CONTROL_SECONDS = 10.0
"""For calls that only change a flag."""
STOP_SECONDS = 5.0
PROBE_SECONDS = 2.0
SCHEDULER_SECONDS = 60.0
"""A server whose scheduler doesn't answer for so long, outside of an update, is taken for dead."""
STATS_SECONDS = 1.0
SHARED_PROMPT_TOKENS = 64
"""A prompt of so many tokens is computed first and then shared by its samples; SGLang would compute it for each."""

logger = logging.getLogger(__name__)


class _Running:
    """A request of n samples under way."""

    def __init__(self, n: int, *, stream: bool) -> None:
        identity = uuid.uuid4().hex
        # Of equal length: the server's abort takes what it is given for a prefix.
        self.sample_ids = [f"{identity}-{index:04d}" for index in range(n)]
        self.stream = stream
        self.samples: list[ExternalSample] = []
        self.outputs: asyncio.Queue[Output | Exception] = asyncio.Queue()
        self.reading: asyncio.Task[None] | None = None

    @property
    def open_ids(self) -> list[str]:
        """Of the samples that have been sent and not ended."""
        return [sample_id for sample_id, sample in zip(self.sample_ids, self.samples, strict=False) if not sample.ended]


class ExternalEngine:
    """A server with a loaded model. Use it from the event loop that started it."""

    def __init__(
        self,
        client: SGLangClient,
        facts: ServerFacts,
        model: ModelFolder,
        on_exit: Callable[[str], None],
        on_tokens: Callable[[int, float], None],
    ) -> None:
        self._client = client
        self._facts = facts
        self._model = model
        self._on_exit = on_exit
        self._on_tokens = on_tokens
        self._running: dict[str, _Running] = {}
        self._sent = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._ended: str | None = None
        self._open = asyncio.Event()
        """Whether requests may be sent: not during a pause, so that they carry the weights' label that holds then."""
        self._open.set()
        self._lease: asyncio.Task[None] | None = None
        self._updates = ExternalWeights(client)
        self._updating = False
        self._tokens = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.vocabulary = model.vocabulary
        """Token ids are below this."""
        self.context = facts.context or model.context
        """Most tokens of prompt and answer together; 0 when nobody says."""
        self.device = facts.device
        """Where the model is: "cpu" or "cuda"."""
        self.weights: Version | None = None
        """What it serves; None until the first commit."""
        self.quarantined = False
        """Whether a broken update left the model between two versions."""
        self.gauges: dict[str, float] = {}
        """tokens_per_second, running_samples and waiting_samples."""

    @classmethod
    async def start(
        cls,
        url: str,
        key: str | None,
        folder: Path,
        config: RolloutConfig,
        *,
        on_exit: Callable[[str], None],
        on_tokens: Callable[[int, float], None],
    ) -> "ExternalEngine":
        """Connect with the server at `url`, which must have the model of `folder`, and continue it if it is paused.

        `on_exit` is called with the reason when the server is found gone, before the requests under way fail;
        `on_tokens` about every second with the tokens that were generated since, and tokens per second.

        Raises ChildError: the server does not come up, or does not fit. Raises DataError: the folder is broken.
        """
        model = await asyncio.to_thread(read_model_folder, folder)
        client = SGLangClient(url, key)
        try:
            facts = await connect(client, model, config)
        except BaseException:
            await client.close()
            raise
        engine = cls(client, facts, model, on_exit, on_tokens)
        engine._start(engine._probe(), "probe the server")
        engine._start(engine._tell_stats(), "count tokens")
        return engine

    @property
    def alive(self) -> bool:
        """Whether the server is there."""
        return self._ended is None

    @property
    def serving(self) -> bool:
        """Whether it generates (or will, when its pause ends)."""
        return self.alive and self.weights is not None and not self.quarantined

    async def generate(
        self, prompt_tokens: tuple[int, ...], n: int, sampling: Sampling, *, stream: bool = False
    ) -> AsyncIterator[Output]:
        """The outputs of n samples until all have ended. Leaving the iteration early cancels the rest.

        Raises RequestFailed, or ServerGone when the server dies.
        """
        self._raise_if_gone()
        running = _Running(n, stream=stream)
        self._running[running.sample_ids[0]] = running
        self._idle.clear()
        running.reading = self._start(self._read(running, prompt_tokens, sampling), "read a request")
        running.reading.add_done_callback(lambda task: self._finish_reading(running, task))
        ended = 0
        try:
            while ended < n:
                output = await running.outputs.get()
                if isinstance(output, Exception):
                    raise output
                ended += output.finish_reason is not None
                yield output
        finally:
            running.reading.cancel()
            self._running.pop(running.sample_ids[0], None)
            if running.open_ids and self.alive:
                self._start(self._abort(running.open_ids), "abort a request")

    async def pause(self, mode: PauseMode, lease_seconds: float, timeout: float) -> int:
        """Pause generation; returns the number of samples held in place.

        in_place and retract are the server's. For abort the server rests in place while requests end here at once,
        with what was reported of them; for drain no request is sent until those under way have ended.
        """
        self._raise_if_gone()
        if self._updating:
            raise ChildRequestError("EngineError", "weights are being received: the engine is paused already", {})
        deadline = time.monotonic() + timeout
        self._open.clear()
        if self._lease is not None:
            self._lease.cancel()
        try:
            if mode == "drain":
                async with asyncio.timeout(timeout):
                    await self._idle.wait()
            left = max(deadline - time.monotonic(), 0.1)
            body = {"mode": "retract" if mode == "retract" else "in_place"}
            await self._client.call("/pause_generation", body, timeout=left)
        except TimeoutError as error:
            self._open.set()
            raise ChildRequestError(
                "EngineError", f"the running requests did not end within {timeout:g} s (mode drain)", {}
            ) from error
        except ChildError:
            self._lease = self._start(self._end_lease(0.0), "take back a pause")  # the server may still get to it
            raise
        self._lease = self._start(self._end_lease(lease_seconds), "lease of a pause")
        if mode == "abort":
            self._abort_all()
        return sum(len(running.open_ids) for running in self._running.values())

    async def resume(self) -> None:
        """End the pause. Raises ChildRequestError during an update; a quarantined server stays paused."""
        if self._updating:
            raise ChildRequestError("EngineError", "weights are being received: the pause cannot end now", {})
        if self._lease is not None:
            self._lease.cancel()
        await self._continue()

    async def join(self, group: Mapping[str, Any], timeout: float) -> None:
        """Connect with a weight group: name, transport, store_host, store_port, rank, world_size, manifest (base64)."""
        self._raise_if_gone()
        await self._updates.join(group, timeout)

    async def receive(self, group_name: str, weights: Version, timeout: float, *, checksum: bool) -> dict[str, Any]:
        """Receive and commit one version; returns seconds, and no checksums: a stock server has none to give.

        Raises ChildRequestError of kind WeightGroupError when it breaks: the model may be of two versions then.
        """
        self._raise_if_gone()
        if self._open.is_set():
            raise ChildRequestError("EngineError", "the engine is not paused, or the lease of its pause has ended", {})
        if self._updating:
            raise ChildRequestError("EngineError", "another update is under way", {})
        started = time.monotonic()
        self._updating = True
        try:
            await self._updates.receive(group_name, label(weights), timeout)
        except BaseException:
            self.quarantined = self.quarantined or self._updates.touched
            raise
        finally:
            self._updating = False
        self.weights, self.quarantined = weights, False
        return {"seconds": time.monotonic() - started, "checksums": {}}

    async def leave(self, group_name: str, *, quarantine: bool) -> bool:
        """Abort and forget a weight group; returns whether the engine is quarantined, which `quarantine` asks for."""
        await self._updates.leave(group_name)
        self.quarantined = self.quarantined or quarantine
        return self.quarantined

    async def stop(self) -> None:
        """Let go of the server, which lives on: its requests of ours are aborted, its pause is ended."""
        self._on_exit = lambda reason: None
        if self.alive:
            open_ids = [sample_id for running in self._running.values() for sample_id in running.open_ids]
            paused = not self._open.is_set()
            self._end("the engine is stopped")
            with suppress(ChildError, TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await self._abort(open_ids)
                    await self._updates.leave_all()
                    if paused:
                        await self._client.call("/continue_generation", KEEP_MEMORY, timeout=STOP_SECONDS)
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    async def _read(self, running: _Running, prompt: tuple[int, ...], sampling: Sampling) -> None:
        weights = await self._wait_open()
        n = len(running.sample_ids)
        while n > 1 and len(prompt) >= SHARED_PROMPT_TOKENS and self._facts.prefix_cache:
            only_prompt = {
                "input_ids": prompt,
                "extra_key": label(weights),
                "sampling_params": {"max_new_tokens": 0},
                "stream": True,
            }
            with self._sending():
                async for _ in self._client.stream("/generate", only_prompt):
                    pass
            before, weights = weights, await self._wait_open()
            if weights == before:
                break
        style = self._style(stream=running.stream)
        running.samples = [ExternalSample(index, style, weights, self._decode) for index in range(n)]
        body = {
            "input_ids": [prompt] * n,
            "rid": running.sample_ids,
            "extra_key": label(weights),  # the prefix cache never mixes versions
            "sampling_params": [self._sampling(sampling, index, style) for index in range(n)],
            "return_logprob": True,
            "stream": True,
        }
        with self._sending():
            async for event in self._client.stream("/generate", body):
                sample = running.samples[event["index"]]
                told = sample.tokens
                sample.take(event)
                self._tokens += sample.tokens - told
                if running.stream or sample.ended:
                    running.outputs.put_nowait(sample.undelivered())
                if all(sample.ended for sample in running.samples):
                    return

    @contextmanager
    def _sending(self) -> Iterator[None]:
        """Around what the server works on: a pause in mode drain waits for its end."""
        self._sent += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._sent -= 1
            if not self._sent:
                self._idle.set()

    def _sampling(self, sampling: Sampling, index: int, style: EventStyle) -> dict[str, Any]:
        stop_ids = () if sampling.ignore_eos else sampling.stop_token_ids or self._model.end_ids
        return {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "stop_token_ids": stop_ids,
            "ignore_eos": sampling.ignore_eos,
            "sampling_seed": (sampling.seed + index) & 0x7FFFFFFF,
            "stream_interval": style.interval,
        }

    def _style(self, *, stream: bool) -> EventStyle:
        unstreamed = EVENT_TOKENS if self._facts.incremental else ONLY_AT_END
        return EventStyle(self._facts.incremental, 1 if stream else unstreamed, self._facts.late_tokens)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._model.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def _finish_reading(self, running: _Running, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if isinstance(error, ServerGone):
            self._end(str(error))
        elif isinstance(error, RequestFailed | ChildRequestError):
            running.outputs.put_nowait(RequestFailed(str(error)))
        else:
            logger.error("a request failed", exc_info=error)
            running.outputs.put_nowait(RequestFailed(f"{type(error).__name__}: {error}"))

    async def _wait_open(self) -> Version:
        """Wait for the end of a pause; returns the weights that are served."""
        while not self._open.is_set():
            await self._open.wait()
        self._raise_if_gone()
        if self.weights is None:
            raise RequestFailed("the server has no weights yet")
        return self.weights

    def _abort_all(self) -> None:
        for running in list(self._running.values()):
            open_ids = running.open_ids
            if running.reading is not None:
                running.reading.cancel()
            if not running.samples:  # it had not been sent
                style, weights = self._style(stream=running.stream), self.weights or Version(0, 0)
                running.samples = [
                    ExternalSample(index, style, weights, self._decode) for index in range(len(running.sample_ids))
                ]
            for sample in running.samples:
                if not sample.ended:
                    sample.end("abort")
                    running.outputs.put_nowait(sample.undelivered())
            self._start(self._abort(open_ids), "abort a request")

    async def _abort(self, sample_ids: list[str]) -> None:
        calls = (self._client.call("/abort_request", {"rid": rid}, timeout=CONTROL_SECONDS) for rid in sample_ids)
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, ChildError):
                logger.warning("a request could not be aborted, it runs to its end: %s", result)

    async def _continue(self) -> None:
        if self.quarantined:
            logger.warning("the server stays paused: its weights are of two versions")
            return
        await self._client.call("/continue_generation", KEEP_MEMORY, timeout=CONTROL_SECONDS)
        self._open.set()

    async def _end_lease(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        while self._updating:  # it has a deadline of its own
            await asyncio.sleep(0.1)
        logger.warning("the lease of the pause has ended: generation goes on without a resume")
        while True:
            try:
                return await self._continue()
            except ChildTimeout as error:
                logger.error("the pause could not be ended, trying again: %s", error)
            except ChildError as error:
                return self._end(str(error))

    async def _probe(self) -> None:
        """Ask the server's scheduler how it is, until it doesn't answer or serves weights that nobody gave it."""
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            if self._updating:
                continue
            weights = self.weights
            try:
                info = await self._client.call("/server_info", timeout=SCHEDULER_SECONDS)
            except ChildError as error:
                return self._end(str(error))
            served = str(info.get("weight_version"))
            if weights is not None and weights == self.weights and not self._updating and served != label(weights):
                return self._end(
                    f"{self._client.url} serves weights {served!r} and not {label(weights)!r}, which it was given: "
                    "it was restarted, or somebody else uses it"
                )

    async def _tell_stats(self) -> None:
        measured, tokens = time.monotonic(), self._tokens
        while True:
            await asyncio.sleep(STATS_SECONDS)
            before, tokens_before = measured, tokens
            measured, tokens = time.monotonic(), self._tokens
            per_second = (tokens - tokens_before) / (measured - before)
            self._on_tokens(tokens - tokens_before, per_second)
            sent = [running for running in self._running.values() if running.samples]
            waiting = [running for running in self._running.values() if not running.samples]
            self.gauges = {
                "tokens_per_second": per_second,
                "running_samples": float(sum(len(running.open_ids) for running in sent)),
                "waiting_samples": float(sum(len(running.sample_ids) for running in waiting)),
            }

    def _end(self, reason: str) -> None:
        """The server is gone (or no longer ours): whoever waits for it is told."""
        if self._ended is not None:
            return
        self._ended = reason
        self.weights = None
        self.gauges = {}
        self._on_exit(reason)
        self._open.set()
        for running in self._running.values():
            running.outputs.put_nowait(ServerGone(reason))

    def _raise_if_gone(self) -> None:
        if self._ended is not None:
            raise ServerGone(self._ended)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


AnyEngine = Engine | ExternalEngine
"""What the service works with; both have the same methods."""
