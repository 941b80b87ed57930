"""The files of a rank's part of a checkpoint: safetensors, whose metadata says which elements each tensor has.

    rank-00003-0.safetensors rank-00003-1.safetensors ...     RANK-NUMBER, of equal size

A file is one stretch of the host's memory behind a header, so that writing and hashing it need no copy and no lock.
This stretch is aligned in memory and in the file, so that the disk takes it straight from there (O_DIRECT): the page
cache would cost a copy, and new memory of the system for each page.
"""

import errno
import fcntl
import hashlib
import json
import os
from dataclasses import dataclass, replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.trainer.batch.disk_files import Progress, in_parallel
from services.trainer.learner.snapshots.checkpoint_copies import ALIGNMENT, HostCopies
from services.trainer.learner.snapshots.pieces import Box, Elements, Piece

FILE_BYTES = 64 << 20
"""Approximate bytes per file of a rank's part; its files are written and hashed concurrently."""
MAX_FILES = 8
"""Files of a rank."""
CHUNK_BYTES = 64 << 20
"""Bytes to hash and write at a time. After each chunk the thread waits for its turn among Python's threads."""
PIECES, GENERATORS = "pieces", "generators"
"""Names in a file's metadata, of JSON: the pieces by tensor; the states of the rank's random generators."""
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
"""Names of element types in safetensors."""


@dataclass(frozen=True)
class Stored:
    """A piece in a rank's memory."""

    piece: Piece
    """The stored piece."""
    tensor: Elements
    """Elements of the piece."""


def part_name(rank: int, number: int) -> str:
    """Return the name of one of a rank's files."""
    return f"rank-{rank:05d}-{number}.safetensors"


def rank_of(name: str) -> int | None:
    """Return the rank of a rank's file, by its name; None for other files."""
    kind, _, rest = name.partition("-")
    return int(rest.partition("-")[0]) if kind == "rank" and name.endswith(".safetensors") else None


class PartFiles:
    """The files of this rank's part of one checkpoint."""

    def __init__(self, stored: list[Stored], rank: int, generators: dict[str, Any], copies: HostCopies) -> None:
        """Plan the files and their copies in the host's memory, which `copies` fills."""
        self._files: dict[str, tuple[bytes, Tensor]] = {}
        size = sum(one.tensor.nbytes for one in stored)
        files = min(MAX_FILES, max(1, size // FILE_BYTES))
        for number, content in enumerate(divided(stored, files)):
            metadata = {GENERATORS: json.dumps(generators)} if number == 0 else {}
            memory = copies.memory(sum(one.tensor.nbytes for one in content))
            begin = 0
            for one in content:
                end = begin + one.tensor.nbytes
                copies.add(memory[begin:end].view(one.tensor.dtype), one.tensor)
                begin = end
            self._files[part_name(rank, number)] = _header(content, metadata), memory
        self.nbytes = sum(len(header) + memory.nbytes for header, memory in self._files.values())
        """Total bytes of the files."""

    def write(self, folder: Path) -> dict[str, dict[str, Any]]:
        """Write the files and wait until they are on disk.

        Returns:
            Sizes and checksums by name; see `checkpoint_folders.describe`.

        Raises:
            OSError: the disk refuses, such as a full one.
        """
        return in_parallel({name: partial(_write_file, folder / name, *file) for name, file in self._files.items()})


def divided(stored: list[Stored], files: int) -> list[list[Stored]]:
    """Divide pieces among files of equal size, cutting those at the borders.

    Pieces with large elements come first in a file, so that all are aligned: safetensors has no holes.
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
    """Cut a piece into its first elements and the rest."""
    if count == stored.tensor.numel():
        return stored, None
    middle = stored.piece.begin + count
    head = Stored(replace(stored.piece, end=middle), stored.tensor[:count])
    return head, Stored(replace(stored.piece, begin=middle), stored.tensor[count:])


def _header(content: list[Stored], metadata: dict[str, str]) -> bytes:
    """Return the header of a safetensors file, with the size before it; its length is a multiple of ALIGNMENT."""
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
    """Return a piece's metadata for its file (`Piece`, `Box`)."""
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
    """Return the piece that `described` has described."""
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
    """Write `content`, in as many writes as the system needs, past the page cache where that is possible.

    It isn't possible for the last bytes of a file, fewer than ALIGNMENT, on some file systems, and after a write that a
    full disk cut short.
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
    """Write a part of it, with O_DIRECT or 0. Return the bytes written. Raises OSError: EINVAL if direct writing is
    unsupported."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags & ~os.O_DIRECT | direct)
    return file.write(content)
