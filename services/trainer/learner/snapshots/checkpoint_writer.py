"""Save strategy for Megatron checkpoints that writes this rank's files in a thread.

Megatron's asynchronous writer forks, and collects results through a spawned manager that imports `__main__` again. A
rank has threads, gloo connections and CUDA, and must not fork. Plan and file format are Megatron's.
"""

import io
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import services.trainer.megatron.cpu  # noqa: F401  must come before Megatron

# isort: split
import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.strategies.filesystem_async import (
    FileSystemWriterAsync,
    _item_size,
    _split_by_size_and_type,
)
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import _DistWrapper, _get_failure_dict

from services.trainer.batch.durable import sync
from services.trainer.megatron.parallel import World
from services.trainer.megatron.rank_channel import all_ranks_agree

FORMAT = ("torch_dist", 1)
"""Name and version of Megatron's format."""


FILE_BYTES = 1 << 30
"""A rank divides its tensors into one file for each of these bytes, so that checksums are computed in parallel."""
MAX_FILES = 8
"""Files of a rank."""


class ThreadWriter(FileSystemWriterAsync):
    """Writes this rank's files, from any thread."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), thread_count=1)

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Collect this rank's data. Tensors aren't copied: the caller passes tensors that don't change any more."""
        size = sum(_item_size(item) for item in plan.items if item.type != WriteItemType.BYTE_IO)
        files = min(MAX_FILES, max(1, size // FILE_BYTES))
        buckets: list[Bucket] = []
        for items in _split_by_size_and_type(files, plan.items) if plan.items else ():
            data = [(item, planner.resolve_data(item)) for item in items]
            objects = [(item, value) for item, value in data if isinstance(value, io.BytesIO)]
            tensors = [(item, value) for item, value in data if isinstance(value, torch.Tensor)]
            buckets.append(Bucket(f"{plan.storage_data.prefix}{len(buckets)}.distcp", objects, tensors))
        self.use(buckets)

    def use(self, buckets: list["Bucket"]) -> None:
        """Set the files to write."""
        self.write_buckets: list[Bucket] = buckets
        self.results_queue: Any = queue.Queue() if buckets else None

    def write(self) -> None:
        """Write the files and wait until they are on disk.

        Raises:
            Exception: writing failed.
        """
        if not self.write_buckets:
            return
        # The manifest has a checksum of each file; torch's own of each tensor would take as long as all the rest.
        torch.serialization.set_crc32_options(False)
        # One after the other: two threads in torch.save wait for each other and are slower than one. But the disk need
        # not wait for the next file.
        with ThreadPoolExecutor(1, "sync-checkpoint") as disk:
            written, synced = {}, []
            for number, bucket in enumerate(self.write_buckets):
                written[number] = self._write_file(bucket)
                synced.append(disk.submit(sync, Path(self.checkpoint_dir) / bucket.name))
        for each in synced:
            each.result()
        self.results_queue.put(written)

    def _write_file(self, bucket: "Bucket") -> Any:
        path = str(Path(self.checkpoint_dir) / bucket.name)
        results: queue.Queue[tuple[int, Any]] = queue.Queue()
        in_progress: queue.Queue[int] = queue.Queue()
        in_progress.put(0)
        # torch.save would write the whole storage of a view.
        tensors = ((item, own_storage(tensor)) for item, tensor in bucket.tensors)
        self.write_preloaded_data(
            [self.transforms], 0, (path, bucket.name, (bucket.objects, tensors)), results, in_progress, use_fsync=False
        )
        _, outcome = results.get_nowait()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


@dataclass(frozen=True)
class Bucket:
    """One file of a rank."""

    name: str
    """Its name."""
    objects: list[tuple[WriteItem, io.BytesIO]]
    """Its serialized objects."""
    tensors: list[tuple[WriteItem, torch.Tensor]]
    """Its tensors, in the host's memory."""


@dataclass(frozen=True)
class FilePlan:
    """The files of a snapshot, for later ones of the same tensors in the same memory."""

    contents: tuple[Any, ...]
    """See `_contents`."""
    buckets: list[Bucket]
    """This rank's files."""
    metadata: Metadata | None
    """The index of all ranks' files; rank 0's."""
    ranks: _DistWrapper
    """All ranks."""


class SnapshotFiles:
    """The files of a snapshot in Megatron's torch_dist format: each rank writes its own."""

    def __init__(self, content: ShardedStateDict, folder: Path, world: World, last: FilePlan | None) -> None:
        """Plan the files. All ranks create it together.

        Args:
            content: the sharded part of the state, of which the main replicas are saved.
            folder: where the files go.
            world: this rank's place in the world.
            last: the plan of the last snapshot, on all ranks or on none. It is used if it fits on all of them, since
                planning takes a tenth of a second.
        """
        self._world = world
        self._writer = ThreadWriter(folder)
        contents = _contents(content)
        if last is not None and all_ranks_agree(last.contents == contents, device=world.device):
            self.plan = last
            self._writer.set_up_storage_writer(last.ranks.is_coordinator)
            self._writer.use(_with_objects(last.buckets, content))
        else:
            self.plan = self._make_plan(content, contents)

    def _make_plan(self, content: ShardedStateDict, contents: tuple[Any, ...]) -> FilePlan:
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(content, keep_only_main_replica=True)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        (_, metadata, ranks), *_ = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(renamed, False), self._writer, None, 0, planner=planner
        )
        return FilePlan(contents, self._writer.write_buckets, metadata, ranks)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of this rank's files."""
        return [tensor for bucket in self.plan.buckets for _, tensor in bucket.tensors]

    def write(self) -> None:
        """Write this rank's files, from any thread, and wait until they are on disk; see `ThreadWriter.write`."""
        self._writer.write()

    def finish(self) -> str:
        """Write the metadata on rank 0 while the other ranks wait. All ranks call it together.

        Returns:
            ''; on rank 0 also the error, if it can't be written, as on a full disk.

        Raises:
            CheckpointException: a rank has not written its file.
            DiskWorkFailed, DiskStalled: rank 0 is gone, or stuck.
        """
        writer, metadata, ranks = self._writer, self.plan.metadata, self.plan.ranks
        results: Any = ranks.gather_object(writer.retrieve_write_results())
        folder = str(writer.checkpoint_dir)
        with self._world.disk.all_ranks(f"writing {folder}"):
            if ranks.is_coordinator:
                if failures := _get_failure_dict(results):
                    raise CheckpointException("write", failures)
                assert metadata is not None
                try:
                    writer.finish(metadata, results)
                    save_config(CheckpointingConfig(*FORMAT), folder)
                except OSError as error:  # the other ranks need not fail
                    return f"{type(error).__name__}: {error}"
        return ""


def _contents(content: ShardedStateDict) -> tuple[Any, ...]:
    """Return what a plan of the files depends on."""
    found: list[Any] = []
    for part in nested_values(content):
        if isinstance(part, ShardedTensor):
            place = (part.global_shape, part.global_offset, part.axis_fragmentations, part.replica_id)
            assert part.data is not None
            found.append((part.key, place, part.data.shape, part.data.dtype, part.data.data_ptr()))
        else:
            found.append((part.unique_key, part.replica_id))
    return tuple(found)


def _with_objects(buckets: list[Bucket], content: ShardedStateDict) -> list[Bucket]:
    """Return the files with the objects of another snapshot."""
    found = {part.unique_key: part.data for part in nested_values(content) if isinstance(part, ShardedObject)}
    nothing = serialized([None])  # most of them: the extra state of each layer

    def objects(bucket: Bucket) -> Iterator[tuple[WriteItem, io.BytesIO]]:
        for item, _ in bucket.objects:
            value = found[item.index.fqn]
            yield item, nothing if value is None else serialized([value])  # lists, as Megatron saves

    return [replace(bucket, objects=list(objects(bucket))) for bucket in buckets]


def serialized(value: Any) -> io.BytesIO:
    """Return a value as `torch.save` writes it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer


def own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor of the same memory whose storage has nothing else."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    data = torch.from_numpy(tensor.reshape(-1).view(torch.uint8).numpy())
    return data.view(tensor.dtype).view(tensor.shape)
