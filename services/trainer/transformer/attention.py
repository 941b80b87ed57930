"""Causal attention within packed sequences."""

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from services.trainer.transformer.activation_memory import Recompute
from services.trainer.transformer.attention_kernels import slice_by_varlen, varlen_attention, visible
from services.trainer.transformer.sequence_layout import (
    QuerySlice,
    SequenceLayout,
    gather_from_sequences,
    scatter_to_sequences,
)


class PackedAttention(MegatronModule):
    """Causal attention within each packed sequence, by the kernel that the layout names.

    Layers that Megatron's `window_attn_skip_freq` marks attend only to the last tokens (`window_size`).
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **_: object
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        self.window: int | None = None
        """Sliding window: number of tokens that a token attends to, with itself; None for all before it."""
        if config.window_size and is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        ):
            self.window = config.window_size[0] + 1

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, layout: SequenceLayout, recompute: Recompute
    ) -> Tensor:
        """Compute attention: query [T, heads, size], key and value [T, kv_heads, size] -> [T, heads, size].

        If the layout has a `query_slice`, query and output have only the slice's tokens.
        """
        scale = self.scale or query.shape[-1] ** -0.5
        if layout.query_slice is not None:
            own = layout.query_slice
            key, value = (recompute(partial(scatter_to_sequences, sum_copies=True), x, own.slots) for x in (key, value))
            attend = slice_by_pieces if layout.kernel == "blocks" else slice_by_varlen
            return attend(query, key, value, own, scale, self.window)
        if not layout.as_packed:
            # The output of repeated queries isn't read, so their gradient is zero.
            query = recompute(partial(scatter_to_sequences, sum_copies=False), query, layout.slots)
            key, value = (
                recompute(partial(scatter_to_sequences, sum_copies=layout.shared), x, layout.slots)
                for x in (key, value)
            )
        if layout.kernel == "cudnn":
            from services.trainer.transformer.cudnn_attention import cudnn_attention

            output = cudnn_attention(query, key, value, layout.cudnn_batches, scale, self.window)
        elif layout.kernel == "varlen":
            begins, longest = (layout.cu_seqlens,) * 2, (layout.longest,) * 2
            output = varlen_attention(query, key, value, begins, longest, scale=scale, window=self.window)
        else:
            output = self._blocks(query, key, value, layout, scale)
        return output if layout.as_packed else recompute(gather_from_sequences, output, layout.slots)

    def _blocks(self, query: Tensor, key: Tensor, value: Tensor, layout: SequenceLayout, scale: float) -> Tensor:
        outputs, begin = [], 0
        for count, width in layout.blocks:
            end = begin + count * width
            q, k, v = (x[begin:end].view(count, width, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
            settings: dict[str, Any] = {"scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
            if self.window is None or self.window >= width:
                settings["is_causal"] = True
            else:
                settings["attn_mask"] = visible(width, width, self.window, query.device)
            block = functional.scaled_dot_product_attention(q, k, v, **settings)
            outputs.append(block.transpose(1, 2).reshape(count * width, *query.shape[1:]))
            begin = end
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def sharded_state_dict(self, *_: object, **__: object) -> dict[str, Any]:
        """Return {}: attention has no parameters to save."""
        return {}


def slice_by_pieces(
    query: Tensor, key: Tensor, value: Tensor, own: QuerySlice, scale: float, window: int | None
) -> Tensor:
    """Return the attention of a query slice like `slice_by_varlen`, by one masked call for each sequence's piece."""
    outputs, queries_end, keys_end = [], 0, 0
    for queries, keys in own.lengths:
        queries_end, keys_end = queries_end + queries, keys_end + keys
        q = query[queries_end - queries : queries_end].transpose(0, 1)
        k, v = (x[keys_end - keys : keys_end].transpose(0, 1) for x in (key, value))
        mask = visible(queries, keys, window or keys, query.device)
        piece = functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, scale=scale, enable_gqa=q.shape[0] != k.shape[0]
        )
        outputs.append(piece[0].transpose(0, 1))
    return torch.cat(outputs)
