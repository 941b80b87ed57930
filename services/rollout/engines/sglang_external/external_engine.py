"""Engine that uses an external SGLang server.

It calls SGLang 0.5.15's native API over HTTP, and adds features that the server lacks: leases of pauses, immediate ends
of requests, the version of each token, and deadlines.

During a weight update the server's scheduler takes part in the broadcast and answers no call. No call can abort the
broadcast: the scheduler waits until the timeout of its process group, even after relaxd has left. Over gloo it notices
at once that the trainer has left; over NCCL the server must be restarted if the trainer died during a broadcast.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from relaxd.config import RolloutConfig
from relaxd.process.child import ChildError
from relaxd.rpc.errors import Aborted, DeadlineExceeded, RpcError
from relaxd.rpc.message_parts import words
from relaxd.v1 import rollout_pb2, sample_pb2, weights_pb2
from services.rollout.engines.engine_interface import EngineStart, RolloutEngine
from services.rollout.engines.generation_gate import LEASE_OVER
from services.rollout.engines.model_folder import ModelFolder, read_model_folder
from services.rollout.engines.request_types import (
    PAUSE_MODES,
    BadManifest,
    EngineError,
    Output,
    PauseMode,
    Request,
    RequestFailed,
    Version,
)
from services.rollout.engines.sglang_external.external_requests import ExternalRequests, label
from services.rollout.engines.sglang_external.server_client import (
    KEEP_MEMORY,
    ServerGone,
    ServerInfo,
    ServerRefusal,
    SGLangClient,
    connect,
)

LEAVE_SECONDS = 2.0
"""Deadline of the call that leaves a weight group, in seconds."""
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

Result = TypeVar("Result")


class ExternalWeights:
    """Makes the external server join weight groups, one at a time, and receive weights."""

    def __init__(self, client: SGLangClient) -> None:
        self.touched = False
        """True if the last call of `receive` may have changed the server's model."""
        self._client = client
        self._group: str | None = None
        self._buckets: list[dict[str, Any]] = []
        self._waiting: asyncio.Future[Any] | None = None

    async def join(self, request: rollout_pb2.JoinWeightGroupRequest) -> None:
        """Connect the server to a weight group. Raises BadManifest, Aborted or DeadlineExceeded."""
        buckets, group = stock_buckets(request.manifest), request.group
        await self.leave_all()
        body = {
            "master_address": group.store_host,
            "master_port": group.store_port,
            "rank_offset": request.rank,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": words(weights_pb2.Transport)[group.transport],
        }
        self._group = group.name
        call = self._client.call("/init_weights_update_group", body, timeout=group.timeout_seconds)
        await self._call_in_group(call)
        self._buckets = buckets

    async def receive(self, group_name: str, label: str, timeout: float) -> None:
        """Make the server receive all buckets of a version, and name the new weights `label`.

        Raises EngineError, Aborted or DeadlineExceeded.
        """
        self.touched = False
        if self._group != group_name:
            raise EngineError(f"this engine is not in weight group {group_name}")
        deadline = time.monotonic() + timeout
        for number, bucket in enumerate(self._buckets, 1):
            body = bucket | {
                "group_name": group_name,
                "load_format": "flattened_bucket",
                "flush_cache": False,  # a flush fails while requests are held, which ends the server
            }
            if number == len(self._buckets):
                body["weight_version"] = label
            left = max(deadline - time.monotonic(), 0.01)
            self.touched = True
            try:
                await self._call_in_group(self._client.call("/update_weights_from_distributed", body, timeout=left))
            except DeadlineExceeded as error:
                raise DeadlineExceeded(
                    f"the broadcast in weight group {group_name} did not end within {timeout:g} s: the server still "
                    f"waits for bucket {number} of {len(self._buckets)}"
                ) from error

    async def leave(self, group_name: str) -> None:
        """Cancel the running call for a weight group, and make the server leave the group."""
        if group_name != self._group:
            return
        self._group = None
        if self._waiting is not None:
            self._waiting.cancel()
        try:
            await self._client.call("/destroy_weights_update_group", {"group_name": group_name}, timeout=LEAVE_SECONDS)
        except RpcError as error:
            logger.warning("the server did not leave weight group %s: %s", group_name, error)

    async def leave_all(self) -> None:
        """Leave the current weight group, if any."""
        if self._group is not None:
            await self.leave(self._group)

    async def _call_in_group(self, call: Awaitable[Result]) -> Result:
        """Await a call to the server that `leave` can cancel. Raises Aborted if `leave` did or the server refused."""
        self._waiting = waiting = asyncio.ensure_future(call)
        group = self._group
        try:
            return await waiting
        except asyncio.CancelledError:
            if self._group == group:  # the caller cancelled it, not `leave`
                raise
            raise Aborted(f"weight group {group} was left") from None
        except ServerRefusal as error:
            raise Aborted(str(error)) from error
        finally:
            self._waiting = None
            with suppress(asyncio.CancelledError):
                waiting.cancel()


def stock_buckets(manifest: weights_pb2.WeightManifest) -> list[dict[str, Any]]:
    """Convert a manifest's buckets to bodies of /update_weights_from_distributed.

    Raises BadManifest for buckets that a stock server cannot receive.
    """
    buckets = []
    for bucket in manifest.buckets:
        if bucket.source_rank != 0:
            raise BadManifest(
                f"a bucket comes from rank {bucket.source_rank}: a stock SGLang server takes rank 0's only"
            )
        offset = 0
        body: dict[str, list[Any]] = {"names": [], "dtypes": [], "shapes": []}
        for tensor in bucket.tensors:
            dtype = words(sample_pb2.ElementType).get(tensor.dtype, "unknown")
            item_bytes = _ITEM_BYTES.get(dtype)
            if item_bytes is None or offset % item_bytes:
                where = f"at byte {offset} of its bucket"
                raise BadManifest(f"{tensor.name} is {dtype} {where}: a stock SGLang server takes aligned floats only")
            size = item_bytes
            for length in tensor.shape:
                size *= length
            offset += size
            body["names"].append(tensor.name)
            body["dtypes"].append(dtype)
            body["shapes"].append(list(tensor.shape))
        buckets.append(body)
    if not buckets:
        raise BadManifest("the manifest is empty")
    return buckets


CONTROL_SECONDS = 10.0
"""Deadline of the call that resumes generation, in seconds."""
STOP_SECONDS = 5.0
"""Maximum total time of the calls with which a stopping engine cleans up the server, in seconds."""
PROBE_SECONDS = 2.0
"""Interval between two health probes of the server, in seconds."""
SCHEDULER_SECONDS = 60.0
"""Time without a probe's answer, outside of updates, after which the server's scheduler counts as dead, in seconds."""
STATS_SECONDS = 1.0
"""Interval between reports of the number of generated tokens, in seconds."""

logger = logging.getLogger(__name__)


async def start_engine(start: EngineStart) -> "ExternalEngine":
    """Connect a rollout replica to its server. Raises ChildError."""
    url = start.settings.sglang_url
    if not url:
        raise ChildError(
            'rollout.engine is "sglang_external", but this replica has no server: start it with --sglang-url / '
            "RELAXD_SGLANG_URL"
        )
    start.set_detail(f"waiting for the SGLang server at {url}")
    engine = await ExternalEngine.start(
        url,
        start.settings.sglang_key,
        start.folder,
        start.config.rollout,
        on_exit=lambda reason: start.on_exit(f"{reason}: waiting for it"),
        on_tokens=start.on_tokens,
    )
    logger.info("connected to the SGLang server at %s, waiting for weights", url)
    return engine


class ExternalEngine(RolloutEngine):
    """Engine that uses an external server. It never sleeps."""

    def __init__(
        self,
        client: SGLangClient,
        facts: ServerInfo,
        model: ModelFolder,
        on_exit: Callable[[str], None],
        on_tokens: Callable[[int, float], None],
    ) -> None:
        super().__init__()
        self._client = client
        self._on_exit = on_exit
        self._on_tokens = on_tokens
        self._ended: str | None = None
        self._open = asyncio.Event()
        """Event that is set while requests may be sent: not in a pause, so that requests get their weights' label."""
        self._open.set()
        self._lease: asyncio.Task[None] | None = None
        self._requests = ExternalRequests(client, facts, model, self._wait_open, self._end)
        self._updates = ExternalWeights(client)
        self._updating = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Task[None] | None = None
        self.vocabulary, self.context = model.vocabulary, facts.context or model.context
        self.device = facts.device

    @property
    def tokens(self) -> int:
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
        """Connect to the server at `url`, which must have the model of `folder`, and resume it if it is paused.

        `on_exit` is called with the reason if the server is lost, before running requests fail. `on_tokens` is called
        about every second with the number of tokens since the last call, and tokens per second.

        Raises RpcError if the server refuses or does not fit the run, DataError if the folder is broken.
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
        engine._start(engine._report_stats(), "count tokens")
        return engine

    @property
    def alive(self) -> bool:
        return self._ended is None

    async def _generate(self, request: Request) -> AsyncIterator[Output]:
        self._raise_if_gone()
        async with aclosing(self._requests.generate(request)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                yield output

    async def abort(self, request_id: str) -> None:
        self._requests.end(request_id)

    async def pause(self, mode: PauseMode, lease_seconds: float, timeout: float) -> int:
        """Pause generation. The server itself has only the modes in_place and retract.

        Mode abort pauses the server in place and ends requests here at once, with the tokens reported so far. Mode
        drain sends no more requests and waits until the running ones have ended, then pauses in place.
        """
        if self._updating:
            raise EngineError("weights are being received: the engine is paused already")
        deadline = time.monotonic() + timeout
        self._open.clear()
        self._replace_lease(None)
        try:
            if mode == "drain":
                async with asyncio.timeout(timeout):
                    await self._requests.idle.wait()
            left = max(deadline - time.monotonic(), 0.1)
            body = {"mode": "retract" if mode == "retract" else "in_place"}
            with self._detecting_loss():
                await self._client.call("/pause_generation", body, timeout=left)
        except BaseException as error:
            self._replace_lease(self._resume_with_retries())  # the server may still pause
            if isinstance(error, TimeoutError):
                raise EngineError(f"the running requests did not end within {timeout:g} s (mode drain)") from error
            raise
        self._replace_lease(self._end_lease(lease_seconds))
        if mode == "abort":
            self._requests.end_all()
        return len(self._requests.running_ids)

    async def _continue(self, weights: Version | None) -> None:
        """End the pause; a quarantined server stays paused. Raises EngineError while weights are being received."""
        if self._updating:
            raise EngineError("weights are being received: the pause cannot end now")
        self._replace_lease(None)
        try:
            with self._detecting_loss():
                await self._resume()
        except BaseException:
            self._replace_lease(self._resume_with_retries())
            raise

    async def join(self, request: rollout_pb2.JoinWeightGroupRequest) -> None:
        with self._detecting_loss():
            await self._updates.join(request)

    async def receive(self, request: rollout_pb2.ReceiveWeightsRequest) -> rollout_pb2.ReceiveWeightsResponse:
        """Pause if requested, make the server receive new weights, and resume if requested.

        Returns no checksums, because a stock server has none. Raises Aborted on failure; then the model may be between
        two versions.
        """
        if request.HasField("pause"):
            pause = request.pause
            await self.pause(PAUSE_MODES[pause.mode], pause.lease_seconds, request.pause_timeout_seconds)
        weights = Version.from_proto(request.weights)
        if self._open.is_set():
            raise EngineError("the engine is not paused, or the lease of its pause has ended")
        if self._updating:
            raise EngineError("another update is under way")
        started = time.monotonic()
        self._updating = True
        try:
            with self._detecting_loss():
                await self._updates.receive(request.group_name, label(weights), request.timeout_seconds)
        except BaseException:
            self.quarantined = self.quarantined or self._updates.touched
            raise
        finally:
            self._updating = False
        seconds = time.monotonic() - started
        self.take_up(weights, {}, resume=request.resume)
        if request.resume:
            await self.resume()
        return rollout_pb2.ReceiveWeightsResponse(seconds=seconds)

    async def leave(self, group_name: str) -> bool:
        await self._updates.leave(group_name)
        self.quarantined = self.quarantined or self.unconfirmed
        return self.quarantined

    async def stop(self) -> None:
        """Abort this engine's requests and end its pause. The server continues to run."""
        if self.alive:
            running_ids, paused = self._requests.running_ids, not self._open.is_set()
            self._mark_ended("the engine is stopped")
            with suppress(RpcError, TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await self._requests.abort(running_ids)
                    await self._updates.leave_all()
                    if paused:
                        await self._client.call("/continue_generation", KEEP_MEMORY, timeout=STOP_SECONDS)
            self._closing = asyncio.create_task(self._close(), name="leave the server")
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def _wait_open(self) -> Version:
        """Wait until generation is not paused. Returns the version that the server serves."""
        while not self._open.is_set():
            await self._open.wait()  # idle: until the pause is over
        self._raise_if_gone()
        if self.weights is None:
            raise RequestFailed("the server has no weights yet")
        return self.weights

    async def _resume(self) -> None:
        if self.quarantined or self.unconfirmed:
            logger.warning("the server stays paused: nobody knows its weights, or may serve them")
            return
        await self._client.call("/continue_generation", KEEP_MEMORY, timeout=CONTROL_SECONDS)
        self._open.set()

    async def _end_lease(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        while self._updating:  # an update has its own deadline
            await asyncio.sleep(0.1)  # brief: see the deadline
        logger.warning("%s", LEASE_OVER[self.unconfirmed])
        self.quarantined = self.quarantined or self.unconfirmed
        await self._resume_with_retries()

    async def _resume_with_retries(self) -> None:
        """End the server's pause; retry until the server answers or is lost."""
        while True:
            try:
                return await self._resume()
            except DeadlineExceeded as error:
                logger.error("the pause could not be ended, retrying: %s", error)
            except RpcError as error:
                return self._end(str(error))

    def _replace_lease(self, work: Coroutine[Any, Any, None] | None) -> None:
        """Cancel the task that ends the pause later, and start `work` instead."""
        if self._lease is not None:
            self._lease.cancel()
        self._lease = self._start(work, "end a pause") if work is not None else None

    async def _probe(self) -> None:
        """Probe the server regularly; end the engine if the server doesn't answer or serves unknown weights."""
        while True:
            await asyncio.sleep(PROBE_SECONDS)  # idle: looks again
            if self._updating:
                continue
            weights = self.weights
            try:
                info = await self._client.call("/server_info", timeout=SCHEDULER_SECONDS)
            except RpcError as error:
                if self._updating and isinstance(error, DeadlineExceeded):
                    continue  # its scheduler is busy with the update
                return self._end(str(error))
            served = str(info.get("weight_version"))
            if weights is not None and weights == self.weights and not self._updating and served != label(weights):
                return self._end(
                    f"{self._client.url} serves weights {served!r} instead of {label(weights)!r}: it was restarted, or "
                    "somebody else uses it"
                )

    async def _report_stats(self) -> None:
        measured, tokens = time.monotonic(), self._requests.tokens
        while True:
            await asyncio.sleep(STATS_SECONDS)  # idle: looks again
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
        """Stop using the server, because it is lost or shared with others."""
        if self._ended is None:
            self._ended = reason
            self._on_exit(reason)
            self._mark_ended(reason)
            self._closing = asyncio.create_task(self._close(), name="leave the server")

    def _mark_ended(self, reason: str) -> None:
        """Record why the engine ended, and fail all requests and all waits for a pause's end."""
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
    def _detecting_loss(self) -> Iterator[None]:
        """Raise ServerGone if the server is lost; end the engine if ServerGone is raised inside the block."""
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
