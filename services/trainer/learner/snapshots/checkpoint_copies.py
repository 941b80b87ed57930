"""Copies of a learner's state in the host's memory, made during the next step's forward and backward pass.

Only the optimizer step changes weights and optimizer state, so a snapshot need not copy them at once. It plans its
files with uninitialised memory, which a thread fills; the next optimizer step waits for the thread.
"""

import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from services.trainer.learner.small_moments import Float8Values

STAGING_BYTES = 32 << 20
"""Bytes of each of two pinned buffers between GPU and host: the GPU fills one while the host empties the other."""
ALIGNMENT = 4096
"""Alignment of addresses, file offsets and sizes, in bytes, so that the disk can read memory directly."""


class HostMemory:
    """Host memory that successive snapshots reuse, because new memory from the system is slow."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._taken = 0
        self._touching: threading.Thread | None = None

    def begin(self) -> None:
        """Begin a new snapshot, whose calls of `take` reuse the memory in the same order."""
        self._taken = 0

    def take(self, size: int) -> Tensor:
        """Return aligned memory, uint8 [size]: reused if the last snapshot's same call had this size, else new."""
        index, self._taken = self._taken, self._taken + 1
        if index < len(self._tensors) and len(self._tensors[index]) == size:
            return self._tensors[index]
        del self._tensors[index:]
        memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
        begin = -memory.data_ptr() % ALIGNMENT
        self._tensors.append(memory[begin : begin + size])
        return self._tensors[index]

    def touch(self) -> None:
        """Start a thread that zeroes the taken memory, so that the system provides it. Call `touched` before use."""
        tensors = list(self._tensors)
        self._touching = threading.Thread(target=_touch, args=(tensors,), name="touch-checkpoint", daemon=True)
        self._touching.start()

    def touched(self) -> None:
        """Wait for `touch`, if it was called."""
        if self._touching is not None:
            self._touching.join()  # it only writes to memory
            self._touching = None


def _touch(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        for stretch in tensor.split(STAGING_BYTES):
            stretch.zero_()


class HostCopies:
    """Host memory that will be filled with the current values of tensors."""

    def __init__(self, device: torch.device, memory: HostMemory) -> None:
        """Copy tensors on `device` or in the host's memory to `memory`, which nothing else uses now."""
        memory.begin()
        self.memory = memory
        self._device = device
        self._work: list[tuple[Tensor, Tensor | Float8Values]] = []
        """Targets and sources."""
        self._filled = threading.Event()
        self._error: Exception | None = None

    def add(self, target: Tensor, source: Tensor | Float8Values) -> None:
        """Register a copy of `source` to `target`, a part of the memory with the same shape and type."""
        self._work.append((target, source.detach() if isinstance(source, Tensor) else source))

    def start(self) -> None:
        """Start copying in a thread. All ranks call it in their training threads."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the copies run on another stream
        threading.Thread(target=self._fill, name="copy-checkpoint", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Wait until copying has ended or failed, so that the sources may change. Return False after `seconds`."""
        return self._filled.wait(seconds)

    def wait_or_raise(self, seconds: float) -> None:
        """Wait until the sources may change.

        Raises:
            TimeoutError: copying took longer than `seconds`.
        """
        if not self.wait(seconds):
            raise TimeoutError(f"copying the state for a checkpoint took longer than {seconds:g} s")

    def check(self) -> None:
        """Wait for the copies; raise the exception of the copying thread, if any."""
        self._filled.wait()
        if self._error is not None:
            raise self._error

    def _fill(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a new thread starts with device 0
            self.memory.touched()
            stage = _Stage(self._device)
            for target, source in self._work:
                stage.copy(target, source)
            stage.finish()
        except Exception as error:  # `check` raises it in the thread that needs the copies
            self._error = error
        finally:
            self._work.clear()
            self._filled.set()


def _parts(source: Tensor | Float8Values, count: int) -> Iterator[Tensor]:
    """Yield `count` elements at a time, so that no more than these exist in two element types at once."""
    if isinstance(source, Tensor):
        yield from source.reshape(-1).split(count)
    else:
        yield from (part.read() for part in source.split(count))


class _Stage:
    """Copies tensors to the host; from a GPU on a separate stream, through pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: list[Tensor] = []
        self._arriving: tuple[torch.cuda.Event, Tensor, Tensor] | None = None
        """The copy in progress: its event, the pinned buffer, and the target."""
        if self._stream is not None:
            self._free = [torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

    def copy(self, target: Tensor, source: Tensor | Float8Values) -> None:
        """Copy to a host tensor of the same shape; complete after `finish`."""
        count = STAGING_BYTES // source.element_size()
        parts = zip(target.view(-1).split(count), _parts(source, count), strict=True)
        if self._stream is None or not source.is_cuda:
            for to, piece in parts:
                to.copy_(piece)
            return
        with torch.cuda.stream(self._stream):
            for to, piece in parts:
                pinned = self._free.pop()
                pinned[: piece.nbytes].view(piece.dtype).copy_(piece, non_blocking=True)
                arrived = self._stream.record_event()
                self.finish()
                self._arriving = arrived, pinned, to

    def finish(self) -> None:
        """Complete the copy in progress."""
        if self._arriving is None:
            return
        (arrived, pinned, to), self._arriving = self._arriving, None
        arrived.synchronize()
        to.copy_(pinned[: to.nbytes].view(to.dtype))
        self._free.append(pinned)
