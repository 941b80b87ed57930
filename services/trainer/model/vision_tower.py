"""The vision tower: transformers' module, whole on each rank of the first pipeline stage, and its part in a pass.

Each rank puts the rows that fall into its own slice of the tokens in place of the embeddings of image tokens, and adds
DeepStack's after the first layers, so that nothing has to be sent. The rows of a frozen tower are kept by image
(`tower_outputs`).

A tower that is trained runs once for the images of a micro-batch, and has a graph of its own, which is cut from the
decoder's: recomputed layers have several backward passes, and a graph that they shared would be freed by the first of
these. The decoder's gradients of the tower's output collect in leaves, and go through the tower together, once.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from services.trainer.model.architecture import ModelError, VisionArchitecture
from services.trainer.model.device_images import DeviceImages
from services.trainer.model.tower_outputs import TowerOutputs, run_tower
from services.trainer.transformer.deepstack import DeepStack

TOWER = "visual"
"""Name of the tower within the model's first stage."""


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


def image_rows(tower: torch.nn.Module, images: DeviceImages, frozen: TowerOutputs) -> tuple[Tensor, DeepStack]:
    """Return the tower's rows of images.

    Args:
        tower: the tower.
        images: the images.
        frozen: its outputs, if it isn't trained.

    Returns:
        The rows of this rank's image tokens, [M, hidden], and those for DeepStack. Gradients of both reach the
        parameters of a tower that is trained once a backward pass arrives at the former.
    """
    if any(parameter.requires_grad for parameter in tower.parameters()):
        first, *others = run_tower(tower, images, range(len(images.hashes)))
    else:
        first, *others = frozen.of(tower, images)
    if first.requires_grad:
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
