"""The algorithms' settings: one typed section per algorithm, chosen by `name`."""

from typing import Literal

from pydantic import Field

from relaxd.config.base import Section


class GRPOConfig(Section):
    """Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300), with the usual variants as switches."""

    name: Literal["grpo"] = "grpo"
    """Chooses the algorithm."""
    normalize_std: bool = True
    """Divide advantages by the group's standard deviation. False gives Dr. GRPO (arXiv 2503.20783)."""
    std_epsilon: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation before dividing."""
    drop_zero_variance: bool = True
    """Drop groups whose rewards are all equal and publish the next prompt instead (DAPO's dynamic sampling)."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The probability ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """The probability ratio is clipped above at 1 + clip_high. DAPO (arXiv 2503.14476) uses 0.28."""
    old_logprobs: Literal["rollout", "current"] = "rollout"
    """Denominator of the ratio: the engine's log-probs, or the trainer's own at the time of the step (ratio 1)."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the reference (the initial model) in the loss. 0 keeps no reference."""
    kl_estimator: Literal["k1", "k2", "k3", "low_var_kl"] = "low_var_kl"
    """Estimator of that divergence (Schulman 2020, "Approximating KL divergence"); low_var_kl is k3, clamped."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    loss_aggregation: Literal["sample_mean", "token_mean", "constant_length"] = "token_mean"
    """sample_mean: mean over each sample's tokens, then over samples (GRPO). token_mean: mean over all tokens of the
    step (DAPO). constant_length: sum over tokens divided by samples times constant_length (Dr. GRPO)."""
    constant_length: int = Field(default=1024, ge=1)
    """Divisor of loss_aggregation = "constant_length", in tokens."""


AlgorithmConfig = GRPOConfig
"""Any algorithm's section. More algorithms make this a union discriminated by `name`."""
