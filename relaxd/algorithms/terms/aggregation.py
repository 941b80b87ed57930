"""Aggregation: how the losses of a step's tokens become one number.

The step's loss is Σ weight x loss of a token / normalizer. Both are chosen such that it doesn't matter how the step is
divided into micro-batches and among ranks.
"""

import numpy as np
from numpy.typing import NDArray

from relaxd.config.policy_gradient import Aggregation


def token_weights(aggregation: Aggregation, mask: NDArray[np.uint8], lengths: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return the weight of each token of a group: 0 where mask is 0, else

    - token_mean, sample_sum, constant_length: 1.
    - sample_mean: 1 / trained tokens of the token's sample.
    - group_mean: n / trained tokens of the group.

    Args:
        aggregation: one of the above.
        mask: uint8 [T], 1 where the token is trained on, the group's samples one after the other.
        lengths: int32 [n], tokens of each sample, of all its sequences; they add up to T.

    Returns:
        float32 [T].

    Raises:
        ValueError: lengths don't add up to T.
    """
    if int(lengths.sum()) != mask.size:
        raise ValueError(f"lengths add up to {int(lengths.sum())}, but mask has {mask.size} tokens")
    trained = (mask != 0).astype(np.float32)
    match aggregation:
        case "sample_mean":
            sample_of_token = np.repeat(np.arange(lengths.size), lengths)
            trained_per_sample = np.bincount(sample_of_token, weights=trained, minlength=lengths.size)
            return (trained / np.maximum(trained_per_sample, 1)[sample_of_token]).astype(np.float32)
        case "group_mean":
            return (trained * (lengths.size / max(int(np.count_nonzero(trained)), 1))).astype(np.float32)
        case _:
            return trained


def normalizer(aggregation: Aggregation, trained_tokens: int, samples: int, constant_length: int) -> float:
    """Return the divisor of the step's summed loss, at least 1.

    token_mean: trained_tokens. sample_mean, group_mean, sample_sum: samples. constant_length: samples x
    constant_length.

    Args:
        aggregation: one of the above.
        trained_tokens: tokens with mask 1 in the whole step, over all ranks.
        samples: samples in the whole step, over all ranks, those without a trained token included.
        constant_length: tokens.
    """
    match aggregation:
        case "token_mean":
            divisor = trained_tokens
        case "constant_length":
            divisor = samples * constant_length
        case _:
            divisor = samples
    return float(max(divisor, 1))
