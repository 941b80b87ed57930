"""A gated delta net as a layer's attention (Gated Delta Networks, arXiv 2412.06464), as in Qwen3-Next and Qwen3.5."""

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from relaxd.models.shape import DeltaNetSizes
from services.trainer.transformer.delta_rule import ChunkTree, causal_convolution, gated_delta_rule, gated_norm, unit


class GatedDeltaNet(MegatronModule):
    """Projection, convolution, gated delta rule, gated norm, projection. Tensor-parallel ranks divide the key heads.

    Parameter names differ from attention's, because checkpoints require one shape per name over all layers.

    Attributes:
        linear_in: the projection to q, k, v v ..., z z ..., b b ..., a a ... for each key head, which has several
            values (v), gates (z), strengths (b) and decays (a).
        convolution: [channels, tokens], over each key head's q, k, v v ...
        A_log, dt_bias: [value heads], parameters of the decays.
        norm: [value size].
    """

    def __init__(self, config: TransformerConfig, sizes: DeltaNetSizes, **_: object) -> None:
        super().__init__(config=config)
        backend, shared = LocalSpecProvider(), sizes.value_heads // sizes.key_heads
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        self.sizes, self.shared, self.key_heads = sizes, shared, sizes.key_heads // ranks
        self.channels = 2 * sizes.key_size + shared * sizes.value_size
        """Number of convolved channels per key head."""
        settings: dict[str, Any] = {"config": config, "bias": False, "skip_bias_add": False, "is_expert": False}
        width = 2 * sizes.keys + 2 * sizes.values + 2 * sizes.value_heads
        self.linear_in = backend.column_parallel_linear()(
            config.hidden_size, width, init_method=config.init_method, gather_output=False, **settings
        )
        self.linear_out = backend.row_parallel_linear()(
            sizes.values, config.hidden_size, init_method=config.init_method, input_is_parallel=True, **settings
        )
        self.convolution = self._parameter(self.key_heads * self.channels, sizes.convolution)
        self.A_log = self._parameter(self.key_heads * shared)
        self.dt_bias = self._parameter(self.key_heads * shared)
        self.norm = self._parameter(sizes.value_size, divided=False)

    def _parameter(self, *shape: int, divided: bool = True) -> torch.nn.Parameter:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        parameter = torch.nn.Parameter(torch.empty(shape, dtype=self.config.params_dtype, device=device))
        if divided:
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        else:  # each rank has the gradient of its heads, which Megatron adds up
            parameter.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]
        return parameter

    def forward(self, x: Tensor, tree: ChunkTree) -> Tensor:
        """Run the layer. The backward pass recomputes the large values between the projections instead of keeping them.

        Args:
            x: [T, 1, hidden] (T over the tensor-parallel ranks under sequence parallelism).
            tree: the sequences' chunks.

        Returns:
            Shaped like x.
        """
        projected, _ = self.linear_in(x)
        projected = projected.view(projected.shape[0], self.key_heads, -1)
        mixed = checkpoint(self._mix, projected, tree, use_reentrant=False, preserve_rng_state=False)
        output, _ = self.linear_out(mixed)
        return output

    def _mix(self, projected: Tensor, tree: ChunkTree) -> Tensor:
        sizes, shared = self.sizes, self.shared
        convolved, gate, strength, decay = projected.split(
            [self.channels, shared * sizes.value_size, shared, shared], -1
        )
        convolved = functional.silu(causal_convolution(convolved.flatten(1), self.convolution, tree))
        heads = convolved.unflatten(-1, (self.key_heads, -1))
        precise = torch.promote_types(projected.dtype, torch.float32)
        query, key, value = heads.to(precise).split([sizes.key_size, sizes.key_size, shared * sizes.value_size], -1)
        rates = functional.softplus(decay.to(precise) + self.dt_bias.view(self.key_heads, shared))
        output = gated_delta_rule(
            unit(query) * sizes.key_size**-0.5,
            unit(key),
            value.unflatten(-1, (shared, -1)),
            -self.A_log.to(precise).exp().view(self.key_heads, shared) * rates,
            strength.sigmoid().to(precise),
            tree,
        )
        gates = gate.unflatten(-1, (shared, -1)).to(precise)
        normed = gated_norm(output, self.norm.to(precise), gates, self.config.layernorm_epsilon)
        return normed.to(projected.dtype).flatten(1).unsqueeze(1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the parameters as shards, for a checkpoint that any parallel layout can load."""
        own = {name: parameter for name, parameter in self.named_parameters() if "." not in name}
        divided = dict.fromkeys(own.keys() - {"norm"}, 0)
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(own, prefix, divided, sharded_offsets)
        for name, module in self.named_children():
            found |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata)
        return found
