"""Inputs of losses, drawn at random."""

import numpy as np
import torch

from relaxd.algorithms import LossInputs

TOKENS, SEQUENCES = 60, 7


def make_inputs(dtype: torch.dtype = torch.float64, *, old: bool = False, spread: float = 0.4) -> LossInputs:
    """Tokens of some sequences in disorder, of which one has no trained token."""
    random = np.random.default_rng(11)

    def normal(scale: float) -> torch.Tensor:
        return torch.tensor(random.normal(0, scale, TOKENS), dtype=dtype)

    sequence = torch.tensor(random.integers(0, SEQUENCES, TOKENS))
    mask = torch.tensor(random.random(TOKENS) < 0.8, dtype=dtype).masked_fill(sequence == 3, 0.0)
    rollout = -normal(1).abs() - 1.5
    shift = torch.tensor(random.normal(0, spread / 2, SEQUENCES), dtype=dtype)[sequence]
    columns = {
        "rollout_logprobs": rollout,
        "ref_logprobs": rollout + normal(spread),
        "advantages": torch.tensor(random.normal(0, 1, SEQUENCES), dtype=dtype)[sequence],
    }
    teacher = np.random.default_rng(12).normal(0, 2 * spread, TOKENS)
    columns["teacher_logprobs"] = rollout + torch.tensor(teacher, dtype=dtype)
    if old:
        columns["old_logprobs"] = rollout + normal(spread)
    return LossInputs(
        logprobs=(rollout + shift + normal(spread)).requires_grad_(),
        columns=columns,
        mask=mask,
        weight=torch.tensor(random.random(TOKENS), dtype=dtype),
        sequence=sequence,
        sequences=SEQUENCES,
        entropy=(normal(1).abs() + 0.1).requires_grad_(),
    )
