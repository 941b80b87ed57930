"""Layers for Megatron: the specification of a transformer layer on packed sequences, without Transformer Engine, and
its norms.

Each micro-batch is a row of consecutive sequences (Megatron's THD layout), with hidden states [T, 1, hidden]. Only
attention distinguishes the sequences.
"""

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
from dataclasses import dataclass, replace
from typing import Any

from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from torch import Tensor

from services.trainer.transformer.activation_memory import ActivationOffload, Recompute
from services.trainer.transformer.mlp import MixtureOfExperts
from services.trainer.transformer.sequence_layout import SequenceLayout

# isort: split
import torch

from services.trainer.transformer.kernels import fused_kernels

# isort: split
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from relaxd.models.shape import DeltaNetSizes
from services.trainer.transformer.attention import PackedAttention
from services.trainer.transformer.context_parallel import (
    copy_kv_heads,
    gather_tokens,
    heads_to_tokens,
    tokens_to_heads,
)
from services.trainer.transformer.gated_delta_net import GatedDeltaNet
from services.trainer.transformer.heads import rms_norm, split_gates, split_heads
from services.trainer.transformer.mlp import DenseMLP


@dataclass
class PolicyConfig(TransformerConfig):
    """Megatron's transformer configuration, plus the settings of relaxd's layers."""

    selective_layers: int = 0
    """Number of layers at the beginning of each pipeline stage that recompute most tensors in the backward pass."""
    attention_output_bias: bool = False
    """True if attention's output projection has a bias."""
    delta_net: DeltaNetSizes | None = None
    """Sizes of the gated delta nets that replace attention in some layers; None: there are none."""


class PackedLayer(TransformerLayer):
    """Transformer layer: norm and attention, then norm and MLP or experts. Both halves are added to the residual."""

    config: PolicyConfig

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._index = _index_in_stage(self.layer_number - 1, self.config, named.get("vp_stage"))
        """This layer's number within the pipeline stage, from 0, chunk after chunk."""
        self.offload: ActivationOffload | None = None
        """Offloads this layer's activations to the host; None if disabled."""

    def forward(
        self, hidden_states: Tensor, *, rotary_pos_emb: Tensor, packed_seq_params: SequenceLayout, **_: object
    ) -> tuple[Tensor, None]:
        """Run the transformer layer on a micro-batch.

        Args:
            hidden_states: [T, 1, hidden] (T over the tensor-parallel ranks under sequence parallelism).
            rotary_pos_emb: `rotary_table` of the tokens' positions.
            packed_seq_params: the sequences.

        Returns:
            [T, 1, hidden], and None for Megatron's cross-attention context.
        """
        keep = None if self.offload is None else self.offload.pack
        with Recompute(self._index < self.config.selective_layers, keep) as recompute:
            residual, x = self.input_layernorm.of_sum(hidden_states)
            recompute.register(x, self.input_layernorm, residual)
            if isinstance(self.self_attention, GatedDeltaNet):
                assert packed_seq_params.chunks is not None
                attended = self.self_attention(x, packed_seq_params.chunks)
            else:
                attended = self.self_attention(x, rotary_pos_emb, packed_seq_params, recompute)
            residual, x = self.pre_mlp_layernorm.of_sum(residual, attended)
            recompute.register(x, self.pre_mlp_layernorm, residual)
            if isinstance(self.mlp, MixtureOfExperts):
                output = self.mlp(x, packed_seq_params.router, self._index, recompute)
            else:
                output = self.mlp(x, recompute)
            hidden = residual + output
            if packed_seq_params.deepstack is not None:
                hidden = packed_seq_params.deepstack.add(hidden, self.layer_number - 1)
            return hidden, None


def _index_in_stage(layer: int, config: TransformerConfig, chunk: int | None) -> int:
    """Return a layer's number within this pipeline stage, whose chunks have the same number of layers."""
    before = 0 if not chunk else chunk * get_num_layers_to_build(config, chunk)
    return before + layer - get_transformer_layer_offset(config, chunk)


class RMSNorm(torch.nn.Module):
    """Root mean square normalisation, compatible with Megatron's sequence parallelism.

    With `layernorm_zero_centered_gamma` it multiplies by 1 + weight.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self._zero_centred = config.layernorm_zero_centered_gamma
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    @property
    def scale(self) -> Tensor:
        """Scale of the normalised values, [hidden_size]. 1 + weight is at least float32, to avoid rounding."""
        if not self._zero_centred:
            return self.weight
        return 1 + self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """Return the RMSNorm of x [..., hidden_size]."""
        return rms_norm(x, self.scale, self.eps)

    def of_sum(self, x: Tensor, addend: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the new residual x + addend (x without addend), and the normalised residual.

        Fused kernels need one pass over memory forward and one backward, which includes the residual's gradient.
        """
        if x.dtype == torch.bfloat16 and x.is_cuda and fused_kernels():
            fused: tuple[Tensor, Tensor] = _NormOfSum.apply(x, addend, self.scale, self.eps)
            return fused
        total = x if addend is None else x + addend
        return total, self(total)


class _NormOfSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, addend: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        from services.trainer.transformer.kernels.layer_kernels import norm_forward

        x = x.contiguous()
        total, output, inverses = norm_forward(x, None if addend is None else addend.contiguous(), weight, epsilon)
        ctx.save_for_backward(total, weight, inverses)
        ctx.adds = addend is not None
        return total.view_as(total) if addend is None else total, output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from services.trainer.transformer.kernels.layer_kernels import norm_backward

        grad, grad_weight = norm_backward(*ctx.saved_tensors, *grads)
        return grad, grad if ctx.adds else None, grad_weight, None


class PackedSelfAttention(SelfAttention):
    """Megatron's self-attention (projections and tensor parallelism) on packed sequences.

    Under context parallelism this rank's input is a slice of the tokens. It computes attention for some of the heads,
    with the queries of all tokens or of its neighbours' tokens (`context_parallel`).
    """

    def forward(self, hidden_states: Tensor, rotary: Tensor, layout: SequenceLayout, recompute: Recompute) -> Tensor:
        """Compute attention of a micro-batch's tokens within their sequences.

        Args:
            hidden_states: [T, 1, hidden] (T over the tensor-parallel ranks under sequence parallelism), T being this
                rank's slice under context parallelism.
            rotary: `rotary_table` of the tokens whose queries this rank has in attention.
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
        gate = None
        if self.config.attention_output_gate:
            qkv, gate = split_gates(qkv, head_size)
        norms = (self.q_layernorm.scale, self.k_layernorm.scale) if self.config.qk_layernorm else None
        query, key, value = recompute(split_heads, qkv, norms, rotary, head_size, self.config.layernorm_epsilon)
        if context.gathering is not None:
            key, value = (recompute(gather_tokens, x, context.gathering) for x in (key, value))
        output = self.core_attention(query, key, value, layout, recompute)
        if context.exchanging is not None:
            output = heads_to_tokens(output, context.exchanging)
        if gate is not None:
            output = output * gate.sigmoid()
        output, bias = self.linear_proj(output.reshape(output.shape[0], 1, -1))
        return output if bias is None else output + bias


class OutputProjection(RowParallelLinear):
    """Attention's output projection, with its own bias setting. Megatron's setting would also add a bias to the MLP."""

    def __init__(self, *arguments: Any, config: PolicyConfig, **named: Any) -> None:
        super().__init__(*arguments, config=config, **{**named, "bias": config.attention_output_bias})


def block_spec(config: PolicyConfig, chunk: int | None = None) -> TransformerBlockSubmodules:
    """Return Megatron's specification of the layers of this pipeline stage, or of one of its chunks."""
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
    layers = [layer] * get_num_layers_to_build(config, chunk)
    if (sizes := config.delta_net) is not None:
        delta_net = ModuleSpec(module=GatedDeltaNet, params={"sizes": sizes})
        recurrent = replace(layer, submodules=replace(layer.submodules, self_attention=delta_net))
        first = get_transformer_layer_offset(config, chunk)
        layers = [recurrent if sizes.layers[first + number] else layer for number in range(len(layers))]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)
