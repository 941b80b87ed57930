"""Megatron's SequentialMLP, which computes experts one by one, as a baseline."""

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any
from unittest import mock

import megatron.core.transformer.mlp as mlp
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from services.trainer.learner import learner
from services.trainer.model import layers
from services.trainer.transformer.mlp import swiglu


class SequentialExperts(nn.Module):
    """Megatron's layer with the interface of `MixtureOfExperts`."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        config = copy(config)
        config.bias_activation_fusion = True
        bare: Any = moe_utils
        if not hasattr(bare, "te_general_gemm"):
            bare.te_general_gemm = None  # Megatron's router reads it, but leaves it unbound without Transformer Engine
        bare = mlp
        bare.weighted_bias_swiglu_impl = _weighted_swiglu
        spec = get_moe_module_spec_for_backend(
            backend=LocalSpecProvider(), num_experts=config.num_moe_experts, moe_grouped_gemm=False
        )
        self.layer = build_module(spec, config=config, pg_collection=get_default_pg_collection())

    def forward(self, x: Tensor, _: object) -> Tensor:
        """Run the layer: x [T, 1, hidden] -> [T, 1, hidden]."""
        output: Tensor = self.layer(x)[0]
        return output


def _weighted_swiglu(x: Tensor, bias: None, weights: Tensor, *_: object) -> Tensor:
    return (swiglu(x) * weights).to(x.dtype)


@contextmanager
def sequential_experts() -> Iterator[None]:
    """Build learners with Megatron's experts inside the block. They can't export weights."""
    with (
        mock.patch.object(layers, "MixtureOfExperts", SequentialExperts),
        mock.patch.object(learner, "exported_parameters", return_value=[]),
    ):
        yield
