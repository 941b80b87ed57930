"""Per-token estimators of the KL divergence, from samples of the policy. Tensor methods only: no torch import.

Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relaxd.config.policy_gradient import KLEstimator

if TYPE_CHECKING:
    from torch import Tensor


def kl_divergence(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(policy || reference) at each token; with l = logprobs - ref_logprobs:

    - k1: l. Unbiased, but as a loss its expected gradient is zero, and it may be negative.
    - k2: l² / 2. Biased, but its gradient is that of the divergence.
    - k3: exp(-l) - 1 + l. Unbiased, never negative; may overflow where the reference is much likelier.
    - low_var_kl: k3 with l clamped to ±20 and the result to ±10, as in verl.

    Args:
        logprobs: [T], with gradient.
        ref_logprobs: [T].
        estimator: one of the above.

    Returns:
        [T], with gradient to logprobs.
    """
    log_ratio = logprobs - ref_logprobs
    match estimator:
        case "k1":
            return log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            return _k3(log_ratio)
        case "low_var_kl":
            return _k3(log_ratio.clamp(-20.0, 20.0)).clamp(-10.0, 10.0)


def _k3(log_ratio: Tensor) -> Tensor:
    # expm1, because exp(-l) - 1 is inexact for small l in float32.
    return (-log_ratio).expm1() + log_ratio
