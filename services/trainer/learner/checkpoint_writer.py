"""Writes this rank's part of a Megatron checkpoint in a thread of its own.

Megatron writes asynchronously by forking, and collects the results through a manager that it spawns, which imports
`__main__` again. A rank has threads, gloo connections and CUDA beside its training: it must not fork. So the plan is
Megatron's, and the file too, but a thread writes it.
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
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
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


class ThreadWriter(FileSystemWriterAsync):
    """One file of this rank, written by `write` from any thread."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), thread_count=1)

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Take what this rank writes. Tensors aren't copied here: the caller gives some that don't change any more."""
        data = [(item, planner.resolve_data(item)) for item in plan.items]
        objects = [(item, value) for item, value in data if item.type == WriteItemType.BYTE_IO]
        tensors = [(item, value) for item, value in data if item.type != WriteItemType.BYTE_IO]
        name = f"{plan.storage_data.prefix}0.distcp"
        path = str(Path(self.checkpoint_dir) / name)
        self.write_buckets = [(path, name, (objects, tensors))] if data else []
        self.results_queue: Any = queue.Queue() if data else None

    def write(self) -> None:
        """Write the file and wait until it is on the disk.

        Raises:
            Exception: what writing raised.
        """
        for path, name, (objects, tensors) in self.write_buckets or ():
            results: queue.Queue[tuple[int, Any]] = queue.Queue()
            under_way: queue.Queue[int] = queue.Queue()
            under_way.put(0)
            # A part of a tensor is saved with the whole, so each is copied, but only when its turn comes.
            bucket: Any = (path, name, (objects, _copies(tensors)))
            self.write_preloaded_data([self.transforms], 0, bucket, results, under_way, use_fsync=True)
            _, outcome = results.get_nowait()
            if isinstance(outcome, Exception):
                raise outcome
            assert self.results_queue is not None
            self.results_queue.put({0: outcome})


class ThreadStrategy(TorchDistSaveShardedStrategy):
    """Megatron's torch_dist format, planned by all ranks together and written by a `ThreadWriter` on each."""

    def __init__(self, disk: DiskWork) -> None:
        super().__init__(*FORMAT)
        self._disk = disk
        self._planned: tuple[ThreadWriter, Metadata | None, Any] | None = None
        self.tensors: list[torch.Tensor] = []
        """What this rank's file gets, once it is planned."""

    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path) -> AsyncRequest:
        """StepPlan. The request's function writes; `finish` is for all ranks together, once all have written."""
        with self._disk.together(f"writing {checkpoint_dir}"):
            pass  # rank 0 has just written common.pt
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        writer = ThreadWriter(Path(checkpoint_dir))
        planner = MCoreSavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False)
        self._planned, *_ = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(renamed, False), writer, None, 0, planner=planner
        )
        self.tensors = [tensor for *_, (_, pairs) in writer.write_buckets or () for _, tensor in pairs]  # type: ignore[misc]
        return AsyncRequest(writer.write, (), [])

    def finish(self) -> None:
        """Write what describes the files: rank 0 does, and the others wait. All ranks call it together.

        Raises:
            CheckpointException: a rank has not written its file.
            OSError: it can't be written.
            DiskWorkFailed, DiskStalled: rank 0 couldn't write it.
        """
        assert self._planned is not None
        writer, metadata, ranks = self._planned
        results = ranks.gather_object(writer.retrieve_write_results())
        folder = str(writer.checkpoint_dir)
        with self._disk.together(f"writing {folder}"):
            if ranks.is_coordinator:
                if failures := _get_failure_dict(results):
                    raise CheckpointException("write", failures)
                assert metadata is not None
                writer.finish(metadata, results)
                save_config(CheckpointingConfig(*FORMAT), folder)


def _copies(tensors: list[tuple[Any, Any]]) -> Iterator[tuple[Any, torch.Tensor]]:
    for item, tensor in tensors:
        yield item, tensor.detach().cpu().clone() if _is_part(tensor) else tensor.detach().cpu()


def _is_part(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().size() != tensor.numel() * tensor.itemsize
