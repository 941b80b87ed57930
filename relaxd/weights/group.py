"""A weight group: the trainer's source ranks and every engine rank, in a process group of their own.

It is built directly on a prefix of the trainer's store, independent of torch's default process group, so that groups
come and go while the trainer trains. Nothing waits for ever: connecting and broadcasting have deadlines, and `abort`
unblocks both from another thread.
"""

import contextlib
import socket
import threading
import time
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

Transport = Literal["gloo", "nccl"]

_POLL_SECONDS = 0.0005
_RENDEZVOUS_POLL_SECONDS = 0.01
_ABORT_POLL_SECONDS = 0.2
_ABORTED = "aborted"


class WeightGroupError(Exception):
    """A weight group could not be connected, or a broadcast did not end well. The group is of no further use."""


def host_store(port: int = 0) -> dist.TCPStore:
    """The rendezvous store that a trainer's first rank hosts for its life; `.port` says where."""
    return dist.TCPStore("127.0.0.1", port, None, is_master=True, wait_for_workers=False)


class Transfer:
    """One broadcast under way. Keep the tensor untouched until `wait` has returned."""

    def __init__(self, group: "WeightGroup", work: Any, tensor: torch.Tensor, timeout: float) -> None:
        self._group = group
        self._work = work
        self._tensor = tensor
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout

    def wait(self) -> None:
        """Return when the broadcast is done on this side. Raises WeightGroupError at failure, deadline or abort."""
        while not self._work.is_completed():
            if self._group.aborted.wait(_POLL_SECONDS):
                raise WeightGroupError(f"weight group {self._group.name} was aborted during a broadcast")
            if time.monotonic() > self._deadline:
                self._group.abort()
                raise WeightGroupError(
                    f"a broadcast of {self._tensor.nbytes} bytes in weight group {self._group.name} did not end within "
                    f"{self._timeout:g} s"
                )
        try:
            self._work.wait()
        except RuntimeError as error:
            self._group.abort()
            reason = str(error).splitlines()[0]
            raise WeightGroupError(f"a broadcast in weight group {self._group.name} failed: {reason}") from error


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
        """`name` must never have been used before with this store. `device` is the GPU of an nccl group."""
        if not 0 <= rank < world_size:
            raise WeightGroupError(f"rank {rank} does not fit into weight group {name} of {world_size} ranks")
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self.aborted = threading.Event()
        self._transport = transport
        self._store_address = (store_host, store_port)
        self._device = device
        self._lock = threading.Lock()
        self._store: dist.Store | None = None
        self._group: Any = None
        self._pending: list[Any] = []

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
            group = self._build(store, max(deadline - time.monotonic(), 0.5))
        except RuntimeError as error:  # dist.DistError and its kin are RuntimeErrors
            reason = str(error).splitlines()[0]
            raise WeightGroupError(
                f"weight group {self.name} (store {host}:{port}, rank {self.rank} of {self.world_size}) could not be "
                f"connected within {timeout:g} s: {reason}"
            ) from error
        with self._lock:
            self._store, self._group = store, group
        threading.Thread(target=self._watch, args=(store,), name=f"watch {self.name}", daemon=True).start()
        if self.aborted.is_set():
            self._let_go()
            raise WeightGroupError(f"weight group {self.name} was aborted while it was being connected")

    def start_broadcast(self, flat: torch.Tensor, source_rank: int, timeout: float) -> Transfer:
        """Start to send (on `source_rank`) or to receive (elsewhere) a contiguous tensor in place.

        Every member issues the same broadcasts in the same order.
        """
        options = dist.BroadcastOptions()
        options.rootRank = source_rank
        options.rootTensor = 0
        options.timeout = timedelta(seconds=timeout)
        with self._lock:
            if self._group is None or self.aborted.is_set():
                raise WeightGroupError(f"weight group {self.name} is not connected")
            try:
                work = self._group.broadcast([flat], options)
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                raise WeightGroupError(f"a broadcast in weight group {self.name} failed: {reason}") from error
            self._pending = [other for other in self._pending if not other.is_completed()]
            self._pending.append(work)
        return Transfer(self, work, flat, timeout)

    def broadcast(self, flat: torch.Tensor, source_rank: int, timeout: float) -> None:
        """Send or receive a contiguous tensor in place, and wait for it."""
        self.start_broadcast(flat, source_rank, timeout).wait()

    def abort(self) -> None:
        """Leave the group now, which ends it for every member. Unblocks whoever waits in it, here at once and elsewhere
        within a moment. Safe from any thread, and more than once.

        A gloo receive that is under way cannot be called back: until its own deadline it may still write into its
        tensor, so receive into memory that is given up with the group.
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

    def _build(self, store: dist.PrefixStore, timeout: float) -> Any:
        if self._transport == "nccl":
            return self._build_nccl(store, timeout)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=timeout)
        options._threads = 2
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_address_towards(*self._store_address))]
        return dist.ProcessGroupGloo(store, self.rank, self.world_size, options)

    def _build_nccl(self, store: dist.PrefixStore, timeout: float) -> Any:
        if self._device is None:
            raise WeightGroupError(f"weight group {self.name}: nccl needs a GPU, none was given")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        group = dist.ProcessGroupNCCL(store, self.rank, self.world_size, options)
        group.eager_connect_single_device(self._device)
        return group

    def _let_go(self) -> None:
        with self._lock:
            group, self._group = self._group, None
            store, self._store = self._store, None
            pending, self._pending = self._pending, []
        if group is None:
            return
        if self._transport == "nccl":
            group.abort()
        threading.Thread(
            target=_release, args=(store, group, pending), name=f"release {self.name}", daemon=True
        ).start()

    def _watch(self, store: dist.Store) -> None:
        """Learn of another member's abort: gloo tells only those who happen to exchange bytes with it."""
        while not self.aborted.wait(_ABORT_POLL_SECONDS):
            try:
                if store.check([_ABORTED]):
                    self.abort()
            except RuntimeError:  # the store, and so the trainer, is gone
                self.abort()


def _release(store: dist.Store, group: Any, pending: list[Any]) -> None:
    """Tell the others, then hold the group until its last operation is over.

    Its destructor waits for that with the interpreter locked. All this is in a thread of its own because a store whose
    host is frozen does not answer.
    """
    with contextlib.suppress(RuntimeError):
        store.set(_ABORTED, "1")
    for work in pending:
        while not work.is_completed():
            time.sleep(0.05)
    with contextlib.suppress(RuntimeError):
        group.shutdown()


def _address_towards(host: str, port: int) -> str:
    """The address of this machine from which `host` is reached (connecting a UDP socket sends nothing)."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
