"""Weight updates of an external SGLang server, through a stock server's calls.

The server's scheduler takes part in the broadcast and answers no call meanwhile. No call can abort the broadcast: the
scheduler waits until the timeout of its process group, even after relaxd has left. Over gloo it notices at once that
the trainer has left; over NCCL the server must be restarted if the trainer died during a broadcast.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, TypeVar

from relaxd.rpc.errors import Aborted, DeadlineExceeded, RpcError
from relaxd.rpc.message_parts import words
from relaxd.v1 import rollout_pb2, sample_pb2, weights_pb2
from services.rollout.engines.request_types import BadManifest, EngineError
from services.rollout.engines.sglang_external.server_client import ServerRefusal, SGLangClient

LEAVE_SECONDS = 2.0
"""Deadline of the call that leaves a weight group, in seconds."""
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

Result = TypeVar("Result")
logger = logging.getLogger(__name__)


class ExternalWeights:
    """Makes the server a member of weight groups, one at a time."""

    def __init__(self, client: SGLangClient) -> None:
        self.touched = False
        """True if the last `receive` may have changed the model."""
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
        """Make the server receive all buckets and label its weights with `label`.

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
        """Cancel a group's running call, and make the server leave the group."""
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
        """Leave the current group, if any."""
        if self._group is not None:
            await self.leave(self._group)

    async def _call_in_group(self, call: Awaitable[Result]) -> Result:
        """Await a call that `leave` can cancel. Raises Aborted if `leave` did or the server refused."""
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
