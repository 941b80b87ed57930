"""Broadcasts between GPUs, through NCCL directly, with communicators that can be aborted at any time.

A weight group must survive its members' failures without ending the process or its other groups. torch's
ProcessGroupNCCL can't do this: its watchdog and monitor, which have the same settings for all groups, end the process
when a collective fails, and it can't abort a group that is still connecting. So this module calls the NCCL library that
torch has loaded: communicators are nonblocking, every call returns at once and is polled, and abort is ncclCommAbort.
"""

import ctypes
import os
import threading
import time
from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist

from relaxd.weights import NCCL_ENVIRONMENT

_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1
_UNSET = -(2**31)
_MAGIC = 0xCAFEBEEF
_CONFIG_VERSION = 21800
"""NCCL version of the struct `_Config`. Newer libraries use defaults for fields that the struct lacks."""
_FAST_POLLS, _POLL_SECONDS = 200, 0.0002
_WARM_UP_BYTES = 1 << 20
_ID_KEY = "nccl"


class NcclError(RuntimeError):
    """NCCL reported an error."""


class UniqueId(ctypes.Structure):
    """NCCL's struct ncclUniqueId, which identifies a communicator."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    ]


class NcclBroadcast:
    """A batch of broadcasts that NCCL's thread enqueues together."""

    def __init__(self, connection: "NcclConnection", deadline: float) -> None:
        """Create a batch. `deadline` is the monotonic time until which NCCL must have enqueued it."""
        self.deadline = deadline
        self.event: torch.cuda.Event | None = None
        """CUDA event recorded after the broadcasts; None until they are enqueued."""
        self._connection = connection

    def done(self) -> bool:
        """Return True once the GPU has finished the broadcasts. Raises NcclError if the communicator is broken."""
        if self._enqueued().query():
            return True
        self._connection.check()
        return False

    def finish(self) -> None:
        """Do nothing: `done` has already raised any error of the broadcasts."""

    def precede_current_stream(self) -> None:
        """Make later work on the current stream wait for the broadcasts, without blocking. Raises NcclError."""
        torch.cuda.current_stream(self._connection.device).wait_event(self._enqueued())

    def _enqueued(self) -> torch.cuda.Event:
        if self.event is None:
            self._connection.settle()
        assert self.event is not None
        return self.event


class NcclConnection:
    """An NCCL communicator on a separate stream of high priority, so that training does not delay broadcasts."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout: float,
        cancelled: threading.Event,
    ) -> None:
        """Connect to the weight group's other members, which must connect at the same time.

        Raises NcclError on failure, after `timeout` seconds, or as soon as `cancelled` is set.
        """
        check_environment()
        self.device = device
        self._nccl = _library()
        self._cancelled = cancelled
        self._communicator = ctypes.c_void_p()
        self._lock = threading.Lock()
        """Lock held while the communicator is in use, so that it isn't freed."""
        self._enqueueing: NcclBroadcast | None = None
        """The batch that NCCL may still be enqueueing.

        Until NCCL is done with it, the communicator allows no other call.
        """
        deadline = time.monotonic() + timeout
        with torch.cuda.device(device):
            self.stream = torch.cuda.Stream(device, priority=-1)
            unique_id = self._share_id(store, rank, deadline)
            config = _Config(
                size=ctypes.sizeof(_Config),
                magic=_MAGIC,
                version=_CONFIG_VERSION,
                blocking=0,
                cga_cluster_size=_UNSET,
                min_ctas=_UNSET,
                max_ctas=_UNSET,
                net_name=None,
                split_share=_UNSET,
            )
            try:
                code = self._nccl.ncclCommInitRankConfig(
                    ctypes.byref(self._communicator), world_size, unique_id, rank, ctypes.byref(config)
                )
                self._settle("ncclCommInitRankConfig", code, deadline)
                self._warm_up(deadline)
            except BaseException:
                self.abort()
                raise

    def start(self, tensors: Sequence[torch.Tensor], source_rank: int, timeout: float) -> NcclBroadcast:
        """Enqueue one broadcast per tensor, as one group, after the current stream's work.

        The tensors are contiguous and on the device. Keep them until the broadcasts are done or aborted. NCCL enqueues
        them in another thread, so the caller continues at once. Raises NcclError.
        """
        deadline = time.monotonic() + timeout
        with self._lock, torch.cuda.device(self.device):
            self._settle_last()
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            stream, communicator = ctypes.c_void_p(self.stream.cuda_stream), self._communicator
            broadcast = self._nccl.ncclBroadcast
            code = self._nccl.ncclGroupStart()
            try:
                for tensor in tensors:
                    address = tensor.data_ptr()
                    code = code or broadcast(
                        address, address, tensor.nbytes, _UINT8, source_rank, communicator, stream
                    )  # fmt: skip
            finally:  # otherwise this thread would stay in the group
                end = self._nccl.ncclGroupEnd()
            for each in (code, end):
                if each not in (_SUCCESS, _IN_PROGRESS):
                    raise self._error("ncclBroadcast", each)
            self._enqueueing = NcclBroadcast(self, deadline)
        return self._enqueueing

    def settle(self) -> None:
        """Wait until NCCL has enqueued the last batch. Raises NcclError."""
        with self._lock, torch.cuda.device(self.device):
            self._settle_last()

    def check(self) -> None:
        """Raise NcclError if the communicator is broken."""
        with self._lock:
            code = self._state()
            if code not in (_SUCCESS, _IN_PROGRESS):
                raise self._error("a broadcast", code)

    def abort(self) -> None:
        """Cancel broadcasts and free the communicator. Afterwards the GPU writes to no tensor.

        Set `cancelled` first; otherwise this waits for calls in other threads.
        """
        with self._lock:
            communicator, self._communicator = self._communicator, ctypes.c_void_p()
        if communicator.value:
            with torch.cuda.device(self.device):
                self._nccl.ncclCommAbort(communicator)

    def _settle_last(self) -> None:
        """Do what `settle` does. The caller holds the lock."""
        if not self._communicator.value:
            raise NcclError("the communicator was aborted")
        if (last := self._enqueueing) is not None:
            self._settle("ncclBroadcast", _IN_PROGRESS, last.deadline)
            event = torch.cuda.Event()
            event.record(self.stream)
            last.event, self._enqueueing = event, None

    def _warm_up(self, deadline: float) -> None:
        """Broadcast scratch data once: the first broadcast loads kernels and connects channels, which would prolong a
        pause."""
        scratch = torch.zeros(_WARM_UP_BYTES, dtype=torch.uint8, device=self.device)
        first = self.start([scratch], 0, deadline - time.monotonic())
        while not first.done():
            self._poll("the first broadcast", deadline)

    def _share_id(self, store: dist.Store, rank: int, deadline: float) -> UniqueId:
        if rank == 0:
            unique_id = self._new_id()
            store.set(_ID_KEY, bytes(unique_id).hex())
        else:
            unique_id = UniqueId()
            while not store.check([_ID_KEY]):
                self._poll("rank 0", deadline)
            ctypes.memmove(ctypes.byref(unique_id), bytes.fromhex(store.get(_ID_KEY).decode()), 128)
        return unique_id

    def _new_id(self) -> UniqueId:
        unique_id = UniqueId()
        code = self._nccl.ncclGetUniqueId(ctypes.byref(unique_id))
        if code != _SUCCESS:
            raise self._error("ncclGetUniqueId", code)
        return unique_id

    def _settle(self, what: str, code: int, deadline: float) -> None:
        """Wait until NCCL has ended a call of the nonblocking communicator, which allows no other call until then."""
        if code not in (_SUCCESS, _IN_PROGRESS):
            raise self._error(what, code)
        polls = 0
        while (code := self._state()) == _IN_PROGRESS:
            polls += 1
            if polls > _FAST_POLLS:
                self._poll(what, deadline)
            elif self._cancelled.is_set():
                raise NcclError(f"{what} was aborted")
        if code != _SUCCESS:
            raise self._error(what, code)

    def _state(self) -> int:
        code = ctypes.c_int(_SUCCESS)
        returned = self._nccl.ncclCommGetAsyncError(self._communicator, ctypes.byref(code))
        return int(returned) or code.value

    def _poll(self, what: str, deadline: float) -> None:
        if self._cancelled.wait(_POLL_SECONDS):
            raise NcclError(f"waiting for {what} was aborted")
        if time.monotonic() > deadline:
            raise NcclError(f"{what} did not finish in time")

    def _error(self, what: str, code: int) -> NcclError:
        name = self._nccl.ncclGetErrorString(code).decode()
        detail = (self._nccl.ncclGetLastError(self._communicator) or b"").decode().strip()
        return NcclError(f"{what}: {name}" + (f" ({detail})" if detail else ""))


def check_environment() -> None:
    """Raise NcclError if this process's NCCL_CUMEM_ENABLE differs from the value that all members must have."""
    name = "NCCL_CUMEM_ENABLE"
    if os.environ.get(name) != NCCL_ENVIRONMENT[name]:
        raise NcclError(
            f"{name} is {os.environ.get(name, 'not set')} in this process: it must be {NCCL_ENVIRONMENT[name]} "
            "in every member before NCCL is first used, as relaxd.weights says"
        )


@cache
def _library() -> ctypes.CDLL:
    """Load the same NCCL library as torch: a second copy would have separate state."""
    nccl = ctypes.CDLL("libnccl.so.2")
    pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    nccl.ncclGetErrorString.argtypes, nccl.ncclGetErrorString.restype = [number], ctypes.c_char_p
    nccl.ncclGetLastError.argtypes, nccl.ncclGetLastError.restype = [pointer], ctypes.c_char_p
    nccl.ncclGetUniqueId.argtypes = [ctypes.POINTER(UniqueId)]
    nccl.ncclCommInitRankConfig.argtypes = [
        ctypes.POINTER(pointer), number, UniqueId, number, ctypes.POINTER(_Config)
    ]  # fmt: skip
    nccl.ncclCommGetAsyncError.argtypes = [pointer, ctypes.POINTER(number)]
    nccl.ncclCommAbort.argtypes = [pointer]
    nccl.ncclBroadcast.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
    return nccl
