"""The MLPs of a layer: dense, or a mixture of experts with a router, and a shared expert if the model has one."""

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
from copy import copy

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from services.trainer.transformer.kernels.swiglu import swiglu
from services.trainer.transformer.recompute import Recompute

# isort: split
import torch
from megatron.core.transformer.module import MegatronModule

from services.trainer.transformer.mlp.experts import Experts
from services.trainer.transformer.mlp.router import Router, float32_logits
from services.trainer.transformer.mlp.routing import RouterInputs


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


class MixtureOfExperts(MegatronModule):
    """Replaces the MLP of a dense layer.

    No token is dropped. The host never waits for the device; with expert parallelism it waits once per layer.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared_expert: DenseMLP | None = None
        if config.moe_shared_expert_intermediate_size is not None:
            self.shared_expert = DenseMLP(config, config.moe_shared_expert_intermediate_size)
            self.shared_expert_gate = SharedExpertGate(config)

    def forward(self, x: Tensor, inputs: RouterInputs, layer: int, recompute: Recompute) -> Tensor:
        """Send each token through its experts.

        Args:
            x: [T, 1, hidden], this rank's tokens.
            inputs: inputs of the router.
            layer: number of the layer within this stage, from 0.
            recompute: the layer's recomputation context.

        Returns:
            [T, 1, hidden].
        """
        tokens = x.squeeze(1)
        given = inputs.experts[layer] if inputs.experts is not None and self.router.replays else None
        routing = self.router(tokens, inputs.weight, given)
        output: Tensor = self.experts(tokens, routing, recompute=recompute.active).unsqueeze(1)
        if self.shared_expert is not None:
            output = output + self.shared_expert_gate(x) * self.shared_expert(x, recompute)
        return output


class SharedExpertGate(MegatronModule):
    """Weight of the shared expert for each token (Qwen2-MoE): sigmoid(x @ weight.T), in float32."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Return the weights: x [..., hidden] -> [..., 1]."""
        return float32_logits(x.flatten(0, -2), self.weight).view(*x.shape[:-1], 1).sigmoid().to(x.dtype)
