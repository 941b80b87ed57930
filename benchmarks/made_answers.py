"""Columns of a group's answers, made up."""

import numpy as np

from relaxd.board import Column


def answers(samples: int, tokens: int, *, text: str, version: int = 0) -> dict[str, Column]:
    """Return what rollout writes of a group: `samples` answers of `tokens` tokens, each with the same text."""
    total = samples * tokens
    return {
        "tokens": np.arange(total, dtype=np.int32),
        "sample_of_sequence": np.arange(samples, dtype=np.int32),
        "lengths": np.full(samples, tokens, np.int32),
        "shares_prompt": np.ones(samples, np.uint8),
        "loss_mask": np.ones(total, np.uint8),
        "rollout_logprobs": np.full(total, -0.5, np.float32),
        "versions": np.full(total, version, np.int64),
        "finish": ["stop"] * samples,
        "text": [text] * samples,
        "spans_weight_update": np.zeros(samples, np.uint8),
    }
