"""Inputs and output of the routers of a mixture of experts."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RouterInputs:
    """Inputs of the routers for one micro-batch."""

    weight: float = 0.0
    """Total weight of the micro-batch's tokens in the step's loss. It scales the routers' own losses, so that they are
    averaged over a step like the tokens' loss."""
    experts: Tensor | None = None
    """int16 [layers of this stage, T, top_k], T being this rank's tokens: experts that were chosen before, for routers
    that replay them (`Router.replays`). Where they are negative the router chooses. The weights are always its own."""


@dataclass(frozen=True)
class Routing:
    """Experts and weights of a layer's tokens."""

    experts: Tensor
    """int64 [T, top_k]."""
    weights: Tensor
    """float32 [T, top_k], differentiable."""
