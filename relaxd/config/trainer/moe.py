"""Training of mixture-of-experts models."""

from pydantic import Field

from relaxd.config.base import Section


class MoEConfig(Section):
    """Routers of mixture-of-experts models. Dense models ignore this section."""

    aux_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the load-balancing loss (Switch Transformers, arXiv 2101.03961, equations 4 to 6), which is 1 under an
    even load. Added to the loss for each layer and micro-batch, in proportion to the micro-batch's share of the step. 0
    turns it off, as is usual in RL."""
    z_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the router's z-loss (ST-MoE, arXiv 2202.08906, equation 5), which keeps its logits small. Added like
    the load-balancing loss. 0 turns it off."""
    freeze_router: bool = False
    """Keep the routers fixed, so that tokens stay with their pretrained experts."""
