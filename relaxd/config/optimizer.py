"""Settings of an optimizer."""

from typing import Literal

from pydantic import Field

from relaxd.config.base import Section


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the end of the decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate over run.steps after the warm-up. All updates of a step have the same rate."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up, whatever the number of updates in a step is."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment."""
    epsilon: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Maximum global gradient norm, above which gradients are clipped; 0 turns clipping off."""
    cpu_offload: bool = False
    """Keep and update the optimizer's state and main weights in host memory."""
