"""What goes into the routers of a mixture of experts, and what comes out of each."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RouterInputs:
    """What the routers need to know about a micro-batch."""

    weight: float = 0.0
    """What the micro-batch's tokens weigh in the step's loss, together. The routers' own losses are scaled by it, so
    that they are averaged over a step like the tokens' loss."""
    experts: Tensor | None = None
    """int64 [layers of this stage, T, top_k], T being this rank's tokens: the experts to use instead of the routers'
    own choice, as an engine reports them (routing replay). The weights are the router's own all the same."""


@dataclass(frozen=True)
class Routing:
    """Where the tokens of a layer go."""

    experts: Tensor
    """int64 [T, top_k]."""
    weights: Tensor
    """float32 [T, top_k], differentiable."""
