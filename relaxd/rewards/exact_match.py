"""Is the reply the answer, to the letter?"""

from relaxd.rewards.base import RewardInput


def exact_match(sample: RewardInput) -> float:
    """1 if the reply equals the answer, white space around either left aside, else 0.

    Raises:
        ValueError: there is no answer. (An empty reply would else be right.)
    """
    answer = sample.answer.strip()
    if not answer:
        raise ValueError("answer is empty: the reward exact_match needs one")
    return float(sample.response.strip() == answer)
