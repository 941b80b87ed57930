"""A weight group: the trainer's source ranks and every engine rank, in a process group of their own.

It is built directly on a prefix of the trainer's store, independent of torch's default process group, so that groups
come and go while the trainer trains. Nothing waits for ever: connecting and broadcasting have deadlines, and `abort`
unblocks both from another thread.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from relaxd.weights.cuda_ipc import IpcConnection
from relaxd.weights.cuda_memory import CudaMemory
from relaxd.weights.gloo import GlooConnection
from relaxd.weights.nccl import NcclConnection

logger = logging.getLogger(__name__)

Transport = Literal["gloo", "nccl", "cuda_ipc"]

_EVERYWHERE = ("", "0.0.0.0", "::")
_POLL_SECONDS = 0.0002
_RENDEZVOUS_POLL_SECONDS = 0.01
_ABORT_POLL_SECONDS = 0.1
_STORE_SECONDS = 60.0
"""Longest wait of the store's own process for anything in it; members have deadlines of their own."""
_ABORT_SECONDS = 5.0
"""How long `abort` waits for the GPU to let go of the tensors."""
_ABORTED = "aborted"


class WeightGroupError(Exception):
    """A weight group could not be connected, or a broadcast did not end well. The group is of no further use."""


def host_store(host: str = "127.0.0.1", port: int = 0, seconds: float = _STORE_SECONDS) -> dist.TCPStore:
    """The rendezvous store that a trainer's first rank hosts for its life; `.port` says where.

    It asks nobody who they are, so it listens on that address of this machine alone ("", "0.0.0.0" and "::": on all),
    where TCPStore by itself would on all. `seconds` limits each wait for a key. Raises OSError: the address can't be
    listened on.
    """
    timeout = timedelta(seconds=seconds)
    if host in _EVERYWHERE:
        return dist.TCPStore("127.0.0.1", port, None, is_master=True, timeout=timeout, wait_for_workers=False)
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host, port, None, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


class Broadcaster(Protocol):
    """The members' connection, once there is one."""

    def start(self, tensors: Sequence[torch.Tensor], source_rank: int, timeout: float) -> "Pending":
        """Start one broadcast per tensor. Raises RuntimeError."""

    def abort(self) -> None:
        """End what is under way and give the connection up."""


class Pending(Protocol):
    """Broadcasts that were started together."""

    def done(self) -> bool:
        """Whether they have ended, well or not. May raise RuntimeError for why they never will."""

    def finish(self) -> None:
        """Raise RuntimeError unless they, being done, ended well."""

    def precede_current_stream(self) -> None:
        """Have what the current stream gets from now on come after them."""


class Transfer:
    """Broadcasts under way. Keep their tensors untouched until `wait` has returned."""

    def __init__(self, group: "WeightGroup", pending: Pending, nbytes: int, timeout: float) -> None:
        self._group = group
        self._pending = pending
        self._nbytes = nbytes
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout

    def wait(self) -> None:
        """Return when they are done on this side. Raises WeightGroupError at failure, deadline or abort."""
        try:
            while not self._pending.done():
                if self._group.aborted.wait(_POLL_SECONDS):
                    raise WeightGroupError(f"weight group {self._group.name} was aborted during a broadcast")
                if time.monotonic() > self._deadline:
                    self._group.abort()
                    raise WeightGroupError(
                        f"a broadcast of {self._nbytes} bytes in weight group {self._group.name} did not end within "
                        f"{self._timeout:g} s"
                    )
            self._pending.finish()
        except RuntimeError as error:
            if self._group.aborted.is_set():
                raise WeightGroupError(f"weight group {self._group.name} was aborted during a broadcast") from error
            self._group.abort()
            reason = str(error).splitlines()[0]
            raise WeightGroupError(f"a broadcast in weight group {self._group.name} failed: {reason}") from error

    def precede_current_stream(self) -> None:
        """Have whatever the current stream gets from now on come after the broadcasts.

        On a GPU this doesn't wait, and tells nothing about success: `wait` for the last transfer of all the same. On a
        CPU it is the same as `wait`.
        """
        if self._group.transport == "nccl":
            self._pending.precede_current_stream()
        else:
            self.wait()


class WeightGroup:
    """One member of a weight group. Make it, `connect` it, then `broadcast`; `abort` it to leave."""

    def __init__(
        self,
        transport: Transport,
        store_host: str,
        store_port: int,
        name: str,
        rank: int,
        world_size: int,
        device: torch.device | None = None,
    ) -> None:
        """`name` must never have been used before with this store. `device` is the GPU, where it isn't a gloo group."""
        if not 0 <= rank < world_size:
            raise WeightGroupError(f"rank {rank} does not fit into weight group {name} of {world_size} ranks")
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self.aborted = threading.Event()
        self.transport = transport
        self._store_address = (store_host, store_port)
        self._device = device
        self._lock = threading.Lock()
        self._store: dist.Store | None = None
        self._connection: Broadcaster | None = None

    def connect(self, timeout: float) -> None:
        """Meet the other members; returns when all are connected. Raises WeightGroupError after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        host, port = self._store_address
        try:
            client = dist.TCPStore(
                host, port, None, is_master=False, timeout=timedelta(seconds=timeout), wait_for_workers=False
            )
            store = dist.PrefixStore(f"weights/{self.name}", client)
            self._meet(store, deadline, timeout)
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
            self._let_go()
            raise WeightGroupError(f"weight group {self.name} was aborted while it was being connected")

    def start_broadcasts(self, tensors: Sequence[torch.Tensor], source_rank: int, timeout: float) -> Transfer:
        """Start to send (on `source_rank`) or to receive (elsewhere) contiguous tensors in place, all at once.

        Every member issues the same broadcasts in the same order and by the same calls. On a GPU they come after what
        the current stream has been given by now.
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
        """Start to send or to receive one contiguous tensor in place; see `start_broadcasts`."""
        return self.start_broadcasts([tensor], source_rank, timeout)

    def broadcast(self, tensor: torch.Tensor, source_rank: int, timeout: float) -> None:
        """Send or receive a contiguous tensor in place, and wait for it."""
        self.start_broadcast(tensor, source_rank, timeout).wait()

    def abort(self) -> None:
        """Leave the group now, which ends it for every member. Unblocks whoever waits in it, here at once and elsewhere
        within a moment. Safe from any thread, and more than once.

        But for gloo nothing is written into any tensor when this has returned. A gloo receive that is under way cannot
        be called back: until its own deadline it may still write into its tensor, so receive into memory that is given
        up with the group.
        """
        self.aborted.set()
        self._let_go()

    def _meet(self, store: dist.PrefixStore, deadline: float, timeout: float) -> None:
        if store.add(f"rank{self.rank}", 1) != 1:
            raise WeightGroupError(f"rank {self.rank} of weight group {self.name} is taken: names are never used twice")
        missing = [rank for rank in range(self.world_size) if rank != self.rank]
        while True:
            missing = [rank for rank in missing if not store.check([f"rank{rank}"])]
            if not missing:
                return
            if self.aborted.wait(_RENDEZVOUS_POLL_SECONDS):
                raise WeightGroupError(f"weight group {self.name} was aborted while it was being connected")
            if time.monotonic() > deadline:
                raise WeightGroupError(
                    f"weight group {self.name}: ranks {missing} of {self.world_size} did not come within {timeout:g} s"
                )

    def _build(self, store: dist.PrefixStore, timeout: float) -> Broadcaster:
        if self.transport != "gloo" and self._device is None:
            raise WeightGroupError(f"weight group {self.name}: {self.transport} needs a GPU, none was given")
        if self.transport == "cuda_ipc":
            assert self._device is not None
            return IpcConnection(store, self.rank, self.world_size, CudaMemory(self._device), self.aborted)
        if self.transport == "nccl":
            assert self._device is not None
            return NcclConnection(store, self.rank, self.world_size, self._device, timeout, self.aborted)
        return GlooConnection(store, self.rank, self.world_size, address_towards(*self._store_address), timeout)

    def _let_go(self, *, tell: bool = True) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
            store, self._store = self._store, None
        if connection is None or store is None:
            return
        if tell:  # a store whose host is frozen doesn't answer, so nobody waits for it
            threading.Thread(target=_tell_aborted, args=(store,), name=f"abort {self.name}", daemon=True).start()
        letting_go = threading.Thread(target=connection.abort, name=f"release {self.name}", daemon=True)
        letting_go.start()
        if self.transport != "gloo":
            letting_go.join(_ABORT_SECONDS)
            if letting_go.is_alive():
                logger.error("weight group %s is still not aborted after %g s", self.name, _ABORT_SECONDS)

    def _watch(self, store: dist.Store) -> None:
        """Learn of another member's abort: gloo tells only those who happen to exchange bytes with it."""
        while not self.aborted.wait(_ABORT_POLL_SECONDS):
            try:
                if store.check([_ABORTED]):
                    self.abort()
            except RuntimeError:  # the store, and so the trainer, is gone
                self.aborted.set()
                self._let_go(tell=False)


def _tell_aborted(store: dist.Store) -> None:
    with contextlib.suppress(RuntimeError):
        store.set(_ABORTED, "1")


def address_towards(host: str, port: int) -> str:
    """The address of this machine from which `host` is reached (connecting a UDP socket sends nothing)."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
