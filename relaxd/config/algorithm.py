"""The algorithms' settings: one typed section per algorithm, chosen by `name`."""

from typing import Literal, Self

from pydantic import Field, model_validator

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
    """Denominator of the ratio: the engine's log-probs, or the trainer's own at the step's beginning: computed before
    the first update if a step has several (trainer.mini_batches, epochs), else the ratio is 1."""
    correction: Literal["none", "tis", "icepop"] = "none"
    """Weight each token's policy-gradient term by w, its probability under the trainer at the start of the step divided
    by that under the engine. tis: w, truncated (Yao et al. 2025). icepop: w, and 0 outside two limits (arXiv
    2510.18855). Both need old_logprobs = "current": with "rollout" the same ratio would count twice."""
    tis_clip: float = Field(default=2.0, gt=0)
    """Largest w of correction = "tis"."""
    icepop_low: float = Field(default=0.5, ge=0)
    """Tokens with a smaller w are left out by correction = "icepop" (the paper's alpha)."""
    icepop_high: float = Field(default=5.0, gt=0)
    """Tokens with a larger w are left out by correction = "icepop" (the paper's beta)."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the reference (the initial model) in the loss. 0 keeps no reference."""
    kl_estimator: Literal["k1", "k2", "k3", "low_var_kl"] = "low_var_kl"
    """Estimator of that divergence (Schulman 2020, "Approximating KL divergence"); low_var_kl is k3, clamped."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    loss_aggregation: Literal["sample_mean", "token_mean", "constant_length"] = "token_mean"
    """sample_mean: mean over each sample's tokens, then over samples (GRPO). token_mean: mean over all tokens of the
    step (DAPO). constant_length: sum over tokens divided by samples times constant_length (Dr. GRPO). The tokens of a
    sample are those of all its sequences, so that a conversation that was branched counts once."""
    constant_length: int = Field(default=1024, ge=1)
    """Divisor of loss_aggregation = "constant_length", in tokens."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss has a KL term."""
        return self.kl_coef > 0

    @model_validator(mode="after")
    def _limits_in_order(self) -> Self:
        if self.icepop_low >= self.icepop_high:
            raise ValueError(
                f"algorithm.icepop_low is {self.icepop_low:g}: it must be less than icepop_high, {self.icepop_high:g}"
            )
        return self

    @model_validator(mode="after")
    def _ratio_counts_once(self) -> Self:
        if self.correction != "none" and self.old_logprobs == "rollout":
            raise ValueError(
                f'algorithm.correction is "{self.correction}" and algorithm.old_logprobs is "rollout": both weight a '
                'token by its ratio to the engine. Use old_logprobs = "current", or correction = "none"'
            )
        return self


AlgorithmConfig = GRPOConfig
"""Section of any algorithm. With several algorithms it becomes a union discriminated by `name`."""
