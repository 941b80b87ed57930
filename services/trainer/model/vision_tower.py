"""The vision tower: transformers' module, whole on each rank of the first pipeline stage, and its part in a pass.

It runs once for the images of a micro-batch. Each rank puts the rows that fall into its own slice of the tokens in
place of the embeddings of image tokens, and adds DeepStack's after the first layers, so that nothing has to be sent.

A tower that is trained has a graph of its own, which is cut from the decoder's: recomputed layers have several
backward passes, and a graph that they shared would be freed by the first of these. The decoder's gradients of the
tower's output collect in leaves, and go through the tower together, once.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from services.trainer.model.architecture import ModelError, VisionArchitecture
from services.trainer.transformer.deepstack import DeepStack

TOWER = "visual"
"""Name of the tower within the model's first stage."""


@dataclass(frozen=True)
class DeviceImages:
    """The images of a micro-batch on one rank: I images, of which M rows belong to tokens of its slice."""

    patches: Tensor
    """float32 [patches, values]: the patches of all images, as the tower takes them."""
    grids: Tensor
    """int64 [I, 3]: patches of each image by time, row and column."""
    rows: Tensor
    """int64 [M]: rows of the tower's output."""
    places: Tensor
    """int64 [M]: their tokens, by number in this rank's slice."""


def build_tower(vision: VisionArchitecture, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """Build the tower, without loading weights.

    Raises:
        ModelError: transformers refuses the configuration.
    """
    with device:
        tower = _module(vision)
    for parameter in tower.parameters():  # not the frequencies, which are buffers and stay in float32
        parameter.data = parameter.data.to(dtype)
    return tower


@lru_cache
def tower_shapes(vision: VisionArchitecture) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tower's parameters by name, in their order."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in _module(vision).named_parameters()}


def image_rows(tower: torch.nn.Module, images: DeviceImages) -> tuple[Tensor, DeepStack]:
    """Run the tower.

    Returns:
        The rows of this rank's image tokens, [M, hidden], and those for DeepStack. Gradients of both reach the
        parameters of a tower that is trained once a backward pass arrives at the former.
    """
    trained = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in tower.parameters())
    with torch.set_grad_enabled(trained):
        seen = tower(images.patches, images.grids, return_dict=True)
    first, others = seen.pooler_output, list(seen.deepstack_features)
    if trained:
        leaves = [rows.detach().requires_grad_() for rows in others]
        first, others = _Cut.apply(torch.zeros((), requires_grad=True), [first, *others], leaves), leaves
    return first[images.rows], DeepStack(images.places, [rows[images.rows] for rows in others])


class _Cut(torch.autograd.Function):
    """The tower's output without its graph. Its gradient goes into the tower along with those of the leaves.

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
        torch.autograd.backward(ctx.outputs, gradients)
        return None, None, None


def _module(vision: VisionArchitecture) -> torch.nn.Module:
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    try:
        settings = {name: value for name, value in json.loads(vision.config).items() if name != "model_type"}
        tower: torch.nn.Module = Qwen3VLVisionModel._from_config(
            Qwen3VLVisionConfig(**settings), attn_implementation="sdpa"
        )
    except (TypeError, ValueError) as error:
        raise ModelError(f"vision_config: {error}") from error
    return tower
