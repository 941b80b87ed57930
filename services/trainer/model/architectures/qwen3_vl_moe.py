"""Qwen3-VL with a mixture of experts (arXiv 2511.21631): the decoder of Qwen3-MoE, the rest as in Qwen3-VL.

Its files stack all experts of a layer in one tensor, [experts, inputs, outputs]. transformers writes [experts, outputs,
inputs] instead; both forms are read here.
"""

from collections.abc import Sequence

from torch import Tensor

from services.trainer.model.architecture import Architecture, ModelError
from services.trainer.model.architectures.phi3 import FusedGateUp
from services.trainer.model.architectures.qwen3_vl import multimodal, with_eyes
from services.trainer.model.family import Config, Family, ShardedColumns, experts, refuse, stacked_expert


def read(config: Config) -> Architecture:
    """Read the architecture from a Qwen3-VL-MoE config.json, whose decoder is `text_config`."""
    text = {"num_key_value_heads": 16, "rope_theta": 500000.0, "norm_topk_prob": True, **config["text_config"]}
    refuse(text, norm_topk_prob=True)
    mixture = experts(text)
    if text["hidden_size"] in (mixture.ffn_size, 2 * mixture.ffn_size):
        raise ModelError(
            f"moe_intermediate_size is {mixture.ffn_size} and hidden_size {text['hidden_size']}: tensors of experts "
            "would be square, which transformers reads transposed; neither the size nor its double may be hidden_size"
        )
    return with_eyes(multimodal(config, text, experts=mixture), config)


class StackedGateUp:
    """Layout `FusedGateUp` for one expert's slice of a stacked tensor: [inputs, gate and up]."""

    @staticmethod
    def shard(parts: Sequence[Tensor], rank: int, size: int, shape: Architecture) -> Tensor:
        """Return this rank's gate and up rows of the expert."""
        return FusedGateUp.shard([parts[0].T], rank, size, shape)

    @staticmethod
    def merge(shards: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], shape: Architecture) -> list[Tensor]:
        """Return the expert's slice of the stacked tensor: [inputs, gate and up]."""
        return [one.T for one in FusedGateUp.merge(shards, [shapes[0][::-1]], shape)]


class StackedDown:
    """Layout `ShardedColumns` for one expert's slice of a stacked tensor: [inputs, outputs]."""

    @staticmethod
    def shard(parts: Sequence[Tensor], rank: int, size: int, shape: Architecture) -> Tensor:
        """Return this rank's columns of the expert's second matrix."""
        return ShardedColumns.shard([parts[0].T], rank, size, shape)

    @staticmethod
    def merge(shards: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], shape: Architecture) -> list[Tensor]:
        """Return the expert's slice of the stacked tensor: [inputs, outputs]."""
        return [one.T for one in ShardedColumns.merge(shards, shapes, shape)]


STACKED_EXPERT = stacked_expert(
    (StackedGateUp, "hidden expert_ffn+expert_ffn"), down=(StackedDown, "expert_ffn hidden")
)

FAMILY = Family(read, prefix="model.language_model.", expert_rules=STACKED_EXPERT)
