"""Our own layer specification for Megatron: no Transformer Engine, packed sequences throughout.

A micro-batch is one row of tokens, sequence after sequence (Megatron's THD layout): hidden states are [T, 1, hidden].
Attention keeps the sequences apart; everything else doesn't see them.
"""

from typing import Any

import services.trainer.megatron.cpu  # noqa: F401  must come before Megatron

# isort: split
import torch
import torch.nn.functional as functional
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from services.trainer.model.context import heads_to_tokens, tokens_to_heads
from services.trainer.model.heads import split_heads
from services.trainer.model.sequence_layout import SequenceLayout, bring_home, spread_out


class RMSNorm(torch.nn.Module):
    """Root mean square normalisation (arXiv 1910.07467) that works with Megatron's sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        self.eps = eps
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden_size], same shape out."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class PackedAttention(MegatronModule):
    """Causal attention within each packed sequence: torch's variable-length kernel on GPUs, padded blocks elsewhere."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: object) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, layout: SequenceLayout) -> Tensor:
        """query [T, heads, size], key and value [T, kv_heads, size] -> [T, heads, size]."""
        if not layout.as_packed:
            # Repeated queries are computed for nothing: their output isn't read and their gradient is zero.
            query = spread_out(query, layout, add_up=False)
            key, value = (spread_out(x, layout, add_up=layout.shared) for x in (key, value))
        output = self._blocks(query, key, value, layout) if layout.blocks else self._varlen(query, key, value, layout)
        return output if layout.as_packed else bring_home(output, layout)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, layout: SequenceLayout) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        cu, longest = layout.cu_seqlens, layout.longest
        output: Any = varlen_attn(query, key, value, cu, cu, longest, longest, scale=self.scale, window_size=(-1, 0))
        return output

    def _blocks(self, query: Tensor, key: Tensor, value: Tensor, layout: SequenceLayout) -> Tensor:
        outputs, begin = [], 0
        for count, width in layout.blocks:
            end = begin + count * width
            q, k, v = (x[begin:end].view(count, width, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
            block = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            outputs.append(block.transpose(1, 2).reshape(count * width, *query.shape[1:]))
            begin = end
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def sharded_state_dict(self, *_: object, **__: object) -> dict[str, Any]:
        """Nothing to save."""
        return {}


class PackedSelfAttention(SelfAttention):
    """Megatron's self-attention (its projections and its tensor parallelism) on packed sequences.

    Under context parallelism this rank has a slice of the tokens, and all of them for its heads within.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: None,
        rotary_pos_emb: Tensor,
        packed_seq_params: SequenceLayout,
        **_: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            hidden_states: [T, 1, hidden] (T over the tensor-parallel ranks under sequence parallelism), T being this
                rank's slice under context parallelism.
            attention_mask: unused; Megatron's layer passes it.
            rotary_pos_emb: `rotary_table` of all tokens.
            packed_seq_params: where the sequences are, in all tokens.

        Returns:
            Output [T, 1, hidden] and its bias (None), as Megatron's layer expects.
        """
        context = self.pg_collection.cp if self.config.context_parallel_size > 1 else None
        qkv, _ = self.linear_qkv(hidden_states)
        qkv = qkv.view(qkv.shape[0], self.num_query_groups_per_partition, -1)
        if context is not None:
            qkv = tokens_to_heads(qkv, context)
        norms = (self.q_layernorm.weight, self.k_layernorm.weight) if self.config.qk_layernorm else None
        head_size, epsilon = self.hidden_size_per_attention_head, self.config.layernorm_epsilon
        query, key, value = split_heads(qkv, norms, rotary_pos_emb, head_size, epsilon)
        output = self.core_attention(query, key, value, packed_seq_params)
        if context is not None:
            output = heads_to_tokens(output, context)
        return self.linear_proj(output.reshape(output.shape[0], 1, -1))


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage, dense or with experts, as `config` says."""
    backend = LocalSpecProvider()
    head_norm = RMSNorm if config.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=PackedSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_linear(),
            core_attention=PackedAttention,
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=get_mlp_module_spec_for_backend(
                backend=backend, num_experts=config.num_moe_experts, moe_grouped_gemm=False
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)
