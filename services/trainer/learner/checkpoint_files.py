"""A rank's checkpoint files: safetensors, whose metadata says which elements of the whole model each tensor holds.

    rank-00003-0.safetensors rank-00003-1.safetensors ...     RANK-NUMBER, of equal size

A file is a header followed by a contiguous range of host memory, so writing and hashing need no copy and no lock. The
range is aligned in memory and in the file, so the disk reads it directly (O_DIRECT): the page cache would cost a copy
and additional memory for each page.

A snapshot plans its files with uninitialised memory. A thread then copies the learner's state into this memory during
the next step's forward and backward pass. Only the optimizer step changes weights and optimizer state, so the next
optimizer step waits for the thread.
"""

import errno
import fcntl
import hashlib
import json
import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.trainer.batch.disk_files import Progress, in_parallel
from services.trainer.learner.checkpoint_pieces import (
    Box,
    Elements,
    Piece,
    Rectangle,
    elements,
    intersection,
    shown,
    without,
)
from services.trainer.learner.small_moments import Float8Values

STAGING_BYTES = 32 << 20
"""Size of each of two pinned buffers, in bytes. The GPU fills one while the host copies from the other."""
ALIGNMENT = 4096
"""Alignment of addresses, file offsets and sizes, in bytes, so that the disk can read memory directly."""


class HostMemory:
    """Host memory that successive snapshots reuse, because new memory from the system is slow."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._taken = 0
        self._touching: threading.Thread | None = None

    def begin(self) -> None:
        """Begin a new snapshot. Its calls of `take` reuse the last snapshot's memory, in the same order."""
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
        """Start a thread that zeroes the taken memory, so that the system allocates it. Call `touched` before use."""
        tensors = list(self._tensors)
        self._touching = threading.Thread(target=_touch, args=(tensors,), name="touch-checkpoint", daemon=True)
        self._touching.start()

    def touched(self) -> None:
        """Wait until the thread that `touch` started has ended, if any."""
        if self._touching is not None:
            self._touching.join()  # it only writes to memory
            self._touching = None


def _touch(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        for stretch in tensor.split(STAGING_BYTES):
            stretch.zero_()


class HostCopies:
    """Copies of tensors in host memory, which a thread makes later."""

    def __init__(self, device: torch.device, memory: HostMemory) -> None:
        """`device`: where the tensors are, unless in host memory. `memory`: target memory, which nothing else uses."""
        memory.begin()
        self.memory = memory
        self._device = device
        self._work: list[tuple[Tensor, Tensor | Float8Values]] = []
        """Target and source of each registered copy."""
        self._filled = threading.Event()
        self._error: Exception | None = None

    def add(self, target: Tensor, source: Tensor | Float8Values) -> None:
        """Register a copy of `source` to `target`, a part of `memory` with the same shape and type."""
        self._work.append((target, source.detach() if isinstance(source, Tensor) else source))

    def start(self) -> None:
        """Start a thread that makes the registered copies. All ranks call this in their training threads."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the copies run on another stream
        threading.Thread(target=self._fill, name="copy-checkpoint", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Wait until copying has ended or failed, so that the sources may change. Return False after `seconds`."""
        return self._filled.wait(seconds)

    def wait_or_raise(self, seconds: float) -> None:
        """Wait until all copies are made or one has failed, so that the sources may change.

        Raises:
            TimeoutError: copying took longer than `seconds`.
        """
        if not self.wait(seconds):
            raise TimeoutError(f"copying the state for a checkpoint took longer than {seconds:g} s")

    def check(self) -> None:
        """Wait until copying has ended; raise the copying thread's exception, if any."""
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
    """Yield the tensor in parts of `count` elements, so that only one part at a time exists in two element types."""
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
        """Running copy from the GPU: its CUDA event, the pinned buffer, and the host tensor to fill from the buffer."""
        if self._stream is not None:
            self._free = [torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

    def copy(self, target: Tensor, source: Tensor | Float8Values) -> None:
        """Copy `source` to the host tensor `target` of the same shape. The copy is complete after `finish`."""
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
        """Wait for the running copy from the GPU, and fill its target from the pinned buffer."""
        if self._arriving is None:
            return
        (arrived, pinned, to), self._arriving = self._arriving, None
        arrived.synchronize()
        to.copy_(pinned[: to.nbytes].view(to.dtype))
        self._free.append(pinned)


FILE_BYTES = 64 << 20
"""Approximate size of one of a rank's files, in bytes; a rank writes and hashes its files concurrently."""
MAX_FILES = 8
"""Maximum number of checkpoint files per rank."""
CHUNK_BYTES = 64 << 20
"""Size of the chunks that are hashed and written, in bytes. After each, the thread waits for Python's global lock."""
PIECES, GENERATORS = "pieces", "generators"
"""Keys of JSON values in a file's metadata: descriptions of pieces by tensor name, and the rank's generator states."""
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
"""Names that safetensors has for torch's element types."""


@dataclass(frozen=True)
class Stored:
    """Piece to be stored in a checkpoint, with its elements in the rank's memory."""

    piece: Piece
    """Place of the elements in the whole model."""
    tensor: Elements
    """The piece's elements, flat."""


def part_name(rank: int, number: int) -> str:
    """Return the name of a rank's checkpoint file `number`."""
    return f"rank-{rank:05d}-{number}.safetensors"


def rank_of(name: str) -> int | None:
    """Return the rank that a checkpoint file's name contains; None for other names."""
    kind, _, rest = name.partition("-")
    return int(rest.partition("-")[0]) if kind == "rank" and name.endswith(".safetensors") else None


class PartFiles:
    """Files that this rank writes for one checkpoint."""

    def __init__(self, stored: list[Stored], rank: int, generators: dict[str, Any], copies: HostCopies) -> None:
        """Plan the files. `copies` will copy their content to host memory."""
        self._files: dict[str, tuple[bytes, Tensor]] = {}
        size = sum(one.tensor.nbytes for one in stored)
        files = min(MAX_FILES, max(1, size // FILE_BYTES))
        for number, content in enumerate(divided(stored, files)):
            metadata = {GENERATORS: json.dumps(generators)} if number == 0 else {}
            memory = copies.memory.take(sum(one.tensor.nbytes for one in content))
            begin = 0
            for one in content:
                end = begin + one.tensor.nbytes
                copies.add(memory[begin:end].view(one.tensor.dtype), one.tensor)
                begin = end
            self._files[part_name(rank, number)] = _header(content, metadata), memory
        self.nbytes = sum(len(header) + memory.nbytes for header, memory in self._files.values())
        """Total size of the files, in bytes."""

    def write(self, folder: Path) -> dict[str, dict[str, Any]]:
        """Write the files and wait until they are on disk.

        Returns:
            Sizes and checksums by name; see `checkpoint_folders.describe`.

        Raises:
            OSError: the disk refuses a file, for example because it is full.
        """
        return in_parallel({name: partial(_write_file, folder / name, *file) for name, file in self._files.items()})


def divided(stored: list[Stored], files: int) -> list[list[Stored]]:
    """Divide pieces among `files` files of equal size, cutting pieces where a file ends.

    Pieces with large elements come first in a file, so that all pieces are aligned; safetensors allows no gaps.
    """
    share = -(-sum(one.tensor.nbytes for one in stored) // files)
    found: list[list[Stored]] = [[]]
    room = share
    for one in stored:
        rest: Stored | None = one
        while rest is not None:
            size = rest.tensor.element_size()
            if room < size and len(found) < files:
                found.append([])
                room = share
            count = rest.tensor.numel() if len(found) == files else min(rest.tensor.numel(), room // size)
            head, rest = _cut(rest, count)
            found[-1].append(head)
            room -= head.tensor.nbytes
    return [sorted(content, key=lambda one: -one.tensor.element_size()) for content in found]


def _cut(stored: Stored, count: int) -> tuple[Stored, Stored | None]:
    """Cut a piece into one with its first `count` elements and one with the rest; None if there is no rest."""
    if count == stored.tensor.numel():
        return stored, None
    middle = stored.piece.begin + count
    head = Stored(replace(stored.piece, end=middle), stored.tensor[:count])
    return head, Stored(replace(stored.piece, begin=middle), stored.tensor[count:])


def _header(content: list[Stored], metadata: dict[str, str]) -> bytes:
    """Return the header of a safetensors file, including the size field; its length is a multiple of ALIGNMENT."""
    pieces, tensors, begin = {}, {}, 0
    for one in content:
        piece, end = one.piece, begin + one.tensor.nbytes
        name = f"{piece.box.tensor}/{piece.state}@{'.'.join(map(str, piece.box.offset))}+{piece.begin}"
        pieces[name] = described(piece)
        tensors[name] = {
            "dtype": DTYPES[one.tensor.dtype],
            "shape": [one.tensor.numel()],
            "data_offsets": [begin, end],
        }
        begin = end
    assert len(tensors) == len(content), "two pieces are of the same elements"
    text = json.dumps({"__metadata__": {PIECES: json.dumps(pieces), **metadata}, **tensors}).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def described(piece: Piece) -> dict[str, Any]:
    """Return a piece's description for the metadata of its file."""
    box = piece.box
    return {
        "tensor": box.tensor,
        "state": piece.state,
        "whole": box.whole,
        "offset": box.offset,
        "shape": box.shape,
        "padded": box.padded,
        "begin": piece.begin,
        "end": piece.end,
    }


def piece_of(description: dict[str, Any]) -> Piece:
    """Restore a piece from the description that `described` returns."""
    whole, offset, shape = (tuple(description[name]) for name in ("whole", "offset", "shape"))
    box = Box(description["tensor"], whole, offset, shape, description["padded"])
    return Piece(description["state"], box, description["begin"], description["end"])


def _write_file(path: Path, header: bytes, memory: Tensor, progress: Progress) -> dict[str, Any]:
    """Write a file, wait until it is on disk, and return its size and checksum."""
    digest = hashlib.sha256(header)
    content = memory.numpy().data
    with path.open("xb", buffering=0) as file:
        _write_all(file, memoryview(header))
        for begin in range(0, len(content), CHUNK_BYTES):
            chunk = content[begin : begin + CHUNK_BYTES]
            _write_all(file, chunk)
            digest.update(chunk)
            progress(len(chunk))
        os.fsync(file.fileno())
    return {"bytes": len(header) + len(content), "sha256": digest.hexdigest()}


def _write_all(file: FileIO, content: memoryview) -> None:
    """Write all of `content`, bypassing the page cache where possible.

    It isn't possible for the last bytes of a file (fewer than ALIGNMENT), on some file systems, and after a write that
    a full disk cut short.
    """
    while content:
        aligned = len(content) - len(content) % ALIGNMENT
        try:
            count = _write(file, content[:aligned], os.O_DIRECT) if aligned else _write(file, content, 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            count = _write(file, content, 0)
        content = content[count:]


def _write(file: FileIO, content: memoryview, direct: int) -> int:
    """Write `content` or its beginning, and return the number of bytes written. `direct`: O_DIRECT or 0.

    Raises OSError, with EINVAL if direct writing is unsupported.
    """
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags & ~os.O_DIRECT | direct)
    return file.write(content)


READ_BYTES = 32 << 20
"""Approximate size of the read buffer in host memory, in bytes, for each file being read."""
TYPES = {name: dtype for dtype, name in DTYPES.items()}


class CheckpointError(Exception):
    """Raised if a checkpoint doesn't fit the model or the trainer."""


@dataclass
class Wanted:
    """Elements to load from a checkpoint, and where to put them."""

    piece: Piece
    """Place of the elements in the whole model."""
    target: Tensor
    """Destination of the elements: a flat tensor of any element type on any device."""


@dataclass(frozen=True)
class _Read:
    """Planned read of elements from a checkpoint file: a rectangle of a whole tensor."""

    rectangle: Rectangle
    source: Piece
    """Piece in the file that contains the rectangle."""
    begin: int
    """Offset of the piece `source` in the file, in bytes."""
    dtype: torch.dtype
    """Element type in the file."""
    wanted: Wanted


class PartFile:
    """Reader of one checkpoint file's header."""

    def __init__(self, path: Path) -> None:
        """Read the file's header. Raises CheckpointError if the file is not part of a checkpoint."""
        self.path = path
        with path.open("rb", buffering=0) as file:
            size = int.from_bytes(file.read(8), "little")
            self._header: dict[str, Any] = json.loads(file.read(size))
        self._begin = 8 + size
        self._metadata: dict[str, str] = self._header.pop("__metadata__", {})
        if PIECES not in self._metadata:
            raise CheckpointError(f"{path} is no part of a checkpoint: its metadata has no {PIECES}")

    @property
    def generators(self) -> dict[str, Any]:
        """States of the rank's random generators. Only the first file of a rank has them."""
        return dict(json.loads(self._metadata[GENERATORS]))

    @cached_property
    def pieces(self) -> list[tuple[Piece, int, torch.dtype]]:
        """Pieces in the file, each with its offset in bytes and its element type."""
        return [
            (piece_of(one), self._begin + self._header[name]["data_offsets"][0], TYPES[self._header[name]["dtype"]])
            for name, one in json.loads(self._metadata[PIECES]).items()
        ]


def part_files(folder: Path, rank: int) -> Iterator[PartFile]:
    """Yield the files of a checkpoint: first those of this rank number, then the other ranks', nearest first."""
    ranks = {path: of for path in folder.iterdir() if (of := rank_of(path.name)) is not None}
    for path in sorted(ranks, key=lambda path: (abs(ranks[path] - rank), path.name)):
        yield PartFile(path)


class Loading:
    """Plan of the elements that a rank loads from a checkpoint, and where the files have them."""

    def __init__(self, folder: Path, rank: int, wanted: list[Wanted]) -> None:
        """Find the wanted elements in the files of a checkpoint.

        Raises:
            CheckpointError: elements are missing or stored twice, or tensors have other shapes than in the model.
        """
        self._folder = folder
        self._reads: dict[Path, list[_Read]] = defaultdict(list)
        self._missing = [one.piece.box.rectangles(one.piece.begin, one.piece.end) for one in wanted]
        self._by_name: dict[tuple[str, str], list[int]] = defaultdict(list)
        self._wanted = wanted
        for number, one in enumerate(wanted):
            self._by_name[one.piece.box.tensor, one.piece.state].append(number)
        self._clipped: set[int] = set()
        left = set(range(len(wanted)))
        for file in part_files(folder, rank):
            if not left:
                break
            for piece, begin, dtype in file.pieces:
                for number in self._by_name.get((piece.box.tensor, piece.state), ()):
                    self._find(number, piece, file.path, begin, dtype)
                    if not self._missing[number]:
                        left.discard(number)
        if left:
            number = min(left)
            piece, missing = wanted[number].piece, self._missing[number]
            self._refuse(
                f"{elements(missing)} of {piece.end - piece.begin} elements of {piece.box.tensor} ({piece.state}) are "
                f"missing, the first ones {shown(missing[0])}: no rank's file there has them"
            )

    def read(self, progress: Progress, device: torch.device) -> None:
        """Read the elements into their targets, which may be on `device`. Raises OSError."""
        work = {path.name: partial(_read_file, path, reads) for path, reads in self._reads.items()}
        in_parallel(work, progress, partial(torch.cuda.set_device, device) if device.type == "cuda" else _nothing)

    def _find(self, number: int, piece: Piece, path: Path, begin: int, dtype: torch.dtype) -> None:
        """Plan to read those elements of `self._wanted[number]` that a piece in a file contains."""
        one = self._wanted[number]
        if not one.piece.box.fits(piece.box):
            self._refuse(f"{piece.box.tensor} has the shape {piece.box.whole} there, and {one.piece.box.whole} here")
        if number not in self._clipped:  # elements that only pad the tensor here keep their values
            self._clipped.add(number)
            self._missing[number] = list(_within(one.piece, piece.box.whole))
        for rectangle in _overlaps(piece, one.piece):
            missing = self._missing[number]
            self._missing[number] = [rest for each in missing for rest in without(each, rectangle)]
            if elements(missing) - elements(self._missing[number]) < elements([rectangle]):
                other, twice = self._found(one, rectangle)
                self._refuse(
                    f"elements {shown(twice)} of {piece.box.tensor} ({piece.state}) are in {other.name}, and once more "
                    f"in {path.name}"
                )
            self._reads[path].append(_Read(rectangle, piece, begin, dtype, one))

    def _found(self, wanted: Wanted, rectangle: Rectangle) -> tuple[Path, Rectangle]:
        """Return a file from which elements of the rectangle are read already, and the rectangle of these elements."""
        return next(
            (path, both)
            for path, reads in self._reads.items()
            for read in reads
            if read.wanted is wanted and (both := intersection(read.rectangle, rectangle)) is not None
        )

    def _refuse(self, why: str) -> None:
        raise CheckpointError(f"{self._folder} doesn't fit this model and trainer: {why}")


def _nothing() -> None:
    """Do nothing: threads that read into CPU memory need no CUDA device."""


def _within(piece: Piece, whole: tuple[int, ...]) -> Iterator[Rectangle]:
    """Yield a piece's rectangles, cut to the shape `whole` of the stored tensor."""
    everything = (tuple(0 for _ in whole), whole)
    for rectangle in piece.box.rectangles(piece.begin, piece.end):
        if (found := intersection(rectangle, everything)) is not None:
            yield found


def _overlaps(source: Piece, target: Piece) -> Iterator[Rectangle]:
    """Yield the rectangles of elements that two pieces of a tensor have in common."""
    if source.box.same_place(target.box):
        begin, end = max(source.begin, target.begin), min(source.end, target.end)
        found = target.box.rectangles(begin, end)
    else:
        found = [
            both
            for one in source.box.rectangles(source.begin, source.end)
            for other in target.box.rectangles(target.begin, target.end)
            if (both := intersection(one, other)) is not None
        ]
    whole = tuple(min(sizes) for sizes in zip(source.box.whole, target.box.whole, strict=True))
    everything = (tuple(0 for _ in whole), whole)
    for rectangle in found:
        if (inside := intersection(rectangle, everything)) is not None:
            yield inside


@torch.no_grad()
def _read_file(path: Path, reads: list[_Read], progress: Progress) -> None:
    staging = torch.empty(0, dtype=torch.uint8)
    with path.open("rb", buffering=0) as file:
        for read in reads:
            for rectangle in _chunks(read.rectangle, read.source.box, READ_BYTES // read.dtype.itemsize):
                first, last = _ends(rectangle, read.source.box)
                size = (last + 1 - first) * read.dtype.itemsize
                if len(staging) < size:
                    staging = torch.empty(size, dtype=torch.uint8)
                file.seek(read.begin + (first - read.source.begin) * read.dtype.itemsize)
                _read_all(file, staging[:size].numpy().data, path)
                source = staging[:size].view(read.dtype).as_strided(rectangle[1], read.source.box.strides)
                target, box = read.wanted.target, read.wanted.piece.box
                place = target.storage_offset() + box.place(rectangle[0]) - read.wanted.piece.begin
                target.as_strided(rectangle[1], box.strides, place).copy_(source)
                progress(size)


def _chunks(rectangle: Rectangle, box: Box, most: int) -> Iterator[Rectangle]:
    """Yield parts of a rectangle. From first to last element, each part spans at most `most` elements of the box."""
    first, last = _ends(rectangle, box)
    starts, sizes = rectangle
    cut = next((dimension for dimension, size in enumerate(sizes) if size > 1), None)
    if last + 1 - first <= most or cut is None:
        yield rectangle
        return
    half = sizes[cut] // 2
    yield from _chunks((starts, (*sizes[:cut], half, *sizes[cut + 1 :])), box, most)
    later = (*starts[:cut], starts[cut] + half, *starts[cut + 1 :])
    yield from _chunks((later, (*sizes[:cut], sizes[cut] - half, *sizes[cut + 1 :])), box, most)


def _ends(rectangle: Rectangle, box: Box) -> tuple[int, int]:
    """Return the offsets of a rectangle's first and last element in a box, in row-major order."""
    starts, sizes = rectangle
    return box.place(starts), box.place(tuple(at + size - 1 for at, size in zip(starts, sizes, strict=True)))


def _read_all(file: Any, memory: memoryview, path: Path) -> None:
    while memory:
        count = file.readinto(memory)
        if not count:
            raise OSError(f"{path} ends too early: it has changed since it was checked")
        memory = memory[count:]
