"""Towers: transformers' modules, whole on each rank of the first pipeline stage, and their part in a pass.

Each rank puts the rows that fall into its own slice of the tokens in place of the embeddings of tokens of media, and
adds DeepStack's after the first layers, so that nothing has to be sent. The rows of a frozen tower are kept by item
(`TowerOutputs`).

A tower that is trained runs once for the items of a micro-batch, and has a separate graph, which is cut from the
decoder's: recomputed layers have several backward passes, and a graph that they shared would be freed by the first of
these. The decoder's gradients of the tower's output accumulate in leaf tensors and pass through the tower once.
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
from services.trainer.transformer.attention.sequence_layout import DeepStack

TOWERS = "towers"
"""Name of the towers within the model's first stage."""
TOWER_OF_KIND = {IMAGE: VISUAL, VIDEO: VISUAL, AUDIO: AUDIO_TOWER}
"""Name of the tower for each kind of media."""
KEPT_BYTES = 1 << 31
"""Default maximum of cached outputs of a model's frozen towers, in bytes of the host's memory."""


@dataclass(frozen=True)
class DeviceMedia:
    """The media of a micro-batch on one rank: I different items.

    M rows of the towers' output belong to tokens of this rank's slice.
    """

    hashes: tuple[str, ...]
    """Hashes of the I items."""
    towers: tuple[str, ...]
    """Tower of each item, by name."""
    inputs: Callable[[int], Tensor]
    """Returns the input of an item's tower, by the item's index: patches, float32 [patches, values], or a spectrogram,
    float32 [bands, frames]."""
    grids: Sequence[Grid]
    """Size of each item."""
    counts: Sequence[int]
    """Number of rows of each item."""
    rows: Tensor
    """int64 [M]: rows of the towers' output."""
    places: Tensor
    """int64 [M]: their tokens, by number in this rank's slice."""


def build_tower(tower: TowerArchitecture, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """Build a tower, without loading weights.

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
    """Return the shapes of a tower's parameters by name, in their order."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in _module(tower).named_parameters()}


def media_rows(towers: torch.nn.ModuleDict, media: DeviceMedia, frozen: TowerOutputs) -> tuple[Tensor, DeepStack]:
    """Return the towers' rows of media.

    Args:
        towers: the towers.
        media: the items.
        frozen: the outputs of towers that aren't trained.

    Returns:
        The rows of this rank's tokens of media, [M, hidden], and those for DeepStack. Gradients of both reach the
        parameters of towers that are trained once a backward pass arrives at the former.
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
    """Run the towers for some of the items.

    Returns:
        Rows by the index of the item, and those for DeepStack: [rows, hidden] each. The latter are zeros of a sound.
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
    """Return the rows of images and videos, one after the other, and those for DeepStack."""
    seen = tower(torch.cat(list(patches)), torch.tensor(grids, device=patches[0].device), return_dict=True)
    return [seen.pooler_output, *getattr(seen, "deepstack_features", ())]


def _hear(tower: torch.nn.Module, spectrograms: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
    """Return the rows of sounds, one after the other.

    Each runs alone, because the tower's output for a sound below a second would depend on longer ones in the batch.
    """
    dtype = next(tower.parameters()).dtype  # to which transformers 5.12 doesn't convert
    lengths = [torch.tensor(grid, device=one.device) for one, grid in zip(spectrograms, grids, strict=True)]
    heard = [
        tower(one.to(dtype), feature_lens=own, return_dict=True) for one, own in zip(spectrograms, lengths, strict=True)
    ]
    # transformers 5.12 leaves pooler_output empty here; where both are there, they are the same
    return [torch.cat([one.last_hidden_state for one in heard])]


_RUNS: dict[str, Callable[[torch.nn.Module, Sequence[Tensor], Sequence[Grid]], list[Tensor]]] = {
    VISUAL: _see,
    AUDIO_TOWER: _hear,
}
"""Passes through the towers, by their names."""


class _PatchProduct(torch.nn.Conv3d):
    """The convolution of a tower's first layer, as a product of matrices: each of its inputs is a patch.

    As a convolution it takes four times as long on a CPU, and far longer on some GPUs in bfloat16 (transformers, pull
    request 45041).
    """

    def forward(self, patches: Tensor) -> Tensor:
        return torch.nn.functional.linear(patches.flatten(1), self.weight.flatten(1), self.bias)


class _Cut(torch.autograd.Function):
    """The towers' output without its graph. Its gradient goes into the towers along with those of the leaves.

    They are complete by then: the embeddings are before all layers, so that a backward pass comes to them last.
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
        # Of sounds alone there are no rows for DeepStack that came out of a tower.
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
