"""DAPO's soft punishment of long answers (Yu et al. 2025, arXiv 2503.14476, equation 13)."""

from relaxd.rewards.interface import RewardInput


def overlong(sample: RewardInput, max_tokens: int = 0, buffer_tokens: int = 0, penalty: float = 1.0) -> float:
    """0 for a short answer, falling to -penalty over the last buffer_tokens before max_tokens tokens.

    A term to add to another reward. Settings: max_tokens: usually rollout.max_new_tokens; buffer_tokens: number of
    tokens over which the reward falls; penalty, 1 by default.

    Raises:
        ValueError: a setting is missing or wrong, or the number of the answer's tokens is unknown.
    """
    if not 0 < buffer_tokens <= max_tokens or penalty < 0:
        raise ValueError(
            f"settings are max_tokens = {max_tokens}, buffer_tokens = {buffer_tokens}, penalty = {penalty}: overlong "
            "needs 0 < buffer_tokens <= max_tokens and penalty >= 0"
        )
    if sample.tokens <= 0:
        raise ValueError("the number of the answer's tokens is unknown: overlong needs sample.tokens")
    into = sample.tokens - (max_tokens - buffer_tokens)
    return -penalty * min(max(into / buffer_tokens, 0.0), 1.0)
