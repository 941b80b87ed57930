"""DeepScaleR's reward: a boxed answer after the thinking."""

from relaxd.rewards.interface import RewardInput
from relaxd.rewards.mathematics.math import score_boxed

_MARKS = ("</think>", "###Response")


def deepscaler(sample: RewardInput) -> dict[str, float]:
    """1 if the last box after the thinking equals the answer, else 0, as the reward math says.

    Only the text after the last "</think>" counts, or else after the first "###Response". A reply with neither gets 0,
    even if it is right: use math for a model that doesn't think. Parts: accuracy (equal to the reward), format: 1 if
    there is a box after the thinking, and thought: 1 if the reply has "</think>" or "###Response".

    Raises:
        ValueError: the answer is empty.
    """
    _, closed, said = sample.response.rpartition(_MARKS[0])
    if not closed:
        _, closed, said = sample.response.partition(_MARKS[1])
    # Without a mark partition and rpartition leave the text on different sides: nothing was said.
    return {**score_boxed(said if closed else "", sample.answer, "deepscaler"), "thought": float(bool(closed))}
