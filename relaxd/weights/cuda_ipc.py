"""Broadcasts between processes on one machine through CUDA IPC, for members that share a GPU, which NCCL refuses.

The source copies a bucket into one of its two slots and announces it in the group's store. Every other member copies
the bucket out and acknowledges it, which frees the slot. So a bucket is copied in while the previous bucket is copied
out. Copies within a GPU run at terabytes per second, so the cost is the messages: two per bucket and member.

Memory comes from cudaMalloc, not from torch's cache: CUDA shares whole allocations, and torch's may contain other
tensors. Handles are CUDA's 64 bytes; nothing is pickled.
"""

import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist

SLOTS = 2
_POLL_SECONDS = 0.0001
_CLOSE_SECONDS = 2.0
"""Maximum seconds to wait until the other members close this member's memory."""


class IpcError(RuntimeError):
    """A broadcast failed. The connection is unusable afterwards."""


class DeviceEvent(Protocol):
    """A marker in a device's queue of work, such as a CUDA event."""

    def query(self) -> bool:
        """Return True if the device has done all work before the marker."""


class SharedMemory(Protocol):
    """GPU memory shared between processes: the interface of `relaxd.weights.cuda_ipc.CudaMemory`."""

    def allocate(self, size: int) -> tuple[int, bytes]:
        """Allocate memory of `size` bytes. Returns its address, and the handle with which other members open it."""

    def free(self, address: int) -> None:
        """Free the memory that `allocate` returned."""

    def open(self, handle: bytes, size: int) -> int:
        """Map another member's memory into this process. Returns its address here."""

    def close(self, address: int) -> None:
        """Unmap another member's memory, which `open` returned."""

    def mark(self) -> Any:
        """Return a marker of the work enqueued so far, for `copy` to wait for."""

    def copy(self, parts: Sequence[tuple[int, int, int]], after: Any) -> DeviceEvent:
        """Enqueue copies, as tuples (target, source, bytes), to begin after a marker. Return a marker of their end."""


@dataclass
class IpcBroadcast:
    """A batch of broadcasts that started together."""

    tensors: list[torch.Tensor]
    source: int
    number: int
    """Sequence number among the broadcasts of the same source."""
    after: Any
    deadline: float
    ended: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def done(self) -> bool:
        """Return True once this member's copies have succeeded or failed."""
        return self.ended.is_set()

    def finish(self) -> None:
        """Raise RuntimeError if the copies failed. Call it once `done` returns True."""
        if self.error is not None:
            raise IpcError(str(self.error)) from self.error

    def precede_current_stream(self) -> None:
        """Do nothing: finished copies precede every stream's later work."""


@dataclass
class _Area:
    """Memory from which a source rank sends: SLOTS slots of `slot_bytes` bytes each."""

    generation: int
    """Number of earlier areas of the same source, which were too small and were replaced."""
    address: int
    slot_bytes: int


class IpcConnection:
    """A member's connection to the weight group.

    One thread copies the broadcasts in the order in which they started.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, memory: SharedMemory, cancelled: threading.Event
    ) -> None:
        """Start the copying thread.

        Only this group may use `store`. Set `cancelled` before `abort` to end copying at once.
        """
        self._store = store
        self._rank = rank
        self._readers = world_size - 1
        self._memory = memory
        self._cancelled = cancelled
        self._broken: Exception | None = None
        self._counts: dict[int, int] = {}
        self._own: _Area | None = None
        self._replaced: list[_Area] = []
        self._seen: dict[int, _Area] = {}
        """Opened areas of other members, by source rank."""
        self._queue: queue.SimpleQueue[IpcBroadcast | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="copy weights", daemon=True)
        self._thread.start()

    def start(self, tensors: Sequence[torch.Tensor], source_rank: int, timeout: float) -> IpcBroadcast:
        """Start one broadcast per tensor. Keep the tensors until the broadcasts are done or aborted."""
        number = self._counts.get(source_rank, 0)
        self._counts[source_rank] = number + 1
        broadcast = IpcBroadcast(list(tensors), source_rank, number, self._memory.mark(), time.monotonic() + timeout)
        self._queue.put(broadcast)
        return broadcast

    def abort(self) -> None:
        """Cancel all broadcasts and free all memory. Afterwards no tensor is written to."""
        self._queue.put(None)
        self._thread.join()
        for area in self._seen.values():
            with contextlib.suppress(RuntimeError):
                self._memory.close(area.address)
        self._seen.clear()
        own = [area for area in (self._own, *self._replaced) if area is not None]
        self._own = None
        self._replaced.clear()
        # Memory must not be freed while other members have it open.
        with contextlib.suppress(RuntimeError):
            self._store.add("closed", 1)
            deadline = time.monotonic() + _CLOSE_SECONDS
            while own and self._store.add("closed", 0) <= self._readers and time.monotonic() < deadline:
                time.sleep(0.005)  # brief: see the deadline
        for area in own:
            with contextlib.suppress(RuntimeError):
                self._memory.free(area.address)

    def _work(self) -> None:
        while (broadcast := self._queue.get()) is not None:
            try:
                if self._broken is not None:
                    raise self._broken
                if broadcast.source == self._rank:
                    self._send(broadcast)
                else:
                    self._receive(broadcast)
            except Exception as error:  # `finish` raises it
                self._broken = broadcast.error = error
            broadcast.ended.set()

    def _send(self, broadcast: IpcBroadcast) -> None:
        number, size = broadcast.number, sum(tensor.nbytes for tensor in broadcast.tensors)
        area = self._area_for(size)
        if number >= SLOTS:
            key = f"read/{self._rank}/{number - SLOTS}"
            self._wait(lambda: self._store.add(key, 0) >= self._readers, broadcast, "the others to read")
        self._copy(broadcast, area.address + number % SLOTS * area.slot_bytes, into_slot=True)
        self._store.set(f"full/{self._rank}/{number}", str(area.generation))

    def _receive(self, broadcast: IpcBroadcast) -> None:
        number, source = broadcast.number, broadcast.source
        key = f"full/{source}/{number}"
        self._wait(lambda: self._store.check([key]), broadcast, f"rank {source}")
        area = self._area_of(source, int(self._store.get(key)))
        self._copy(broadcast, area.address + number % SLOTS * area.slot_bytes, into_slot=False)
        self._store.add(f"read/{source}/{number}", 1)

    def _copy(self, broadcast: IpcBroadcast, slot: int, *, into_slot: bool) -> None:
        parts = []
        for tensor in broadcast.tensors:
            ends = (slot, tensor.data_ptr()) if into_slot else (tensor.data_ptr(), slot)
            parts.append((*ends, tensor.nbytes))
            slot += tensor.nbytes
        event = self._memory.copy(parts, broadcast.after)
        self._wait(event.query, broadcast, "the copies", uncancellable=True)

    def _area_for(self, size: int) -> _Area:
        if self._own is None or self._own.slot_bytes < size:
            generation = 0
            if self._own is not None:  # others may still read from it
                self._replaced.append(self._own)
                generation = self._own.generation + 1
            address, handle = self._memory.allocate(SLOTS * size)
            self._own = _Area(generation, address, size)
            self._store.set(f"area/{self._rank}/{generation}", f"{size} {handle.hex()}")
        return self._own

    def _area_of(self, source: int, generation: int) -> _Area:
        area = self._seen.get(source)
        if area is None or area.generation != generation:
            if area is not None:
                self._memory.close(area.address)
                del self._seen[source]
            size, _, handle = self._store.get(f"area/{source}/{generation}").decode().partition(" ")
            address = self._memory.open(bytes.fromhex(handle), SLOTS * int(size))
            area = self._seen[source] = _Area(generation, address, int(size))
        return area

    def _wait(self, reached: Any, broadcast: IpcBroadcast, what: str, *, uncancellable: bool = False) -> None:
        """Wait until `reached()` returns True.

        Raises IpcError at the broadcast's deadline or on an abort. With `uncancellable` an abort doesn't end the wait.
        Use it only for copies that already run, which are short.
        """
        while not reached():
            if uncancellable:
                time.sleep(_POLL_SECONDS)  # brief: the transfer's deadline
            elif self._cancelled.wait(_POLL_SECONDS):  # brief: the transfer's deadline
                raise IpcError(f"waiting for {what} was aborted")
            if time.monotonic() > broadcast.deadline:
                raise IpcError(f"{what} did not finish in time")


_SUCCESS = 0
_LAZY_PEER_ACCESS = 1
_COPY_DEFAULT = 4
"""cudaMemcpyDefault: CUDA derives a copy's direction from the addresses, one of which may be on another GPU."""


class CudaError(RuntimeError):
    """The CUDA runtime reported an error."""


class IpcHandle(ctypes.Structure):
    """CUDA's struct cudaIpcMemHandle_t: a handle of 64 bytes with which other processes open memory."""

    _fields_ = [("reserved", ctypes.c_char * 64)]


class CudaMemory:
    """Shared memory of one GPU. Copies run on a separate stream of high priority. Not thread-safe, except `mark`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runtime = _library()
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device, priority=-1)

    def allocate(self, size: int) -> tuple[int, bytes]:
        """Allocate memory of `size` bytes.

        Returns its address, and the handle for `open` in other processes. Raises CudaError.
        """
        address, handle = ctypes.c_void_p(), IpcHandle()
        with torch.cuda.device(self._device):
            self._check("cudaMalloc", self._runtime.cudaMalloc(ctypes.byref(address), size))
            assert address.value is not None
            self._check("cudaIpcGetMemHandle", self._runtime.cudaIpcGetMemHandle(ctypes.byref(handle), address))
        return address.value, bytes(handle)

    def free(self, address: int) -> None:
        """Free the memory that `allocate` returned. Raises CudaError."""
        with torch.cuda.device(self._device):
            self._check("cudaFree", self._runtime.cudaFree(ctypes.c_void_p(address)))

    def open(self, handle: bytes, size: int) -> int:
        """Map another process's memory into this process. Returns its address here. Raises CudaError."""
        address, raw = ctypes.c_void_p(), IpcHandle.from_buffer_copy(handle)
        with torch.cuda.device(self._device):
            code = self._runtime.cudaIpcOpenMemHandle(ctypes.byref(address), raw, _LAZY_PEER_ACCESS)
            self._check("cudaIpcOpenMemHandle", code)
        assert address.value is not None
        return address.value

    def close(self, address: int) -> None:
        """Unmap another process's memory, which `open` returned. Raises CudaError."""
        with torch.cuda.device(self._device):
            self._check("cudaIpcCloseMemHandle", self._runtime.cudaIpcCloseMemHandle(ctypes.c_void_p(address)))

    def mark(self) -> torch.cuda.Event:
        """Record an event on the calling thread's current stream, for `copy` to wait for."""
        with torch.cuda.device(self._device):
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(self, parts: Sequence[tuple[int, int, int]], after: torch.cuda.Event) -> torch.cuda.Event:
        """Enqueue copies, as tuples (target, source, bytes), to begin after an event of `mark`.

        Returns an event at their end. Raises CudaError.
        """
        with torch.cuda.device(self._device):
            self._stream.wait_event(after)
            stream = ctypes.c_void_p(self._stream.cuda_stream)
            for target, source, size in parts:
                code = self._runtime.cudaMemcpyAsync(target, source, size, _COPY_DEFAULT, stream)
                self._check("cudaMemcpyAsync", code)
            event = torch.cuda.Event()
            event.record(self._stream)
        return event

    def _check(self, what: str, code: int) -> None:
        if code != _SUCCESS:
            self._runtime.cudaGetLastError()  # clears it, or torch's next call would report it again
            raise CudaError(f"{what}: {self._runtime.cudaGetErrorString(code).decode()} ({code})")


@cache
def _library() -> ctypes.CDLL:
    """Load the same CUDA runtime library as torch: a second copy would be another client of the driver."""
    major = str(torch.version.cuda).partition(".")[0]
    runtime = ctypes.CDLL(f"libcudart.so.{major}")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    runtime.cudaGetErrorString.argtypes, runtime.cudaGetErrorString.restype = [ctypes.c_int], ctypes.c_char_p
    runtime.cudaMalloc.argtypes = [ctypes.POINTER(pointer), size]
    runtime.cudaFree.argtypes = [pointer]
    runtime.cudaIpcGetMemHandle.argtypes = [ctypes.POINTER(IpcHandle), pointer]
    runtime.cudaIpcOpenMemHandle.argtypes = [ctypes.POINTER(pointer), IpcHandle, ctypes.c_uint]
    runtime.cudaIpcCloseMemHandle.argtypes = [pointer]
    runtime.cudaMemcpyAsync.argtypes = [pointer, pointer, size, ctypes.c_int, pointer]
    return runtime
