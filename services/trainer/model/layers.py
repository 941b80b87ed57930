"""The layer specification for Megatron: packed sequences, without Transformer Engine.

Each micro-batch is a row of consecutive sequences (Megatron's THD layout), with hidden states [T, 1, hidden]. Only
attention distinguishes the sequences.
"""

import services.trainer.megatron.cpu  # noqa: F401  must come before Megatron

# isort: split
from typing import Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor

from services.trainer.model.norms import RMSNorm
from services.trainer.model.packed_layer import PackedLayer, PolicyConfig
from services.trainer.transformer.attention.attention import PackedAttention
from services.trainer.transformer.attention.context_parallel import (
    copy_kv_heads,
    gather_tokens,
    heads_to_tokens,
    tokens_to_heads,
)
from services.trainer.transformer.attention.heads import split_heads
from services.trainer.transformer.attention.sequence_layout import SequenceLayout
from services.trainer.transformer.kernels.recompute import Recompute
from services.trainer.transformer.mlp.dense_mlp import DenseMLP
from services.trainer.transformer.mlp.mixture import MixtureOfExperts


class PackedSelfAttention(SelfAttention):
    """Megatron's self-attention (projections and tensor parallelism) on packed sequences.

    Under context parallelism this rank's input is a slice of the tokens. It attends with some of the heads from all
    tokens, or from those of its neighbours (`context_parallel`).
    """

    def forward(self, hidden_states: Tensor, rotary: Tensor, layout: SequenceLayout, recompute: Recompute) -> Tensor:
        """Attend.

        Args:
            hidden_states: [T, 1, hidden] (T over the tensor-parallel ranks under sequence parallelism), T being this
                rank's slice under context parallelism.
            rotary: `rotary_table` of the tokens from which this rank attends.
            layout: the sequences of all tokens.
            recompute: the layer's recomputation context.

        Returns:
            [T, 1, hidden].
        """
        context, head_size = layout.context, self.hidden_size_per_attention_head
        qkv, _ = self.linear_qkv(hidden_states)
        qkv = qkv.view(qkv.shape[0], self.num_query_groups_per_partition, -1)
        if context.exchanging is not None:
            qkv = tokens_to_heads(copy_kv_heads(qkv, context.copies, head_size), context.exchanging)
        norms = (self.q_layernorm.weight, self.k_layernorm.weight) if self.config.qk_layernorm else None
        query, key, value = recompute(split_heads, qkv, norms, rotary, head_size, self.config.layernorm_epsilon)
        if context.gathering is not None:
            key, value = (recompute(gather_tokens, x, context.gathering) for x in (key, value))
        output = self.core_attention(query, key, value, layout, recompute)
        if context.exchanging is not None:
            output = heads_to_tokens(output, context.exchanging)
        output, bias = self.linear_proj(output.reshape(output.shape[0], 1, -1))
        return output if bias is None else output + bias


class OutputProjection(RowParallelLinear):
    """Megatron's row-parallel layer for attention's output. Megatron would give the MLP a bias along with it."""

    def __init__(self, *arguments: Any, config: PolicyConfig, **named: Any) -> None:
        super().__init__(*arguments, config=config, **{**named, "bias": config.attention_output_bias})


def block_spec(config: TransformerConfig, chunk: int | None = None) -> TransformerBlockSubmodules:
    """Return the specification of the layers of this pipeline stage, or of one of its chunks, dense or with experts."""
    backend = LocalSpecProvider()
    head_norm = RMSNorm if config.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=PackedSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_linear(),
            core_attention=PackedAttention,
            linear_proj=OutputProjection,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    layer = ModuleSpec(
        module=PackedLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            pre_mlp_layernorm=RMSNorm,
            mlp=DenseMLP if config.num_moe_experts is None else MixtureOfExperts,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config, chunk), layer_norm=RMSNorm)
