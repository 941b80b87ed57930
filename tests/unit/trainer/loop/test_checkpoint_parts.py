"""Parts of a checkpoint: what one layout of ranks writes, another one reads, and only what it needs."""

import ctypes
import json
import mmap
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from services.trainer.learner import checkpoint_files
from services.trainer.learner.checkpoint_files import (
    CheckpointError,
    HostCopies,
    HostMemory,
    Loading,
    PartFiles,
    Stored,
    Wanted,
    divided,
)
from services.trainer.learner.checkpoint_pieces import Box, Piece, intersection, without
from services.trainer.loop.checkpoint_folders import describe

CPU = torch.device("cpu")
SHAPE = (3, 10, 8)
"""Of the whole tensor: layers, rows, columns."""
LAYOUTS: dict[str, list[tuple[tuple[slice, ...], int]]] = {
    "one": [((slice(0, 3), slice(0, 10), slice(0, 8)), 1)],
    "data-parallel": [((slice(0, 3), slice(0, 10), slice(0, 8)), 3)],
    "rows": [((slice(0, 3), slice(at, at + 5), slice(0, 8)), 2) for at in (0, 5)],
    "columns": [((slice(0, 3), slice(0, 10), slice(at, at + 4)), 2) for at in (0, 4)],
    "layers": [((slice(at, at + 1), slice(0, 10), slice(0, 8)), 3) for at in range(3)],
}
"""Boxes of the tensor, and how many data-parallel ranks divide each."""


def pieces(layout: str, state: str = "exp_avg") -> list[Piece]:
    """The piece of each rank. Data-parallel ranks have ranges of odd lengths."""
    found = []
    for slices, ranks in LAYOUTS[layout]:
        box = Box("w", SHAPE, tuple(s.start for s in slices), tuple(s.stop - s.start for s in slices))
        borders = [box.numel * rank // ranks + (rank not in (0, ranks)) for rank in range(ranks + 1)]
        found += [Piece(state, box, begin, end) for begin, end in pairwise(borders)]
    return found


def values(piece: Piece, tensor: np.ndarray) -> np.ndarray:
    """The elements of a piece, as numpy has them."""
    box = piece.box
    part = tensor[tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))]
    return part.ravel()[piece.begin : piece.end].copy()


def write(folder: Path, rank: int, stored: list[Stored]) -> dict[str, Any]:
    copies = HostCopies(CPU, HostMemory())
    files = PartFiles(stored, rank, {"rank": rank}, copies)
    copies.start()
    copies.check()
    return files.write(folder)


def save(folder: Path, layout: str, tensor: np.ndarray, dtype: torch.dtype = torch.float32) -> None:
    folder.mkdir(exist_ok=True)
    for rank, piece in enumerate(pieces(layout)):
        write(folder, rank, [Stored(piece, torch.from_numpy(values(piece, tensor)).to(dtype))])


def cached_pages(path: Path) -> int:
    """Count the pages of a file that the page cache has."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        failed = ctypes.CDLL(None, use_errno=True).mincore(ctypes.byref(start), ctypes.c_size_t(len(mapped)), pages)
        del start  # else the map can't be closed
        assert not failed, os.strerror(ctypes.get_errno())
    return sum(page & 1 for page in pages)


@pytest.fixture
def tensor() -> np.ndarray:
    return np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)


def test_a_range_of_a_box_is_rectangles_of_the_whole_tensor() -> None:
    numbers = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    box = Box("w", SHAPE, (1, 2, 3), (2, 5, 4))
    inside = numbers[1:3, 2:7, 3:7].ravel()
    for begin in range(0, 40, 3):
        for end in range(begin, 41):
            covered: list[int] = []
            for starts, sizes in box.rectangles(begin, end):
                assert intersection((starts, sizes), (box.offset, box.shape)) == (starts, sizes)
                place = tuple(slice(at, at + size) for at, size in zip(starts, sizes, strict=True))
                covered += numbers[place].ravel().tolist()
                assert inside[box.place(starts)] == numbers[starts]
            assert covered == inside[begin:end].tolist()


@pytest.mark.parametrize("there", LAYOUTS)
@pytest.mark.parametrize("here", LAYOUTS)
def test_every_layout_reads_what_every_other_one_wrote(
    tmp_path: Path, tensor: np.ndarray, there: str, here: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_files, "READ_BYTES", 100)  # so that most ranges are read in several steps
    save(tmp_path, there, tensor)
    for rank, piece in enumerate(pieces(here)):
        target = torch.full((piece.end - piece.begin,), torch.nan)
        Loading(tmp_path, rank, [Wanted(piece, target)]).read(lambda count: None, CPU)
        assert np.array_equal(target.numpy(), values(piece, tensor))


def test_the_same_layout_opens_only_its_own_part_and_another_reads_only_what_it_needs(
    tmp_path: Path, tensor: np.ndarray
) -> None:
    save(tmp_path, "data-parallel", tensor)
    (piece,) = pieces("one")
    for rank, own in enumerate(pieces("data-parallel")):
        loading = Loading(tmp_path, rank, [Wanted(own, torch.empty(own.end - own.begin))])
        assert [path.name for path in loading._reads] == [f"rank-{rank:05d}-0.safetensors"]
    read: list[int] = []
    some = Piece(piece.state, piece.box, 60, 190)  # of all three parts
    loading = Loading(tmp_path, 1, [Wanted(some, torch.empty(130))])
    loading.read(read.append, CPU)
    assert len(loading._reads) == 3
    assert sum(read) == 130 * 4


def test_a_rank_reads_no_part_that_it_does_not_need(tmp_path: Path, tensor: np.ndarray) -> None:
    save(tmp_path, "data-parallel", tensor)
    (tmp_path / "rank-00002-0.safetensors").write_bytes(b"not a header")
    own = pieces("data-parallel")[0]
    Loading(tmp_path, 0, [Wanted(own, torch.empty(own.end - own.begin))])


def test_values_of_another_type_are_converted(tmp_path: Path, tensor: np.ndarray) -> None:
    save(tmp_path, "rows", tensor, torch.bfloat16)
    (piece,) = pieces("one")
    target = torch.empty(piece.end)
    Loading(tmp_path, 0, [Wanted(piece, target)]).read(lambda count: None, CPU)
    assert torch.equal(target, torch.from_numpy(tensor).bfloat16().float().ravel())


def test_a_padded_vocabulary_fits_other_paddings(tmp_path: Path) -> None:
    had = torch.arange(6 * 2.0)
    small, large = (Box("v", (rows, 2), (0, 0), (rows, 2), padded=True) for rows in (6, 8))
    write(tmp_path, 0, [Stored(Piece("weights", small, 0, 12), had)])
    target = torch.full((16,), -1.0)
    Loading(tmp_path, 0, [Wanted(Piece("weights", large, 0, 16), target)]).read(lambda count: None, CPU)
    assert target.tolist() == [*had.tolist(), -1, -1, -1, -1]  # what only pads stays
    folder = tmp_path / "larger"
    folder.mkdir()
    write(folder, 0, [Stored(Piece("weights", large, 0, 16), target)])
    again = torch.zeros(12)
    Loading(folder, 0, [Wanted(Piece("weights", small, 0, 12), again)]).read(lambda count: None, CPU)
    assert torch.equal(again, had)


def test_what_is_missing_or_has_another_shape_is_named(tmp_path: Path, tensor: np.ndarray) -> None:
    save(tmp_path, "rows", tensor)
    (piece,) = pieces("one")
    (tmp_path / "rank-00001-0.safetensors").unlink()
    wanted = Wanted(piece, torch.empty(240))
    said = (
        r"doesn't fit this model and trainer: \d+ of 240 elements of w \(exp_avg\) are missing, the first ones "
        r"\[\d+:\d+, \d+:\d+, 0:8\]"
    )
    with pytest.raises(CheckpointError, match=said):
        Loading(tmp_path, 0, [wanted])
    other = Box("w", (3, 10, 9), (0, 0, 0), (3, 10, 9))
    with pytest.raises(CheckpointError, match=r"w has the shape \(3, 10, 8\) there, and \(3, 10, 9\) here"):
        Loading(tmp_path, 0, [Wanted(Piece("exp_avg", other, 0, 270), torch.empty(270))])


def test_elements_in_two_parts_are_named(tmp_path: Path, tensor: np.ndarray) -> None:
    save(tmp_path, "layers", tensor)
    box = Box("w", SHAPE, (0, 4, 0), (3, 2, 8))
    write(tmp_path, 9, [Stored(Piece("exp_avg", box, 20, 24), torch.zeros(4))])  # of layer 1, which begins at 16
    (piece,) = pieces("one")
    (tmp_path / "rank-00000-0.safetensors").unlink()  # else the last file isn't opened
    said = (
        r"elements \[1:2, 4:5, 4:8\] of w \(exp_avg\) are in rank-00004-0\.safetensors, and once more in rank-00009-0"
    )
    with pytest.raises(CheckpointError, match=said):
        Loading(tmp_path, 0, [Wanted(piece, torch.empty(240))])


def test_a_rectangle_without_another_one_has_all_the_rest_once() -> None:
    numbers = np.arange(np.prod(SHAPE)).reshape(SHAPE)

    def inside(rectangle: Any) -> list[int]:
        place = tuple(slice(at, at + size) for at, size in zip(*rectangle, strict=True))
        return list(numbers[place].ravel().tolist())

    one = ((0, 2, 1), (3, 6, 5))
    for other in (((1, 3, 2), (1, 2, 2)), ((0, 0, 0), SHAPE), ((0, 4, 0), (3, 9, 3)), ((0, 9, 0), (1, 1, 1))):
        left = [number for rectangle in without(one, other) for number in inside(rectangle)]
        assert sorted(left) == sorted(set(inside(one)) - set(inside(other)))


def test_files_are_safetensors_of_equal_size_with_their_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_files, "FILE_BYTES", 1000)
    monkeypatch.setattr(checkpoint_files, "MAX_FILES", 3)
    box = Box("w", (500,), (0,), (500,))
    tensors = {
        "weights": torch.rand(500),
        "exp_avg": torch.rand(500).bfloat16(),
        "exp_avg_sq": torch.rand(500).bfloat16(),
    }
    told = write(tmp_path, 7, [Stored(Piece(state, box, 0, 500), tensor) for state, tensor in tensors.items()])
    assert told == {path.name: describe(path) for path in tmp_path.iterdir()}
    assert sorted(told) == [f"rank-00007-{number}.safetensors" for number in range(3)]
    found: dict[str, list[tuple[int, torch.Tensor]]] = {state: [] for state in tensors}
    for name in told:
        with safe_open(tmp_path / name, "pt") as file:
            contents = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            described = json.loads(file.metadata()["pieces"])
        assert sum(tensor.nbytes for tensor in contents.values()) in range(1330, 1340)
        for name, tensor in contents.items():
            one = described[name]
            assert one["end"] - one["begin"] == len(tensor)
            found[one["state"]].append((one["begin"], tensor))
    for state, parts in found.items():
        assert torch.equal(torch.cat([tensor for _, tensor in sorted(parts, key=lambda part: part[0])]), tensors[state])


def test_a_rank_without_pieces_has_a_file() -> None:
    assert divided([], 1) == [[]]


def test_a_file_takes_no_page_cache_and_is_whole_without_alignment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_files, "CHUNK_BYTES", 1 << 20)
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(1 << 20))
    with probe.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    only_memory = cached_pages(probe) > 0
    header = bytes(checkpoint_files.ALIGNMENT)
    stretch = HostMemory().take((3 << 20) + 5000)
    stretch.random_(0, 256)
    for name, memory in {"aligned": stretch, "not": stretch[1:], "small": stretch[:100], "empty": stretch[:0]}.items():
        path = tmp_path / name
        report = checkpoint_files._write_file(path, header, memory, lambda count: None)
        assert report == describe(path)
        if name == "aligned" and not only_memory:
            path = tmp_path / "again"  # `describe` has read the other
            checkpoint_files._write_file(path, header, memory, lambda count: None)
            assert cached_pages(path) < 20
        assert path.read_bytes() == header + memory.numpy().tobytes()
