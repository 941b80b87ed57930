"""An SGLang server that somebody else runs, in the place of an engine of one's own.

It has the methods of `services.rollout.service.engine.Engine`, and speaks SGLang 0.5.15's native API over HTTP.
What the server itself cannot do is done here: the lease of a pause, ending requests at once, the version of each token,
deadlines.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from typing import Any

from relaxd.config import RolloutConfig
from relaxd.process.child import ChildError, ChildRequestError, ChildTimeout
from services.rollout.engines.base import MemoryPart, Output, PauseMode, RequestFailed, Sampling, Version
from services.rollout.engines.model_folder import ModelFolder, read_model_folder
from services.rollout.engines.sglang_server.http import ServerGone, SGLangClient
from services.rollout.engines.sglang_server.requests import ExternalRequests
from services.rollout.engines.sglang_server.samples import label
from services.rollout.engines.sglang_server.server import KEEP_MEMORY, ServerFacts, connect
from services.rollout.engines.sglang_server.weights import ExternalWeights

CONTROL_SECONDS = 10.0
"""For calls that only change a flag."""
STOP_SECONDS = 5.0
PROBE_SECONDS = 2.0
SCHEDULER_SECONDS = 60.0
"""A server whose scheduler doesn't answer for so long, outside of an update, is taken for dead."""
STATS_SECONDS = 1.0

logger = logging.getLogger(__name__)


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
        self._on_exit = on_exit
        self._on_tokens = on_tokens
        self._ended: str | None = None
        self._open = asyncio.Event()
        """Whether requests may be sent: not during a pause, so that they carry the label of the weights they get."""
        self._open.set()
        self._lease: asyncio.Task[None] | None = None
        self._requests = ExternalRequests(client, facts, model, self._wait_open, self._end)
        self._updates = ExternalWeights(client)
        self._updating = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Task[None] | None = None
        self.vocabulary = model.vocabulary
        """Token ids are below this."""
        self.context = facts.context or model.context
        """Most tokens of prompt and answer together; 0 when nobody says."""
        self.device = facts.device
        """Where the model is: "cpu" or "cuda"."""
        self.weights: Version | None = None
        """What it serves; None until the first commit."""
        self.asleep: frozenset[MemoryPart] = frozenset()
        """None: somebody else's server has memory of its own."""
        self.quarantined = False
        """Whether a broken update left the model between two versions."""
        self.gauges: dict[str, float] = {}
        """tokens_per_second, running_samples and waiting_samples."""

    @property
    def tokens(self) -> int:
        """Generated since it was connected."""
        return self._requests.tokens

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
        async with aclosing(self._requests.generate(prompt_tokens, n, sampling, stream=stream)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                yield output

    async def pause(self, mode: PauseMode, lease_seconds: float, timeout: float) -> int:
        """Pause generation; returns the number of samples held in place.

        in_place and retract are the server's. For abort the server rests in place while requests end here at once,
        with what was reported of them; for drain no request is sent until those under way have ended.
        """
        if self._updating:
            raise ChildRequestError("EngineError", "weights are being received: the engine is paused already", {})
        deadline = time.monotonic() + timeout
        self._open.clear()
        self._replace_lease(None)
        try:
            if mode == "drain":
                async with asyncio.timeout(timeout):
                    await self._requests.idle.wait()
            left = max(deadline - time.monotonic(), 0.1)
            body = {"mode": "retract" if mode == "retract" else "in_place"}
            with self._noticing_death():
                await self._client.call("/pause_generation", body, timeout=left)
        except BaseException as error:
            self._replace_lease(self._go_on())  # the server may still come to pause
            if isinstance(error, TimeoutError):
                raise ChildRequestError(
                    "EngineError", f"the running requests did not end within {timeout:g} s (mode drain)", {}
                ) from error
            raise
        self._replace_lease(self._end_lease(lease_seconds))
        if mode == "abort":
            self._requests.end_all()
        return len(self._requests.running_ids)

    async def resume(self) -> None:
        """End the pause. Raises ChildRequestError during an update; a quarantined server stays paused."""
        if self._updating:
            raise ChildRequestError("EngineError", "weights are being received: the pause cannot end now", {})
        self._replace_lease(None)
        try:
            with self._noticing_death():
                await self._continue()
        except BaseException:
            self._replace_lease(self._go_on())
            raise

    async def join(self, group: Mapping[str, Any], timeout: float) -> None:
        """Connect with a weight group: name, transport, store_host, store_port, rank, world_size, manifest (base64)."""
        with self._noticing_death():
            await self._updates.join(group, timeout)

    async def receive(self, group_name: str, weights: Version, timeout: float, *, checksum: bool) -> dict[str, Any]:
        """Receive and commit one version; returns seconds, and no checksums: a stock server has none to give.

        Raises ChildRequestError of kind WeightGroupError when it breaks: the model may be of two versions then.
        """
        if self._open.is_set():
            raise ChildRequestError("EngineError", "the engine is not paused, or the lease of its pause has ended", {})
        if self._updating:
            raise ChildRequestError("EngineError", "another update is under way", {})
        started = time.monotonic()
        self._updating = True
        try:
            with self._noticing_death():
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
        if self.alive:
            running_ids, paused = self._requests.running_ids, not self._open.is_set()
            self._mark_ended("the engine is stopped")
            with suppress(ChildError, TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await self._requests.abort(running_ids)
                    await self._updates.leave_all()
                    if paused:
                        await self._client.call("/continue_generation", KEEP_MEMORY, timeout=STOP_SECONDS)
            self._closing = asyncio.create_task(self._close(), name="let go of the server")
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def _wait_open(self) -> Version:
        """Wait for the end of a pause; returns the weights that are served."""
        while not self._open.is_set():
            await self._open.wait()
        self._raise_if_gone()
        if self.weights is None:
            raise RequestFailed("the server has no weights yet")
        return self.weights

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
        await self._go_on()

    async def _go_on(self) -> None:
        """End the pause, whatever it takes."""
        while True:
            try:
                return await self._continue()
            except ChildTimeout as error:
                logger.error("the pause could not be ended, trying again: %s", error)
            except ChildError as error:
                return self._end(str(error))

    def _replace_lease(self, work: Coroutine[Any, Any, None] | None) -> None:
        """Forget what would end the pause, and have something else end it."""
        if self._lease is not None:
            self._lease.cancel()
        self._lease = self._start(work, "end a pause") if work is not None else None

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
                if self._updating and isinstance(error, ChildTimeout):
                    continue  # it is busy with that
                return self._end(str(error))
            served = str(info.get("weight_version"))
            if weights is not None and weights == self.weights and not self._updating and served != label(weights):
                return self._end(
                    f"{self._client.url} serves weights {served!r} and not {label(weights)!r}, which it was given: "
                    "it was restarted, or somebody else uses it"
                )

    async def _tell_stats(self) -> None:
        measured, tokens = time.monotonic(), self._requests.tokens
        while True:
            await asyncio.sleep(STATS_SECONDS)
            before, tokens_before = measured, tokens
            measured, tokens = time.monotonic(), self._requests.tokens
            per_second = (tokens - tokens_before) / (measured - before)
            self._on_tokens(tokens - tokens_before, per_second)
            self.gauges = {
                "tokens_per_second": per_second,
                "running_samples": float(len(self._requests.running_ids)),
                "waiting_samples": float(self._requests.waiting_samples),
            }

    def _end(self, reason: str) -> None:
        """The server is gone, or no longer ours."""
        if self._ended is None:
            self._ended = reason
            self._on_exit(reason)
            self._mark_ended(reason)
            self._closing = asyncio.create_task(self._close(), name="let go of the server")

    def _mark_ended(self, reason: str) -> None:
        """Whoever waits for the server is told."""
        self._ended = reason
        self.weights = None
        self.gauges = {}
        self._open.set()
        self._requests.fail_all(reason)

    async def _close(self) -> None:
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._requests.close()
        await self._client.close()

    @contextmanager
    def _noticing_death(self) -> Iterator[None]:
        """Raises ServerGone if the server is gone, or is found gone inside."""
        self._raise_if_gone()
        try:
            yield
        except ServerGone as error:
            self._end(str(error))
            raise

    def _raise_if_gone(self) -> None:
        if self._ended is not None:
            raise ServerGone(self._ended)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
