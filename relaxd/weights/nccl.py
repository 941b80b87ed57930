"""Broadcasts through NCCL's own library, with communicators that can always be left.

torch's ProcessGroupNCCL brings a watchdog and a monitor that end the process when a collective fails, by settings that
hold for every group in it, and its abort can't reach a group that is still being connected. A weight group must survive
what its members do, next to other groups in the same process. So this uses the library that torch has loaded, directly:
communicators are nonblocking, every call returns at once and is followed up, and abort is ncclCommAbort.
"""

import ctypes
import os
import threading
import time
from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist

from relaxd.weights.environment import NCCL_ENVIRONMENT

_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1
_UNSET = -(2**31)
_MAGIC = 0xCAFEBEEF
_CONFIG_VERSION = 21800
"""The layout of the configuration below; newer libraries read it and take their defaults for what it lacks."""
_FAST_POLLS, _POLL_SECONDS = 200, 0.0002
_WARM_UP_BYTES = 1 << 20
_ID_KEY = "nccl"


class NcclError(RuntimeError):
    """NCCL reported an error."""


class UniqueId(ctypes.Structure):
    """ncclUniqueId: by it the members of a communicator find each other."""

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


class Broadcast:
    """Broadcasts that were enqueued together."""

    def __init__(self, connection: "NcclConnection", event: torch.cuda.Event) -> None:
        self._connection = connection
        self._event = event

    def done(self) -> bool:
        """Whether the GPU is through with them. Raises NcclError when the communicator is broken."""
        if self._event.query():
            return True
        self._connection.check()
        return False

    def finish(self) -> None:
        """Nothing is left to do once they are done."""

    def precede_current_stream(self) -> None:
        """Have the current stream go on only after them; doesn't wait."""
        torch.cuda.current_stream(self._connection.device).wait_event(self._event)


class NcclConnection:
    """A communicator on a stream of its own, of high priority, so that training beside it doesn't hold it up."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout: float,
        cancelled: threading.Event,
    ) -> None:
        """Connect with the other members, all of which are about to do the same.

        Raises NcclError when that fails or takes longer than `timeout` seconds, or as soon as `cancelled` is set.
        """
        check_environment()
        self.device = device
        self._nccl = _library()
        self._cancelled = cancelled
        self._communicator = ctypes.c_void_p()
        self._lock = threading.Lock()
        """Held while the communicator is used, so that it isn't freed meanwhile."""
        deadline = time.monotonic() + timeout
        with torch.cuda.device(device):
            self.stream = torch.cuda.Stream(device, priority=-1)
            unique_id = self._share_id(store, rank, deadline)
            config = _Config(
                ctypes.sizeof(_Config), _MAGIC, _CONFIG_VERSION, 0, _UNSET, _UNSET, _UNSET, None, _UNSET
            )  # fmt: skip
            try:
                code = self._nccl.ncclCommInitRankConfig(
                    ctypes.byref(self._communicator), world_size, unique_id, rank, ctypes.byref(config)
                )
                self._settle("ncclCommInitRankConfig", code, deadline)
                self._warm_up(deadline)
            except BaseException:
                self.abort()
                raise

    def start(self, tensors: Sequence[torch.Tensor], source_rank: int, timeout: float) -> Broadcast:
        """Enqueue one broadcast per tensor, as one group, after what is enqueued on the current stream by now.

        The tensors are contiguous and on the device. Keep them until the broadcasts are done or aborted.
        Raises NcclError.
        """
        deadline = time.monotonic() + timeout
        with self._lock, torch.cuda.device(self.device):
            if not self._communicator.value:
                raise NcclError("the communicator was aborted")
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
            finally:  # else this thread would stay within the group
                end = self._nccl.ncclGroupEnd()
            self._settle("ncclBroadcast", code if code not in (_SUCCESS, _IN_PROGRESS) else end, deadline)
            event = torch.cuda.Event()
            event.record(self.stream)
        return Broadcast(self, event)

    def check(self) -> None:
        """Raise NcclError when the communicator is broken."""
        with self._lock:
            code = self._state()
            if code not in (_SUCCESS, _IN_PROGRESS):
                raise self._error("a broadcast", code)

    def abort(self) -> None:
        """End what is under way and free the communicator. Afterwards the GPU no longer writes into any tensor.

        Set `cancelled` first, or this waits for the call that another thread is in.
        """
        with self._lock:
            communicator, self._communicator = self._communicator, ctypes.c_void_p()
        if communicator.value:
            with torch.cuda.device(self.device):
                self._nccl.ncclCommAbort(communicator)

    def _warm_up(self, deadline: float) -> None:
        """The first broadcast loads kernels and connects channels, which should not happen in a pause."""
        scratch = torch.zeros(_WARM_UP_BYTES, dtype=torch.uint8, device=self.device)
        first = self.start([scratch], 0, deadline - time.monotonic())
        while not first.done():
            self._pass_time("the first broadcast", deadline)

    def _share_id(self, store: dist.Store, rank: int, deadline: float) -> UniqueId:
        if rank == 0:
            unique_id = self._new_id()
            store.set(_ID_KEY, bytes(unique_id).hex())
        else:
            unique_id = UniqueId()
            while not store.check([_ID_KEY]):
                self._pass_time("rank 0", deadline)
            ctypes.memmove(ctypes.byref(unique_id), bytes.fromhex(store.get(_ID_KEY).decode()), 128)
        return unique_id

    def _new_id(self) -> UniqueId:
        unique_id = UniqueId()
        code = self._nccl.ncclGetUniqueId(ctypes.byref(unique_id))
        if code != _SUCCESS:
            raise self._error("ncclGetUniqueId", code)
        return unique_id

    def _settle(self, what: str, code: int, deadline: float) -> None:
        """Follow up a call of a nonblocking communicator: nothing else may be asked of it before that call is over."""
        if code not in (_SUCCESS, _IN_PROGRESS):
            raise self._error(what, code)
        polls = 0
        while (code := self._state()) == _IN_PROGRESS:
            polls += 1
            if polls > _FAST_POLLS:
                self._pass_time(what, deadline)
            elif self._cancelled.is_set():
                raise NcclError(f"{what} was aborted")
        if code != _SUCCESS:
            raise self._error(what, code)

    def _state(self) -> int:
        code = ctypes.c_int(_SUCCESS)
        returned = self._nccl.ncclCommGetAsyncError(self._communicator, ctypes.byref(code))
        return int(returned) or code.value

    def _pass_time(self, what: str, deadline: float) -> None:
        if self._cancelled.wait(_POLL_SECONDS):
            raise NcclError(f"waiting for {what} was aborted")
        if time.monotonic() > deadline:
            raise NcclError(f"{what} did not end in time")

    def _error(self, what: str, code: int) -> NcclError:
        name = self._nccl.ncclGetErrorString(code).decode()
        detail = (self._nccl.ncclGetLastError(self._communicator) or b"").decode().strip()
        return NcclError(f"{what}: {name}" + (f" ({detail})" if detail else ""))


def check_environment() -> None:
    """Raise NcclError where NCCL would exchange other handles of memory than the other members."""
    name = "NCCL_CUMEM_ENABLE"
    if os.environ.get(name) != NCCL_ENVIRONMENT[name]:
        raise NcclError(
            f"{name} is {os.environ.get(name, 'not set')} in this process: it must be {NCCL_ENVIRONMENT[name]} "
            "in every member before NCCL is first used, as relaxd.weights.environment says"
        )


@cache
def _library() -> ctypes.CDLL:
    """NCCL as torch has loaded it: a second copy would have its own idea of the devices."""
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
