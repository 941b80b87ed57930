"""A transformer layer on packed sequences: Megatron's modules and parameter names, our forward pass."""

import services.trainer.megatron.cpu  # noqa: F401  must come before Megatron

# isort: split
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from torch import Tensor

from services.trainer.transformer.attention.sequence_layout import SequenceLayout
from services.trainer.transformer.kernels.activation_offload import ActivationOffload
from services.trainer.transformer.kernels.recompute import Recompute
from services.trainer.transformer.mlp.mixture import MixtureOfExperts


@dataclass
class PolicyConfig(TransformerConfig):
    """Megatron's configuration, with the settings of our layers."""

    selective_layers: int = 0
    """Number of layers, the first of each pipeline stage, that recompute most of their tensors in the backward pass."""
    attention_output_bias: bool = False
    """True if attention's output projection has a bias."""


class PackedLayer(TransformerLayer):
    """Norm, attention, norm, MLP or experts, each half added to the residual."""

    config: PolicyConfig

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._index = _index_in_stage(self.layer_number - 1, self.config, named.get("vp_stage"))
        """Number of the layer within this pipeline stage, from 0, chunk after chunk."""
        self.offload: ActivationOffload | None = None
        """Offload of this layer's activations to the host, if enabled."""

    def forward(
        self, hidden_states: Tensor, *, rotary_pos_emb: Tensor, packed_seq_params: SequenceLayout, **_: object
    ) -> tuple[Tensor, None]:
        """Run the layer.

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
            attended = self.self_attention(x, rotary_pos_emb, packed_seq_params, recompute)
            residual, x = self.pre_mlp_layernorm.of_sum(residual, attended)
            recompute.register(x, self.pre_mlp_layernorm, residual)
            if isinstance(self.mlp, MixtureOfExperts):
                output = self.mlp(x, packed_seq_params.router, self._index, recompute)
            else:
                output = self.mlp(x, recompute)
            return residual + output, None


def _index_in_stage(layer: int, config: TransformerConfig, chunk: int | None) -> int:
    """Return a layer's number within this pipeline stage, all of whose chunks have equally many."""
    before = 0 if not chunk else chunk * get_num_layers_to_build(config, chunk)
    return before + layer - get_transformer_layer_offset(config, chunk)
