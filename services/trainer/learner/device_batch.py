"""A micro-batch as tensors on this rank's device."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from services.trainer.attention.heads import Rotary, rotary_table
from services.trainer.attention.sequence_layout import AttentionKernel, SequenceLayout, sequence_layout, to_device
from services.trainer.batch.row_packing import PackedMicroBatch, with_padding
from services.trainer.megatron.parallel import World
from services.trainer.mlp.routing import RouterInputs

COLUMNS = ("rollout_logprobs", "advantages", "weight", "logprobs_comparable", "temperature", "ref_logprobs")
"""Per-token inputs of the loss."""


@dataclass(frozen=True)
class DeviceBatch:
    """A micro-batch on one rank: T tokens, of which this rank has a slice and predicts N trained ones from it."""

    tokens: Tensor
    """int64 [1, T / cp_size]: this rank's slice."""
    rotary: Tensor
    """float32 [2, T, 1, head_size / 2]: `rotary_table` of all T tokens."""
    layout: SequenceLayout
    """The sequences of all T tokens."""
    trained_indices: Tensor
    """int64 [N]: indices of the N tokens among all trained tokens of the micro-batch."""
    targets: Tensor
    """int64 [N]: their token ids."""
    predicting: Tensor
    """int64 [N]: index in the slice of the token that predicts each of them."""
    columns: dict[str, Tensor]
    """float32 [N]: those of `COLUMNS` that the micro-batch has."""


def to_device_batch(batch: PackedMicroBatch, world: World, kernel: AttentionKernel, rotary: Rotary) -> DeviceBatch:
    """Pad a micro-batch, cut out this rank's slice and copy it to this rank's device.

    Args:
        batch: the micro-batch.
        world: this rank's place in the world.
        kernel: the implementation of attention.
        rotary: the rotary embedding, on the device.
    """
    batch = with_padding(batch, world.tp_size * world.cp_size)
    slice_tokens = len(batch.tokens) // world.cp_size
    begin = slice_tokens * world.cp_rank
    trained = np.flatnonzero(batch.loss_mask)
    predicting = batch.previous[trained]
    own = np.flatnonzero((predicting >= begin) & (predicting < begin + slice_tokens))
    trained, predicting = trained[own], predicting[own] - begin
    names = [name for name in COLUMNS if getattr(batch, name) is not None]
    columns = np.stack([getattr(batch, name)[trained].astype(np.float32) for name in names])
    router = RouterInputs(weight=float(batch.weight[batch.loss_mask == 1].sum()))
    return DeviceBatch(
        tokens=to_device(batch.tokens[begin : begin + slice_tokens], world.device).unsqueeze(0),
        rotary=rotary_table(to_device(batch.positions, world.device), rotary),
        layout=sequence_layout(batch, world.device, kernel, router),
        trained_indices=to_device(own, world.device),
        targets=to_device(batch.tokens[trained], world.device),
        predicting=to_device(predicting, world.device),
        columns=dict(zip(names, to_device(columns, world.device), strict=True)),
    )
