"""The MLP of a dense layer, and the shared expert of a mixture."""

import services.trainer.megatron.cpu  # noqa: F401  must come before Megatron

# isort: split
from copy import copy

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from services.trainer.transformer.kernels.recompute import Recompute
from services.trainer.transformer.kernels.swiglu import swiglu


class DenseMLP(MLP):
    """Megatron's MLP (its products and their tensor parallelism) with our SwiGLU."""

    def __init__(self, config: TransformerConfig, ffn_size: int | None = None) -> None:
        """Use `ffn_size` as inner width, by default the configuration's."""
        if ffn_size is not None:
            config = copy(config)
            config.ffn_hidden_size = ffn_size
        backend = LocalSpecProvider()
        linear = MLPSubmodules(linear_fc1=backend.column_parallel_linear(), linear_fc2=backend.row_parallel_linear())
        super().__init__(config, linear, ffn_hidden_size=config.ffn_hidden_size)

    def forward(self, x: Tensor, recompute: Recompute) -> Tensor:
        """Run the MLP: x [T, 1, hidden] -> [T, 1, hidden]. An active `recompute` covers the inputs of both products."""
        first = recompute(self._first, x)
        output, _ = self.linear_fc2(recompute(swiglu, first))
        return output

    def _first(self, x: Tensor) -> Tensor:
        first, _ = self.linear_fc1(x)
        return first
