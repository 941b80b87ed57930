"""GPU memory that other processes on the machine can read, through CUDA's runtime as torch has loaded it.

The memory is taken by cudaMalloc itself, not from torch's cache: CUDA hands out whole allocations only, and torch's may
hold anything beside what is meant. Handles are the 64 bytes that CUDA makes of them; nothing is pickled.
"""

import ctypes
from collections.abc import Sequence
from functools import cache

import torch

_SUCCESS = 0
_LAZY_PEER_ACCESS = 1
_COPY_DEFAULT = 4
"""cudaMemcpyDefault: the direction follows from the addresses, of which one may be another GPU's."""


class CudaError(RuntimeError):
    """The CUDA runtime reported an error."""


class IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t."""

    _fields_ = [("reserved", ctypes.c_char * 64)]


class CudaMemory:
    """One GPU's memory. Copies run on a stream of their own, of high priority. For one thread, but for `mark`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runtime = _library()
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device, priority=-1)

    def allocate(self, size: int) -> tuple[int, bytes]:
        """Take memory; returns its address and the handle by which others `open` it. Raises CudaError."""
        address, handle = ctypes.c_void_p(), IpcHandle()
        with torch.cuda.device(self._device):
            self._check("cudaMalloc", self._runtime.cudaMalloc(ctypes.byref(address), size))
            assert address.value is not None
            self._check("cudaIpcGetMemHandle", self._runtime.cudaIpcGetMemHandle(ctypes.byref(handle), address))
        return address.value, bytes(handle)

    def free(self, address: int) -> None:
        """Give memory back. Raises CudaError."""
        with torch.cuda.device(self._device):
            self._check("cudaFree", self._runtime.cudaFree(ctypes.c_void_p(address)))

    def open(self, handle: bytes, size: int) -> int:
        """The address in this process of memory that another one allocated. Raises CudaError."""
        address, raw = ctypes.c_void_p(), IpcHandle.from_buffer_copy(handle)
        with torch.cuda.device(self._device):
            code = self._runtime.cudaIpcOpenMemHandle(ctypes.byref(address), raw, _LAZY_PEER_ACCESS)
            self._check("cudaIpcOpenMemHandle", code)
        assert address.value is not None
        return address.value

    def close(self, address: int) -> None:
        """Let go of what was opened. Raises CudaError."""
        with torch.cuda.device(self._device):
            self._check("cudaIpcCloseMemHandle", self._runtime.cudaIpcCloseMemHandle(ctypes.c_void_p(address)))

    def mark(self) -> torch.cuda.Event:
        """What the calling thread's current stream has been given by now."""
        with torch.cuda.device(self._device):
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(self, parts: Sequence[tuple[int, int, int]], after: torch.cuda.Event) -> torch.cuda.Event:
        """Enqueue copies, each (to, from, bytes), after a `mark`; returns when they are done. Raises CudaError."""
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
            self._runtime.cudaGetLastError()  # or torch's next call would report it once more
            raise CudaError(f"{what}: {self._runtime.cudaGetErrorString(code).decode()} ({code})")


@cache
def _library() -> ctypes.CDLL:
    """The runtime that torch has loaded: another copy would be another client of the driver."""
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
