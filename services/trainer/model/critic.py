"""The critic: the policy's model with one value for each position instead of logits."""

from typing import Any

import services.trainer.megatron.cpu  # noqa: F401  must come before Megatron

# isort: split
import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from services.trainer.megatron.parallel import World
from services.trainer.model.architecture import Architecture
from services.trainer.model.model import PolicyModel, StageModel, build_policy
from services.trainer.model.packed_layer import PolicyConfig

VALUE_HEAD = "value_head.weight"
"""Name of the head's parameter on the last pipeline stage: [1, hidden]. All tensor-parallel ranks have the whole."""


class CriticModel(PolicyModel):
    """One pipeline stage of the critic, or one chunk of it. On the last, a head of zeros replaces the output layer."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, share_embeddings_and_output_weights=False)
        if self.post_process:
            del self.output_layer
            self.value_head = torch.nn.Linear(self.config.hidden_size, 1, bias=False, dtype=self.config.params_dtype)
            torch.nn.init.zeros_(self.value_head.weight)

    def output_weight(self) -> Tensor:
        """Return the value head: [1, hidden]."""
        return self.value_head.weight

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """See Megatron; without what it does for an output layer."""
        state: dict[str, Any] = MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)
        return state


def build_critic(shape: Architecture, config: PolicyConfig, world: World) -> StageModel:
    """Build this rank's stage of the critic, without loading weights."""
    return build_policy(CriticModel, shape, config, world)
