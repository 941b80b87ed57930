"""Why groups are dropped."""

from enum import StrEnum


class DropReason(StrEnum):
    """Why a group was dropped; names and meanings are those of the DropReason enum in group.proto."""

    ZERO_VARIANCE = "zero_variance"
    BAD_PROMPT = "bad_prompt"
    PROMPT_TOO_LONG = "prompt_too_long"
    TOO_LARGE = "too_large"
    REWARD_FAILED = "reward_failed"
    MALFORMED = "malformed"
    TOO_LONG = "too_long"
    STALE = "stale"
    NON_FINITE_GRADIENTS = "non_finite_gradients"
    POISON = "poison"
    DAMAGED = "damaged"
    MEMORY = "memory"
    RUN_ENDED = "run_ended"
    RUN_FAILED = "run_failed"
