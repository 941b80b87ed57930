"""Load strategies for Megatron checkpoints that wait for other ranks' reading outside of collectives.

With Megatron's own strategies, ranks that finish first wait in a collective for the others. That can take long: the
first data-parallel rank of a model reads the whole optimizer state, and the others almost nothing.
"""

from pathlib import Path
from typing import Any

import services.trainer.megatron.cpu  # noqa: F401  must come before Megatron

# isort: split
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, StateDict
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    TorchDistLoadShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import FileSystemReader, load_state_dict
from torch.distributed.checkpoint.planner import ReadItem

from services.trainer.megatron.disk_work import DiskWork, Progress


class ReadCommonStrategy(TorchCommonLoadStrategy):
    """Reads Megatron's common.pt."""

    def __init__(self, disk: DiskWork) -> None:
        self._disk = disk

    def load_common(self, checkpoint_dir: str | Path) -> StateDict:
        """Read it on every rank. All ranks call it together."""
        with self._disk.all_ranks(f"reading {checkpoint_dir}"):
            return super().load_common(checkpoint_dir)


class ReadStrategy(TorchDistLoadShardedStrategy):
    """Reads Megatron's torch_dist format."""

    def __init__(self, disk: DiskWork) -> None:
        super().__init__()
        self._disk = disk

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> StateDict:
        """Read this rank's part as Megatron's strategy does, without collectives. All ranks call it together."""
        tensors = [part for part in nested_values(sharded_state_dict) if isinstance(part, ShardedTensor)]
        renamed, flat, names = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        content = mcore_to_pyt_state_dict(renamed, True)
        with self._disk.all_ranks(f"reading {checkpoint_dir}") as progress:
            planner = _CountingPlanner(
                progress,
                shapes_validation_sharded_tensors=[part for part in tensors if not part.allow_shape_mismatch],
                allow_shape_mismatch_sharded_tensors={part.key: part for part in tensors if part.allow_shape_mismatch},
            )
            load_state_dict(content, FileSystemReader(checkpoint_dir), no_dist=True, planner=planner)
        loaded = {name: _unwrap_pyt_sharded_tensor(value) for name, value in content.items()}
        loaded = _replace_sharded_keys_with_state_dict_keys(loaded, flat, names)
        _restore_dict_types(loaded, sharded_state_dict)
        return loaded


class _CountingPlanner(MCoreLoadPlanner):
    """Megatron's planner, which also reports the bytes read."""

    def __init__(self, progress: Progress, **settings: Any) -> None:
        super().__init__(**settings)
        self._progress = progress

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Store a tensor and report its bytes."""
        super().commit_tensor(read_item, tensor)
        self._progress(tensor.nbytes)
