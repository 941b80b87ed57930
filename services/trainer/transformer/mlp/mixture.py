"""The MLP of a mixture-of-experts layer: router, experts, and a shared expert if the model has one."""

import services.trainer.megatron.cpu  # noqa: F401  must come before Megatron

# isort: split
import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from services.trainer.transformer.kernels.recompute import Recompute
from services.trainer.transformer.mlp.dense_mlp import DenseMLP
from services.trainer.transformer.mlp.experts import Experts
from services.trainer.transformer.mlp.router import Router, float32_logits
from services.trainer.transformer.mlp.routing import RouterInputs


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
