"""A micro-batch as tensors on this rank's device."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from relaxd.data.towers import normalised, spectrogram
from relaxd.data.vision import VisionModel
from relaxd.media.media_tokens import is_sound
from services.trainer.batch.micro_batch import PackedMicroBatch, with_padding
from services.trainer.batch.sequence_media import PackedMedia
from services.trainer.megatron.world import World
from services.trainer.model.towers import TOWER_OF_KIND, DeviceMedia
from services.trainer.transformer.context_parallel import ContextRanks
from services.trainer.transformer.heads import Rotary, rotary_table
from services.trainer.transformer.routing import RouterInputs
from services.trainer.transformer.sequence_layout import (
    AttentionKernel,
    SequenceLayout,
    sequence_layout,
    to_device,
)


@dataclass(frozen=True, kw_only=True)
class DeviceBatch:
    """A rank's part of a micro-batch of T tokens: a slice of the tokens, from which N trained tokens are predicted."""

    tokens: Tensor
    """Token ids of this rank's slice, int64 [1, T / cp_size]."""
    rotary: Tensor
    """Rotary embedding (`rotary_table`) of the tokens whose attention this rank computes, float32
    [2, tokens, 1, frequencies]: all T tokens, or those of the ranks with which it exchanges attention heads."""
    layout: SequenceLayout
    """Places of the sequences in the micro-batch, for attention over all T tokens."""
    media: DeviceMedia | None
    """Media of the micro-batch; None without media, and on ranks without towers."""
    trained_indices: Tensor
    """Index of each of this rank's trained tokens among the micro-batch's trained tokens, int64 [N trained tokens]."""
    targets: Tensor
    """Ids of this rank's trained tokens, int64 [N trained tokens]."""
    predicting: Tensor
    """Index in this rank's slice of the token that predicts each trained token, int64 [N trained tokens]."""
    columns: dict[str, Tensor]
    """Columns of the micro-batch by name, float32 [N trained tokens]; columns of candidates are [N trained tokens, k],
    with int64 ids."""
    weight: Tensor
    """Weight of each trained token in the loss, float32 [N trained tokens]."""
    logprobs_comparable: Tensor
    """Mask: 1 for trained tokens whose log-prob is comparable with the engine's, else 0; float32 [N trained tokens]."""
    temperature: Tensor
    """Sampling temperature of each trained token, float32 [N trained tokens]."""
    sequence: Tensor
    """Index in the micro-batch of each trained token's sequence, int64 [N trained tokens]."""
    sequences: int
    """Number of sequences in the micro-batch."""


def to_device_batch(
    batch: PackedMicroBatch,
    world: World,
    kernel: AttentionKernel,
    rotary: Rotary,
    context: ContextRanks | None = None,
    *,
    prompts_once: bool = False,
    vision: VisionModel | None = None,
    convolution: int = 0,
) -> DeviceBatch:
    """Pad a micro-batch, cut out this rank's slice and copy it to this rank's device.

    Args:
        batch: the micro-batch.
        world: this rank's place in the world.
        kernel: the implementation of attention.
        rotary: the rotary embedding, on the device.
        context: the ranks that share attention with this rank, if any.
        prompts_once: whether attention may compute the queries of a shared prompt only once.
        vision: the model's rules for media; None: the model takes no media.
        convolution: see `sequence_layout`.

    Raises:
        ValueError: the micro-batch has media, but the model takes none.
    """
    if batch.media is not None and vision is None:
        raise ValueError("a micro-batch has media, which this model doesn't take")
    batch = with_padding(batch, world.tp_size * world.cp_size)
    slice_tokens = len(batch.tokens) // world.cp_size
    begin = slice_tokens * world.cp_rank
    media = None
    if batch.media is not None and vision is not None and world.first_stage:
        media = _device_media(batch.media, vision, len(batch.tokens), world)
    trained = np.flatnonzero(batch.loss_mask)
    predicting = batch.previous[trained]
    own = np.flatnonzero((predicting >= begin) & (predicting < begin + slice_tokens))
    trained, predicting = trained[own], predicting[own] - begin
    narrow = {name: column for name, column in batch.columns.items() if column.ndim == 1}
    wide = {name: column[trained] for name, column in batch.columns.items() if name not in narrow}
    given: tuple[NDArray[Any], ...] = (
        *narrow.values(),
        batch.weight,
        batch.logprobs_comparable,
        batch.temperature,
    )
    # One copy to the device.
    *columns, weight, comparable, temperature = to_device(
        np.stack([column[trained].astype(np.float32) for column in given]), world.device
    )
    router = RouterInputs(float(batch.weight[batch.loss_mask == 1].sum()), _own_experts(batch, world))
    return DeviceBatch(
        tokens=to_device(batch.tokens[begin : begin + slice_tokens], world.device).unsqueeze(0),
        rotary=rotary_table(to_device(_attending(batch.positions, context), world.device), rotary),
        layout=sequence_layout(
            batch, world.device, kernel, router, context, prompts_once=prompts_once, convolution=convolution
        ),
        media=media,
        trained_indices=to_device(own, world.device),
        targets=to_device(batch.tokens[trained], world.device),
        predicting=to_device(predicting, world.device),
        columns=dict(zip(narrow, columns, strict=True))
        | {
            name: to_device(column.astype(np.int64) if column.dtype.kind == "i" else column, world.device)
            for name, column in wide.items()
        },
        weight=weight,
        logprobs_comparable=comparable,
        temperature=temperature,
        sequence=to_device(batch.sequence_of_token[trained], world.device),
        sequences=batch.sequences,
    )


def _attending(column: NDArray[Any], context: ContextRanks | None) -> NDArray[Any]:
    """Return the part of a per-token array [..., T] for the tokens whose attention this rank computes."""
    if context is None or context.gathering is None:
        return column
    tokens = column.shape[-1] // context.gathering.size()
    return np.ascontiguousarray(column[..., context.gathering.rank() * tokens :][..., :tokens])


def _device_media(media: PackedMedia, vision: VisionModel, tokens: int, world: World) -> DeviceMedia:
    """Return the media of a padded micro-batch on the device, with places among this rank's tokens.

    Under sequence parallelism each tensor-parallel rank has a part of the slice.
    """
    own_tokens = tokens // (world.cp_size * world.tp_size)
    begin = own_tokens * (world.cp_rank * world.tp_size + world.tp_rank)
    own = np.flatnonzero((media.places >= begin) & (media.places < begin + own_tokens))

    def inputs(index: int) -> Tensor:
        item = media.items[index]
        if vision.sound is not None and is_sound(item.grid):
            return spectrogram(vision.heard(item.values, item.grid), vision.sound).to(world.device)
        return normalised(to_device(vision.cut(item.values, item.grid), world.device), vision)

    return DeviceMedia(
        hashes=tuple(item.sha256 for item in media.items),
        towers=tuple(TOWER_OF_KIND[item.kind] for item in media.items),
        inputs=inputs,
        grids=[item.grid for item in media.items],
        counts=[vision.tokens.count(item.grid) for item in media.items],
        rows=to_device(media.rows[own], world.device),
        places=to_device(media.places[own] - begin, world.device),
    )


def _own_experts(batch: PackedMicroBatch, world: World) -> Tensor | None:
    """Return a padded micro-batch's routed experts, for this rank's tokens and its stage's layers; None without any.

    Under sequence parallelism each tensor-parallel rank routes a part of the slice.
    """
    if batch.experts is None:
        return None
    tokens, layers = len(batch.tokens) // (world.cp_size * world.tp_size), world.layers_of(batch.experts.shape[1])
    begin = tokens * (world.cp_rank * world.tp_size + world.tp_rank)
    own = batch.experts[begin : begin + tokens][:, layers]
    return to_device(np.ascontiguousarray(own), world.device).transpose(0, 1)
