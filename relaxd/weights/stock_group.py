"""The trainer's side of a weight group with stock SGLang servers.

The servers join through `init_custom_process_group` (sglang/srt/utils), a variant of torch's `init_process_group` for
an additional group. This module uses the store keys that torch then expects. Stock servers don't take part in the
rendezvous and abort of WeightGroup: a missing or dead server is noticed only when a deadline passes.
"""

import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist

from relaxd.process.interfaces import address_towards
from relaxd.weights.gloo import GlooConnection
from relaxd.weights.nccl import NcclBroadcast, NcclConnection, UniqueId
from relaxd.weights.weight_group import GroupConnection, WeightGroup, WeightGroupError


class StockWeightGroup(WeightGroup):
    """Rank 0 of a group with stock SGLang servers. Only rank 0 sends, one flat tensor at a time.

    With gloo, `connect` returns when all members have connected. With nccl, servers connect in their first broadcast:
    `connect` returns at once, and the first broadcast takes longer.
    """

    def _meet(self, store: dist.PrefixStore, deadline: float, timeout: float) -> None:
        if self.rank != 0:
            raise WeightGroupError(
                f"weight group {self.name}: stock SGLang servers receive from rank 0 only, this is rank {self.rank}"
            )

    def _build(self, store: dist.PrefixStore, timeout: float) -> GroupConnection:
        device_type = "cuda" if self.transport == "nccl" else "cpu"
        # The first prefix is that of init_custom_process_group, the others are of torch's _new_process_group_helper.
        theirs = dist.PrefixStore(self.name, store.underlying_store)
        theirs = dist.PrefixStore(f"{device_type}/", dist.PrefixStore(f"{self.name}/", theirs))
        if self.transport == "gloo":
            return GlooConnection(theirs, 0, self.world_size, address_towards(*self._store_address), timeout)
        if self._device is None:
            raise WeightGroupError(f"weight group {self.name}: nccl needs a GPU, none was given")
        return _LateNcclConnection(theirs, self.world_size, self._device, self.aborted)


class _LateNcclConnection:
    """Connects in the first broadcast, as torch's process groups do."""

    def __init__(self, store: dist.Store, world_size: int, device: torch.device, cancelled: threading.Event) -> None:
        self._place = (store, world_size, device)
        self._cancelled = cancelled
        self._connection: NcclConnection | None = None

    def start(self, tensors: Sequence[torch.Tensor], source_rank: int, timeout: float) -> NcclBroadcast:
        if self._connection is None:
            store, world_size, device = self._place
            self._connection = _StockNcclConnection(store, 0, world_size, device, timeout, self._cancelled)
        return self._connection.start(tensors, source_rank, timeout)

    def abort(self) -> None:
        if self._connection is not None:  # otherwise `cancelled` ends connecting
            self._connection.abort()


class _StockNcclConnection(NcclConnection):
    """Connects to torch's ProcessGroupNCCL."""

    def _share_id(self, store: dist.Store, rank: int, deadline: float) -> UniqueId:
        unique_id = self._new_id()
        # Raw bytes; the key is the communicator's number in the group, from 0. (The type stub only has text.)
        store.set("0", bytes(unique_id))  # type: ignore[arg-type]
        return unique_id

    def _warm_up(self, deadline: float) -> None:
        """Do nothing: the servers take part only in announced broadcasts."""
