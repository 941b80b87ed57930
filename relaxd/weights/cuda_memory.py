"""GPU memory shared with other processes on the machine, through the CUDA runtime that torch has loaded.

Memory comes from cudaMalloc, not from torch's cache: CUDA shares whole allocations, and torch's may contain other
tensors. Handles are CUDA's 64 bytes; nothing is pickled.
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
    """Memory of one GPU. Copies run on a separate stream of high priority. Not thread-safe, except `mark`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runtime = _library()
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device, priority=-1)

    def allocate(self, size: int) -> tuple[int, bytes]:
        """Allocate memory. Returns its address and the handle for `open` in other processes. Raises CudaError."""
        address, handle = ctypes.c_void_p(), IpcHandle()
        with torch.cuda.device(self._device):
            self._check("cudaMalloc", self._runtime.cudaMalloc(ctypes.byref(address), size))
            assert address.value is not None
            self._check("cudaIpcGetMemHandle", self._runtime.cudaIpcGetMemHandle(ctypes.byref(handle), address))
        return address.value, bytes(handle)

    def free(self, address: int) -> None:
        """Free memory. Raises CudaError."""
        with torch.cuda.device(self._device):
            self._check("cudaFree", self._runtime.cudaFree(ctypes.c_void_p(address)))

    def open(self, handle: bytes, size: int) -> int:
        """Open memory of another process. Returns its address here. Raises CudaError."""
        address, raw = ctypes.c_void_p(), IpcHandle.from_buffer_copy(handle)
        with torch.cuda.device(self._device):
            code = self._runtime.cudaIpcOpenMemHandle(ctypes.byref(address), raw, _LAZY_PEER_ACCESS)
            self._check("cudaIpcOpenMemHandle", code)
        assert address.value is not None
        return address.value

    def close(self, address: int) -> None:
        """Close opened memory. Raises CudaError."""
        with torch.cuda.device(self._device):
            self._check("cudaIpcCloseMemHandle", self._runtime.cudaIpcCloseMemHandle(ctypes.c_void_p(address)))

    def mark(self) -> torch.cuda.Event:
        """Record an event on the calling thread's current stream."""
        with torch.cuda.device(self._device):
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(self, parts: Sequence[tuple[int, int, int]], after: torch.cuda.Event) -> torch.cuda.Event:
        """Enqueue copies (target, source, bytes) after a `mark`. Returns the event of their end. Raises CudaError."""
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
    """Load the runtime that torch has loaded; a second copy would be a second client of the driver."""
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
