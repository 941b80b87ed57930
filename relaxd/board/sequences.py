"""The sequences of a group, read from its columns by the stages that ask a model about them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxd.board.schema import TEACHER_PROMPT_TOKENS
from relaxd.board.types import Column


@dataclass(frozen=True)
class GroupSequence:
    """One sequence of a group."""

    prompt: NDArray[np.integer]
    """[P] token ids of the prompt that its group shares; empty for a sequence that begins with its own."""
    tokens: NDArray[np.integer]
    """[L] its own token ids."""
    loss_mask: NDArray[np.uint8]
    """uint8 [L]: 1 for tokens to train on."""


def read_sequences(columns: Mapping[str, Column], prompt: str) -> list[GroupSequence]:
    """Return the sequences of a group, at least one.

    Args:
        columns: the group's.
        prompt: the column with the prompt that they continue.

    Raises:
        ValueError: the columns are malformed.
    """
    needs = (prompt, "tokens", "lengths", "loss_mask", "shares_prompt")
    arrays: dict[str, NDArray[Any]] = {name: np.asarray(columns[name]) for name in needs}
    if any(array.ndim != 1 or array.dtype.kind not in "iu" for array in arrays.values()):
        raise ValueError(f"{', '.join(needs)} must be arrays [values] of integers")
    tokens, lengths, mask, shares = (arrays[name] for name in needs[1:])
    if not lengths.size or (lengths < 0).any() or not int(lengths.sum()) == len(tokens) == len(mask):
        raise ValueError(
            f"lengths add up to {int(lengths.sum())}, but tokens has {len(tokens)} values and loss_mask {len(mask)}"
        )
    if len(shares) != len(lengths):
        raise ValueError(f"shares_prompt has {len(shares)} values for {len(lengths)} sequences")
    if prompt == TEACHER_PROMPT_TOKENS and not shares.all():
        raise ValueError(
            f"sequence {int(np.flatnonzero(shares == 0)[0])} begins with a prompt of its own, in whose place the "
            "teacher's prompt (roles.teacher.privileged_key) can't be put"
        )
    ends = np.cumsum(lengths)
    own = [slice(int(end - length), int(end)) for end, length in zip(ends, lengths, strict=True)]
    shared = arrays[prompt]
    return [
        GroupSequence(shared if shares[index] else shared[:0], tokens[part], (mask[part] != 0).astype(np.uint8))
        for index, part in enumerate(own)
    ]
