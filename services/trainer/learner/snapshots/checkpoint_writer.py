"""Save strategy for Megatron checkpoints that writes this rank's files in a thread.

Megatron's asynchronous writer forks, and collects results through a spawned manager that imports `__main__` again. A
rank has threads, gloo connections and CUDA, and must not fork. Plan and file format are Megatron's.
"""

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import services.trainer.megatron.cpu  # noqa: F401  must come before Megatron

# isort: split
import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import (
    FileSystemWriterAsync,
    _item_size,
    _split_by_size_and_type,
)
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.utils import _get_failure_dict

from services.trainer.megatron.disk_work import DiskWork

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
        self.write_buckets: list[Any] = []
        size = sum(_item_size(item) for item in plan.items if item.type != WriteItemType.BYTE_IO)
        files = min(MAX_FILES, max(1, size // FILE_BYTES))
        for items in _split_by_size_and_type(files, plan.items) if plan.items else ():
            data = [(item, planner.resolve_data(item)) for item in items]
            objects = [(item, value) for item, value in data if item.type == WriteItemType.BYTE_IO]
            tensors = [(item, value) for item, value in data if item.type != WriteItemType.BYTE_IO]
            name = f"{plan.storage_data.prefix}{len(self.write_buckets)}.distcp"
            self.write_buckets.append((str(Path(self.checkpoint_dir) / name), name, (objects, tensors)))
        self.results_queue: Any = queue.Queue() if self.write_buckets else None

    def write(self) -> None:
        """Write the files and wait until they are on disk.

        Raises:
            Exception: writing failed.
        """
        if not self.write_buckets:
            return
        # One after the other: two threads in torch.save wait for each other and are slower than one.
        self.results_queue.put(dict(enumerate(map(self._write_file, self.write_buckets))))

    def _write_file(self, bucket: Any) -> Any:
        path, name, (objects, tensors) = bucket
        results: queue.Queue[tuple[int, Any]] = queue.Queue()
        in_progress: queue.Queue[int] = queue.Queue()
        in_progress.put(0)
        # torch.save would write the whole storage of a view, so each view is copied just before it is written.
        copied = (path, name, (objects, _copies(tensors)))
        self.write_preloaded_data([self.transforms], 0, copied, results, in_progress, use_fsync=True)
        _, outcome = results.get_nowait()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class ThreadStrategy(TorchDistSaveShardedStrategy):
    """Writes Megatron's torch_dist format: all ranks plan together, a `ThreadWriter` writes each rank's files."""

    def __init__(self, disk: DiskWork) -> None:
        super().__init__(*FORMAT)
        self._disk = disk
        self._planned: tuple[ThreadWriter, Metadata | None, Any] | None = None
        self.tensors: list[torch.Tensor] = []
        """The tensors of this rank's files, once they are planned."""

    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path) -> AsyncRequest:
        """Plan the files. The request's function writes; then all ranks call `finish` together."""
        with self._disk.all_ranks(f"writing {checkpoint_dir}"):
            pass  # rank 0 has just written common.pt
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        writer = ThreadWriter(Path(checkpoint_dir))
        planner = MCoreSavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False)
        self._planned, *_ = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(renamed, False), writer, None, 0, planner=planner
        )
        self.tensors = [tensor for *_, (_, pairs) in writer.write_buckets or () for _, tensor in pairs]
        return AsyncRequest(writer.write, (), [])

    def finish(self) -> None:
        """Write the metadata on rank 0 while the other ranks wait. All ranks call it together.

        Raises:
            CheckpointException: a rank has not written its file.
            OSError: the metadata can't be written.
            DiskWorkFailed, DiskStalled: rank 0 failed to write it.
        """
        assert self._planned is not None
        writer, metadata, ranks = self._planned
        results = ranks.gather_object(writer.retrieve_write_results())
        folder = str(writer.checkpoint_dir)
        with self._disk.all_ranks(f"writing {folder}"):
            if ranks.is_coordinator:
                if failures := _get_failure_dict(results):
                    raise CheckpointException("write", failures)
                assert metadata is not None
                writer.finish(metadata, results)
                save_config(CheckpointingConfig(*FORMAT), folder)


def _copies(tensors: list[tuple[Any, Any]]) -> Iterator[tuple[Any, torch.Tensor]]:
    for item, tensor in tensors:
        yield item, tensor.detach().cpu().clone() if _is_view(tensor) else tensor.detach().cpu()


def _is_view(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().size() != tensor.numel() * tensor.itemsize
