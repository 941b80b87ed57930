"""Our own layer specification for Megatron: no Transformer Engine, packed sequences throughout.

A micro-batch is one row of tokens, sequence after sequence (Megatron's THD layout): hidden states are [T, 1, hidden].
Attention keeps the sequences apart; everything else doesn't see them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import services.trainer.megatron_cpu  # noqa: F401  must come before Megatron

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

from services.trainer.packing import MicroBatch

MOST_PADDING = 0.25
"""Sequences share one padded attention call while padding adds at most this share to their tokens."""


@dataclass(frozen=True)
class SequenceLayout:
    """Where the sequences of a packed micro-batch are, in the forms that attention needs."""

    cu_seqlens: Tensor
    """int32 [sequences + 1]: where each sequence begins in the spread-out tokens, and their number."""
    longest: int
    """Tokens of the longest sequence."""
    blocks: tuple[tuple[int, int], ...]
    """(sequences, padded length) of each padded attention call; empty where the variable-length kernel is used."""
    as_packed: bool
    """Whether the spread-out tokens are the packed ones as they lie, and nothing has to be moved."""
    spread: Tensor
    """int64 [P]: the token that goes to each place of the spread-out tokens, in which every sequence is whole, shared
    prompts repeated, and padded to its block (with any of its tokens)."""
    home: Tensor
    """int64 [T]: the place of each token in there; of a shared prompt's tokens the first."""
    shared: bool
    """Whether a token is in more than one sequence."""


def sequence_layout(batch: MicroBatch, device: torch.device, *, varlen: bool) -> SequenceLayout:
    """Lay out the sequences of a micro-batch.

    Args:
        batch: the micro-batch.
        device: where to put the indices.
        varlen: for torch's variable-length kernel, which needs no padding. Otherwise sequences of similar length come
            into one padded block, so that there is one attention call and not one per sequence.
    """
    own = list(pairwise(batch.cu_seqlens.tolist()))
    prompts = [range(start, start + length) for start, length in batch.prefixes.tolist()]
    members = [[*prompt, *range(*span)] for prompt, span in zip(prompts, own, strict=True) if span[0] < span[1]]
    lengths = [len(member) for member in members]
    shared = sum(lengths) > len(batch.tokens)
    blocks = [] if varlen else _blocks(lengths)
    order = range(len(members)) if varlen else [i for block in blocks for i in block]
    width_of = {i: lengths[block[0]] for block in blocks for i in block}
    spread: list[int] = []
    home = [-1] * len(batch.tokens)
    cu_seqlens = [0]
    for i in order:
        for place, token in enumerate(members[i], len(spread)):
            home[token] = place if home[token] < 0 else home[token]
        spread += members[i]
        cu_seqlens.append(len(spread))
        spread += members[i][:1] * (width_of.get(i, 0) - lengths[i])
    return SequenceLayout(
        torch.tensor(cu_seqlens, dtype=torch.int32, device=device),
        max(lengths),
        tuple((len(block), lengths[block[0]]) for block in blocks),
        spread == list(range(len(batch.tokens))),
        torch.tensor(spread, dtype=torch.int64, device=device),
        torch.tensor(home, dtype=torch.int64, device=device),
        shared,
    )


def _blocks(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of sequences of similar length, the longest first; equal ones in their order."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    blocks: list[list[int]] = []
    for i in order:
        if blocks:
            widest = lengths[blocks[-1][0]]
            tokens = sum(lengths[j] for j in blocks[-1]) + lengths[i]
            if widest * (len(blocks[-1]) + 1) <= (1 + MOST_PADDING) * tokens:
                blocks[-1].append(i)
                continue
        blocks.append([i])
    return blocks


def rotary_table(positions: Tensor, inverse_frequencies: Tensor, dtype: torch.dtype) -> Tensor:
    """Cosine and sine of every token's rotary angles.

    Args:
        positions: int64 [T], each token's place in its sequence.
        inverse_frequencies: float32 [head_size / 2].
        dtype: element type of the result; angles are computed in float32.

    Returns:
        [2, T, 1, head_size / 2].
    """
    angles = torch.outer(positions.float(), inverse_frequencies).unsqueeze(1)
    return torch.stack((angles.cos(), angles.sin())).to(dtype)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Apply the rotary embedding (the "rotate half" convention of Hugging Face) to x [T, heads, head_size]."""
    cos, sin = table[0], table[1]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class _Spread(torch.autograd.Function):
    """x[spread], with a backward pass that looks up where it can.

    Padding comes last in its sequence and attention is causal, so no gradient comes back from there. Only tokens that
    are in several sequences have gradients to be added up.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: SequenceLayout, add_up: bool) -> Tensor:
        ctx.layout, ctx.add_up, ctx.shape = layout, add_up, x.shape
        return x.flatten(1).index_select(0, layout.spread).view(-1, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        layout: SequenceLayout = ctx.layout
        grad = grads[0].flatten(1)
        if ctx.add_up:
            total = grad.new_zeros(ctx.shape[0], grad.shape[1]).index_add_(0, layout.spread, grad)
        else:
            total = grad.index_select(0, layout.home)
        return total.view(ctx.shape), None, None


class _Home(torch.autograd.Function):
    """x[home]: the tokens back in their packed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: SequenceLayout) -> Tensor:
        ctx.layout, ctx.shape = layout, x.shape
        return x.flatten(1).index_select(0, layout.home).view(-1, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].flatten(1)
        return grad.new_zeros(ctx.shape[0], grad.shape[1]).index_copy_(0, ctx.layout.home, grad).view(ctx.shape), None


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
            query = _Spread.apply(query, layout, False)
            key, value = (_Spread.apply(x, layout, layout.shared) for x in (key, value))
        output = self._blocks(query, key, value, layout) if layout.blocks else self._varlen(query, key, value, layout)
        return output if layout.as_packed else _Home.apply(output, layout)

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
    """Megatron's self-attention (its projections and its tensor parallelism) on packed sequences."""

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
            hidden_states: [T, 1, hidden] (T over the tensor-parallel ranks under sequence parallelism).
            attention_mask: unused; Megatron's layer passes it.
            rotary_pos_emb: `rotary_table`, [2, T, 1, head_size / 2].
            packed_seq_params: where the sequences are.

        Returns:
            Output [T, 1, hidden] and its bias (None), as Megatron's layer expects.
        """
        query, key, value = (x.squeeze(1) for x in self.get_query_key_value_tensors(hidden_states))
        query, key = rotate(query, rotary_pos_emb), rotate(key, rotary_pos_emb)
        output = self.core_attention(query, key, value, packed_seq_params)
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
