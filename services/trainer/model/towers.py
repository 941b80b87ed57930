"""Vision and audio towers: transformers' modules for media, whole on each rank of the first pipeline stage.

Each rank replaces the embeddings of the media tokens in its slice by the towers' rows, and adds DeepStack's rows after
the first layers, so that ranks send nothing. The rows of a frozen tower are cached by item (`TowerOutputs`).

A trained tower runs once for the items of a micro-batch. Its graph is cut from the decoder's: recomputed layers have
several backward passes, the first of which would free a shared graph. The decoder's gradients of the tower's output
accumulate in leaf tensors and pass through the tower once.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from relaxd.data.towers import TowerOutputs
from relaxd.media.media_tokens import Grid
from relaxd.media.placeholders import AUDIO, IMAGE, VIDEO
from services.trainer.model.architecture import AUDIO_TOWER, VISUAL, ModelError, TowerArchitecture
from services.trainer.transformer.sequence_layout import DeepStack

TOWERS = "towers"
"""Name of the module that holds the towers, in the model's first pipeline stage."""
TOWER_OF_KIND = {IMAGE: VISUAL, VIDEO: VISUAL, AUDIO: AUDIO_TOWER}
"""Tower that reads each kind of media."""
KEPT_BYTES = 1 << 31
"""Default limit of the cache of frozen towers' outputs, in bytes of host memory."""


@dataclass(frozen=True)
class DeviceMedia:
    """The media of a micro-batch on one rank: I distinct images, videos and sounds.

    M rows of the towers' output belong to tokens of this rank's slice.
    """

    hashes: tuple[str, ...]
    """Hash of each of the I items."""
    towers: tuple[str, ...]
    """Name of each item's tower."""
    inputs: Callable[[int], Tensor]
    """Returns the input of an item's tower, by the item's index: patches, float32 [patches, values], or a spectrogram,
    float32 [bands, frames]."""
    grids: Sequence[Grid]
    """Size of each item, as its tower expects it."""
    counts: Sequence[int]
    """Number of output rows, one per token, of each item."""
    rows: Tensor
    """Indices of the M rows in the towers' concatenated output, int64 [M]."""
    places: Tensor
    """Index of each row's token in this rank's slice of the micro-batch, int64 [M]."""


def build_tower(tower: TowerArchitecture, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """Build a vision or audio tower, without loading weights.

    Raises:
        ModelError: transformers refuses the configuration.
    """
    with device:
        module = _module(tower)
    for part in module.modules():
        if isinstance(part, torch.nn.Conv3d):
            part.__class__ = _PatchProduct
    for parameter in module.parameters():  # not the frequencies, which are buffers and stay in float32
        parameter.data = parameter.data.to(dtype)
    return module


@lru_cache
def tower_shapes(tower: TowerArchitecture) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a tower's parameters, by name."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in _module(tower).named_parameters()}


def media_rows(towers: torch.nn.ModuleDict, media: DeviceMedia, frozen: TowerOutputs) -> tuple[Tensor, DeepStack]:
    """Run the towers on media, or read frozen towers' outputs from the cache.

    Args:
        towers: the towers, by name.
        media: the items.
        frozen: cache of the frozen towers' outputs.

    Returns:
        The rows of this rank's media tokens, [M, hidden], and DeepStack's rows. Gradients of both reach the parameters
        of trained towers when a backward pass arrives at the first result.
    """
    trained = {name for name, tower in towers.items() if any(one.requires_grad for one in tower.parameters())}
    items = range(len(media.hashes))
    found = _run(towers, media, [item for item in items if media.towers[item] in trained])
    alone = {media.hashes[item]: item for item in items if item not in found}
    runs = {name: partial(_run_alone, towers, media, item) for name, item in alone.items()}
    found |= {alone[name]: rows for name, rows in frozen.of(towers.parameters(), runs).items()}
    first, *others = (torch.cat(rows) for rows in zip(*(found[item] for item in items), strict=True))
    if first.requires_grad:
        leaves = [rows.detach().requires_grad_() for rows in others]
        first, others = _Cut.apply(torch.zeros((), requires_grad=True), [first, *others], leaves), leaves
    return first[media.rows], DeepStack(media.places, [rows[media.rows] for rows in others])


def _run_alone(towers: torch.nn.ModuleDict, media: DeviceMedia, item: int) -> list[Tensor]:
    return _run(towers, media, [item])[item]


def _run(towers: torch.nn.ModuleDict, media: DeviceMedia, items: Sequence[int]) -> dict[int, list[Tensor]]:
    """Run the towers on the items with these indices.

    Returns:
        By item index: the output rows, then the rows for each DeepStack layer (zeros for sounds), [rows, hidden] each.
    """
    found: dict[int, list[Tensor]] = {}
    for name, run in _RUNS.items():
        if own := [item for item in items if media.towers[item] == name]:
            outputs = run(towers[name], [media.inputs(item) for item in own], [media.grids[item] for item in own])
            parts = zip(*(rows.split([media.counts[item] for item in own]) for rows in outputs), strict=True)
            found |= zip(own, map(list, parts), strict=True)
    layers = len(getattr(towers[VISUAL], "deepstack_merger_list", ()))
    return {item: rows + [torch.zeros_like(rows[0])] * (layers + 1 - len(rows)) for item, rows in found.items()}


def _see(tower: torch.nn.Module, patches: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
    """Run the vision tower. Return the output rows of all items, then the rows for each DeepStack layer."""
    seen = tower(torch.cat(list(patches)), torch.tensor(grids, device=patches[0].device), return_dict=True)
    return [seen.pooler_output, *getattr(seen, "deepstack_features", ())]


def _hear(tower: torch.nn.Module, spectrograms: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
    """Run the audio tower. Return the output rows of all sounds.

    Each sound runs alone, because the tower's output for less than a second would depend on longer sounds in a batch.
    """
    dtype = next(tower.parameters()).dtype  # transformers 5.12 doesn't convert to it
    lengths = [torch.tensor(grid, device=one.device) for one, grid in zip(spectrograms, grids, strict=True)]
    heard = [
        tower(one.to(dtype), feature_lens=own, return_dict=True) for one, own in zip(spectrograms, lengths, strict=True)
    ]
    # transformers 5.12 leaves pooler_output empty here; if it is set, it equals last_hidden_state
    return [torch.cat([one.last_hidden_state for one in heard])]


_RUNS: dict[str, Callable[[torch.nn.Module, Sequence[Tensor], Sequence[Grid]], list[Tensor]]] = {
    VISUAL: _see,
    AUDIO_TOWER: _hear,
}
"""Function that runs each kind of tower on inputs and their sizes."""


class _PatchProduct(torch.nn.Conv3d):
    """A tower's patch convolution, computed as a matrix product, because each input is one patch.

    torch's convolution takes four times as long on a CPU, and far longer on some GPUs in bfloat16 (transformers, pull
    request 45041).
    """

    def forward(self, patches: Tensor) -> Tensor:
        return torch.nn.functional.linear(patches.flatten(1), self.weight.flatten(1), self.bias)


class _Cut(torch.autograd.Function):
    """Cuts the towers' outputs from their autograd graph. In the backward pass, the gradients of output and leaves go
    into the towers.

    The leaves' gradients are complete by then: the embeddings precede all layers, so a backward pass ends with them.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> Tensor:
        ctx.outputs, ctx.leaves = outputs, leaves
        return outputs[0].detach().clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        leaves = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in ctx.leaves]
        gradients = [grads[0].contiguous(), *leaves]
        # Each tensor-parallel rank has the gradients of its own rows. Over context-parallel ranks, as over
        # data-parallel ones, the parameters' gradients are added up.
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            for gradient in gradients:
                dist.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
        # If all items are sounds, DeepStack's rows are zeros without a graph.
        reached = [(one, gradient) for one, gradient in zip(ctx.outputs, gradients, strict=True) if one.requires_grad]
        torch.autograd.backward([one for one, _ in reached], [gradient for _, gradient in reached])
        return None, None, None


def _module(tower: TowerArchitecture) -> torch.nn.Module:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as omni
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    omnis = omni.Qwen3OmniMoeVisionEncoder, omni.Qwen3OmniMoeAudioEncoder
    known: tuple[Any, ...] = (Qwen3VLVisionModel, Qwen3_5VisionModel, *omnis)
    kind = {one.__name__: one for one in known}[tower.source]
    try:
        settings = {name: value for name, value in json.loads(tower.config).items() if name != "model_type"}
        module: torch.nn.Module = kind._from_config(kind.config_class(**settings), attn_implementation="sdpa")
    except (TypeError, ValueError) as error:
        raise ModelError(f"{tower.name}: {error}") from error
    return module
