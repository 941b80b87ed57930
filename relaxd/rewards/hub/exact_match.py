"""Reward for an exact answer."""

from relaxd.rewards.interface import RewardInput, references


def exact_match(sample: RewardInput) -> float:
    """1 if the reply equals the answer, or one of its references, ignoring surrounding white space, else 0.

    Raises:
        ValueError: the answer is empty, so that an empty reply would be right.
    """
    answer = sample.answer.strip()
    if not answer:
        raise ValueError("answer is empty: the reward exact_match needs one")
    return float(sample.response.strip() in {answer, *(one.strip() for one in references(answer))})
