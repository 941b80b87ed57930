"""Reward for mathematical answers in a box."""

from relaxd.rewards.interface import RewardInput
from relaxd.rewards.mathematics.equality import are_equal
from relaxd.rewards.mathematics.normal_forms import last_boxed, reference


def math(sample: RewardInput) -> dict[str, float]:
    """1 if the reply's last \\boxed{...} or \\fbox{...} equals the answer, else 0.

    They are equal as text in MATH's normal form, or as formulas (see `are_equal`). If the answer has a box, its content
    counts. Parts: accuracy (equal to the reward), and format: 1 if there is a box.

    Raises:
        ValueError: the answer is empty.
    """
    return score_boxed(sample.response, sample.answer, "math")


def score_boxed(response: str, answer: str, reward: str) -> dict[str, float]:
    """Score the last box of a response against the reference answer: accuracy 1 if equal, format 1 if there is a box.

    The reward is the accuracy. Raises ValueError, which names the reward, if the answer is empty.
    """
    expected = reference(answer, reward)
    found = last_boxed(response)
    accuracy = float(found is not None and are_equal(found, expected))
    return {"reward": accuracy, "accuracy": accuracy, "format": float(found is not None)}
