"""Reward for an exact answer."""

from relaxd.rewards.base import RewardInput


def exact_match(sample: RewardInput) -> float:
    """1 if the reply equals the answer, ignoring surrounding white space, else 0.

    Raises:
        ValueError: the answer is empty, with which an empty reply would be right.
    """
    answer = sample.answer.strip()
    if not answer:
        raise ValueError("answer is empty: the reward exact_match needs one")
    return float(sample.response.strip() == answer)
