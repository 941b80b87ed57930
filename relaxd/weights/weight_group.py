"""A weight group: a process group of the trainer's source ranks and every engine rank.

It uses a prefix of the trainer's store and is independent of torch's default process group, so that groups can be
created and ended during training. Connecting and broadcasting have deadlines, and `abort` unblocks both from another
thread.

Stock SGLang servers join through `init_custom_process_group` (sglang/srt/utils), a variant of torch's
`init_process_group` for an additional group; `StockWeightGroup` uses the store keys that torch then expects. These
servers don't take part in the rendezvous and abort of WeightGroup: a missing or dead one is noticed only when a
deadline passes.
"""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, Protocol, cast

import torch
import torch.distributed as dist

from relaxd.config import CPU_TRANSPORTS
from relaxd.process.ports import address_towards, listen
from relaxd.rpc.errors import Aborted
from relaxd.rpc.message_parts import words
from relaxd.v1 import weights_pb2
from relaxd.weights.cuda_ipc import CudaMemory, IpcConnection
from relaxd.weights.gloo import GlooChain, GlooConnection
from relaxd.weights.nccl import NcclBroadcast, NcclConnection, UniqueId

logger = logging.getLogger(__name__)

Transport = Literal["gloo", "gloo_chain", "nccl", "cuda_ipc"]

_EVERYWHERE = ("", "0.0.0.0", "::")
_POLL_SECONDS, _POLL_SHARE = 0.00005, 0.002
"""Pause between two polls of a transfer: _POLL_SECONDS, or _POLL_SHARE of the time waited so far if that is longer."""
_RENDEZVOUS_POLL_SECONDS = 0.01
_ABORT_POLL_SECONDS = 0.1
_STORE_SECONDS = 60.0
"""Maximum seconds to wait for a key in the process that hosts the store. Members have their own deadlines."""
_ABORT_SECONDS = 5.0
"""Maximum seconds that `abort` waits until the GPU no longer uses the tensors."""
_ABORTED = "aborted"


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Meeting point of a weight group's members: transport, store, group name and size."""

    transport: Transport
    store_host: str = "127.0.0.1"
    store_port: int
    name: str
    """Name of the weight group. No earlier group in the same store had it."""
    world_size: int

    @property
    def on_cpu(self) -> bool:
        """True if the weight group's tensors are in host memory, not on GPUs."""
        return self.transport in CPU_TRANSPORTS

    @classmethod
    def from_proto(cls, group: weights_pb2.WeightGroup) -> "Rendezvous":
        """Convert the coordinator's WeightGroup message to a Rendezvous."""
        return cls(
            transport=cast(Transport, words(weights_pb2.Transport)[group.transport]),
            store_host=group.store_host or cls.store_host,
            store_port=group.store_port,
            name=group.name,
            world_size=group.world_size,
        )


class WeightGroupError(Aborted):
    """A weight group can't be connected, or a broadcast in it failed. The group is unusable afterwards."""


def host_store(
    host: str = "127.0.0.1", port: int = 0, seconds: float = _STORE_SECONDS, ports: range | None = None
) -> dist.TCPStore:
    """Host the rendezvous store of weight groups in this process, a trainer's first rank. `.port` of the result is its
    port.

    The store has no authentication, so it listens on `host` only, unlike a plain TCPStore ("", "0.0.0.0" and "::"
    listen on all addresses). With `port` 0 it listens on the first free port of `ports`, or on any free port if `ports`
    is None. `seconds` limits each wait for a key. Raises OSError if the address is not available, NoFreePort if no port
    is.
    """
    timeout = timedelta(seconds=seconds)
    if host in _EVERYWHERE and (port or ports is None):
        return dist.TCPStore("127.0.0.1", port, None, is_master=True, timeout=timeout, wait_for_workers=False)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family) if port else listen(host, ports)
    host, port = "127.0.0.1" if host in _EVERYWHERE else host, listener.getsockname()[1]
    return dist.TCPStore(
        host, port, None, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


class GroupConnection(Protocol):
    """A member's connection to the other members of a weight group."""

    def start(self, tensors: Sequence[torch.Tensor], source_rank: int, timeout: float) -> "PendingBroadcasts":
        """Start one broadcast per tensor from `source_rank`. Raises RuntimeError."""

    def abort(self) -> None:
        """Cancel all broadcasts and close the connection."""


class PendingBroadcasts(Protocol):
    """A batch of broadcasts that started together."""

    def done(self) -> bool:
        """Return True once the broadcasts have succeeded or failed. Raises RuntimeError if they will never end."""

    def finish(self) -> None:
        """Raise RuntimeError if the broadcasts failed. Call it once `done` returns True."""

    def precede_current_stream(self) -> None:
        """Make later work on the current stream wait for the broadcasts. Raises RuntimeError if they could not
        begin."""


class Transfer:
    """Broadcasts in progress. Don't read or write their tensors until `wait` has returned."""

    def __init__(self, group: "WeightGroup", pending: PendingBroadcasts, nbytes: int, timeout: float) -> None:
        self._group = group
        self._pending = pending
        self._nbytes = nbytes
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout

    def wait(self) -> None:
        """Wait until this member's part of the broadcasts is done.

        Raises WeightGroupError on failure, deadline or abort.
        """
        began = time.monotonic()
        with self._explaining():
            while not self._pending.done():
                pause = max(_POLL_SECONDS, (time.monotonic() - began) * _POLL_SHARE)
                if self._group.aborted.wait(pause):  # brief: the transfer's deadline
                    raise WeightGroupError(f"weight group {self._group.name} was aborted during a broadcast")
                if time.monotonic() > self._deadline:
                    self._group.abort()
                    raise WeightGroupError(
                        f"a broadcast of {self._nbytes} bytes in weight group {self._group.name} did not end within "
                        f"{self._timeout:g} s"
                    )
            self._pending.finish()

    def precede_current_stream(self) -> None:
        """Make later work on the current stream wait for the broadcasts.

        With NCCL this doesn't block, and raises only for broadcasts that could not begin, so call `wait` for the last
        transfer. With other transports this does the same as `wait`. Raises WeightGroupError.
        """
        if self._group.transport == "nccl":
            with self._explaining():
                self._pending.precede_current_stream()
        else:
            self.wait()

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Convert the connection's errors in the block to WeightGroupError, and abort the group."""
        try:
            yield
        except RuntimeError as error:
            if self._group.aborted.is_set():
                raise WeightGroupError(f"weight group {self._group.name} was aborted during a broadcast") from error
            self._group.abort()
            reason = str(error).splitlines()[0]
            raise WeightGroupError(f"a broadcast in weight group {self._group.name} failed: {reason}") from error


class WeightGroup:
    """A member of a weight group. Call `connect`, then `broadcast`, and `abort` to leave the group."""

    def __init__(self, rendezvous: Rendezvous, rank: int, device: torch.device | None = None) -> None:
        """Create a member that is not connected yet. `device` is its GPU; None in a group of CPUs."""
        self.name = rendezvous.name
        self.rank = rank
        self.world_size = rendezvous.world_size
        if not 0 <= rank < self.world_size:
            raise WeightGroupError(f"rank {rank} does not fit into weight group {self.name} of {self.world_size} ranks")
        self.aborted = threading.Event()
        self.transport = rendezvous.transport
        self._on_cpu = rendezvous.on_cpu
        self._store_address = (rendezvous.store_host, rendezvous.store_port)
        self._device = device
        self._lock = threading.Lock()
        self._store: dist.Store | None = None
        self._connection: GroupConnection | None = None

    def connect(self, timeout: float) -> None:
        """Connect to all other members. Raises WeightGroupError if they aren't connected after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        host, port = self._store_address
        try:
            client = dist.TCPStore(
                host, port, None, is_master=False, timeout=timedelta(seconds=timeout), wait_for_workers=False
            )
            store = dist.PrefixStore(f"weights/{self.name}", client)
            self._meet(store, deadline, timeout)
            logger.info("weight group %s: rank %d of %d, %s", self.name, self.rank, self.world_size, self._route())
            connection = self._build(store, max(deadline - time.monotonic(), 0.5))
        except RuntimeError as error:  # dist.DistError and its kin are RuntimeErrors
            reason = str(error).splitlines()[0]
            raise WeightGroupError(
                f"weight group {self.name} (store {host}:{port}, rank {self.rank} of {self.world_size}) could not be "
                f"connected within {timeout:g} s: {reason}"
            ) from error
        with self._lock:
            self._store, self._connection = store, connection
        threading.Thread(target=self._watch, args=(store,), name=f"watch {self.name}", daemon=True).start()
        if self.aborted.is_set():
            self._close()
            raise WeightGroupError(f"weight group {self.name} was aborted while it was being connected")

    def start_broadcasts(self, tensors: Sequence[torch.Tensor], source_rank: int, timeout: float) -> Transfer:
        """Start to send (on `source_rank`) or receive (elsewhere) contiguous tensors in place, as one batch.

        Every member makes the same calls in the same order. On a GPU the broadcasts run after the current stream's
        work.
        """
        with self._lock:
            connection = None if self.aborted.is_set() else self._connection
        if connection is None:
            raise WeightGroupError(f"weight group {self.name} is not connected")
        try:
            pending = connection.start(tensors, source_rank, timeout)
        except RuntimeError as error:
            self.abort()
            reason = str(error).splitlines()[0]
            raise WeightGroupError(f"a broadcast in weight group {self.name} failed: {reason}") from error
        return Transfer(self, pending, sum(tensor.nbytes for tensor in tensors), timeout)

    def start_broadcast(self, tensor: torch.Tensor, source_rank: int, timeout: float) -> Transfer:
        """Start sending or receiving one contiguous tensor in place; see `start_broadcasts`."""
        return self.start_broadcasts([tensor], source_rank, timeout)

    def broadcast(self, tensor: torch.Tensor, source_rank: int, timeout: float) -> None:
        """Send or receive a contiguous tensor in place, and wait for the end of its broadcast."""
        self.start_broadcast(tensor, source_rank, timeout).wait()

    def abort(self) -> None:
        """Leave the group, which ends it for every member. Waiting calls fail: at once in this process, soon in others.

        Thread-safe and repeatable. Afterwards no tensor is written to, except with gloo: a gloo receive cannot be
        cancelled and may write into its tensor until its deadline, so receive into memory that is discarded with the
        group.
        """
        self.aborted.set()
        self._close()

    def _route(self) -> str:
        """Describe the transport for logs, with gloo's address or the interfaces that NCCL may use."""
        if self._on_cpu:
            return f"{self.transport} from {address_towards(*self._store_address)}"
        if self.transport == "nccl" and (interfaces := os.environ.get("NCCL_SOCKET_IFNAME")):
            return f"nccl with NCCL_SOCKET_IFNAME={interfaces}"
        return self.transport

    def _meet(self, store: dist.PrefixStore, deadline: float, timeout: float) -> None:
        if store.add(f"rank{self.rank}", 1) != 1:
            raise WeightGroupError(f"rank {self.rank} of weight group {self.name} is taken: a group's name must be new")
        missing = [rank for rank in range(self.world_size) if rank != self.rank]
        while True:
            missing = [rank for rank in missing if not store.check([f"rank{rank}"])]
            if not missing:
                return
            if self.aborted.wait(_RENDEZVOUS_POLL_SECONDS):  # brief: weights.connect_timeout_seconds
                raise WeightGroupError(f"weight group {self.name} was aborted while it was being connected")
            if time.monotonic() > deadline:
                raise WeightGroupError(
                    f"weight group {self.name}: ranks {missing} of {self.world_size} did not join within {timeout:g} s"
                )

    def _build(self, store: dist.PrefixStore, timeout: float) -> GroupConnection:
        if not self._on_cpu and self._device is None:
            raise WeightGroupError(f"weight group {self.name}: {self.transport} needs a GPU, none was given")
        if self.transport == "cuda_ipc":
            assert self._device is not None
            return IpcConnection(store, self.rank, self.world_size, CudaMemory(self._device), self.aborted)
        if self.transport == "nccl":
            assert self._device is not None
            return NcclConnection(store, self.rank, self.world_size, self._device, timeout, self.aborted)
        address = address_towards(*self._store_address)
        if self.transport == "gloo_chain":
            return GlooChain(store, self.rank, self.world_size, address, timeout)
        return GlooConnection(store, self.rank, self.world_size, address, timeout)

    def _close(self, *, announce: bool = True) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
            store, self._store = self._store, None
        if connection is None or store is None:
            return
        if announce:  # in a thread, because a store whose host is frozen doesn't answer
            threading.Thread(target=_announce_abort, args=(store,), name=f"abort {self.name}", daemon=True).start()
        closing = threading.Thread(target=connection.abort, name=f"release {self.name}", daemon=True)
        closing.start()
        if not self._on_cpu:
            closing.join(_ABORT_SECONDS)
            if closing.is_alive():
                logger.error("weight group %s is still not aborted after %g s", self.name, _ABORT_SECONDS)

    def _watch(self, store: dist.Store) -> None:
        """Abort when another member has aborted: gloo reports this only to members that exchange data with it."""
        while not self.aborted.wait(_ABORT_POLL_SECONDS):  # idle: watches for an abort
            try:
                if store.check([_ABORTED]):
                    self.abort()
            except RuntimeError:  # the store, and so the trainer, is gone
                self.aborted.set()
                self._close(announce=False)


def _announce_abort(store: dist.Store) -> None:
    with contextlib.suppress(RuntimeError):
        store.set(_ABORTED, "1")


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
    """Connection that NCCL opens in the first broadcast, as torch's process groups do."""

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
    """NCCL connection to torch's ProcessGroupNCCL in stock servers."""

    def _share_id(self, store: dist.Store, rank: int, deadline: float) -> UniqueId:
        unique_id = self._new_id()
        # Raw bytes; the key is the communicator's number in the group, from 0. (The type stub only has text.)
        store.set("0", bytes(unique_id))  # type: ignore[arg-type]
        return unique_id

    def _warm_up(self, deadline: float) -> None:
        """Do nothing: stock servers take part only in announced broadcasts."""
