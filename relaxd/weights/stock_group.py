"""The trainer's place in a weight group whose other members are stock SGLang servers.

They meet by `init_custom_process_group` (sglang/srt/utils), which is torch's `init_process_group` for a further group.
What is written here is where torch then looks for the others in the store. Such members know nothing of this project's
meeting and parting: that one is not there or has died shows only when a deadline has passed.
"""

import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist

from relaxd.weights.gloo import GlooConnection
from relaxd.weights.group import Broadcaster, WeightGroup, WeightGroupError, address_towards
from relaxd.weights.nccl import Broadcast, NcclConnection, UniqueId


class StockWeightGroup(WeightGroup):
    """Rank 0 of a group with stock SGLang servers; it is the only one that sends, one flat tensor at a time.

    Over gloo `connect` returns when all are there. Over nccl a server connects only within its first broadcast: then
    `connect` returns at once, and the first broadcast takes longer.
    """

    def _meet(self, store: dist.PrefixStore, deadline: float, timeout: float) -> None:
        if self.rank != 0:
            raise WeightGroupError(
                f"weight group {self.name}: stock SGLang servers receive from rank 0 only, this is rank {self.rank}"
            )

    def _build(self, store: dist.PrefixStore, timeout: float) -> Broadcaster:
        device_type = "cuda" if self.transport == "nccl" else "cpu"
        # The first prefix is init_custom_process_group's, the others are those of torch's _new_process_group_helper.
        theirs = dist.PrefixStore(self.name, store.underlying_store)
        theirs = dist.PrefixStore(f"{device_type}/", dist.PrefixStore(f"{self.name}/", theirs))
        if self.transport == "gloo":
            return GlooConnection(theirs, 0, self.world_size, address_towards(*self._store_address), timeout)
        if self._device is None:
            raise WeightGroupError(f"weight group {self.name}: nccl needs a GPU, none was given")
        return _LateNcclConnection(theirs, self.world_size, self._device, self.aborted)


class _LateNcclConnection:
    """Connects with the first broadcast, as torch's own process groups do."""

    def __init__(self, store: dist.Store, world_size: int, device: torch.device, cancelled: threading.Event) -> None:
        self._place = (store, world_size, device)
        self._cancelled = cancelled
        self._connection: NcclConnection | None = None

    def start(self, tensors: Sequence[torch.Tensor], source_rank: int, timeout: float) -> Broadcast:
        if self._connection is None:
            store, world_size, device = self._place
            self._connection = _StockNcclConnection(store, 0, world_size, device, timeout, self._cancelled)
        return self._connection.start(tensors, source_rank, timeout)

    def abort(self) -> None:
        if self._connection is not None:  # else `cancelled` ends the attempt to connect
            self._connection.abort()


class _StockNcclConnection(NcclConnection):
    """Meets torch's ProcessGroupNCCL."""

    def _share_id(self, store: dist.Store, rank: int, deadline: float) -> UniqueId:
        unique_id = self._new_id()
        # Raw, under the number of the communicator: the group's first. (The stub knows of text only.)
        store.set("0", bytes(unique_id))  # type: ignore[arg-type]
        return unique_id

    def _warm_up(self, deadline: float) -> None:
        """Nobody would answer: the servers broadcast only what they are told."""
