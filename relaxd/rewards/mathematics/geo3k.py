"""The reward for Geometry3K: a boxed answer after tagged thinking."""

from relaxd.rewards.base import RewardInput
from relaxd.rewards.mathematics.math import score_boxed


def geo3k(sample: RewardInput) -> dict[str, float]:
    """0.9 if the last box equals the answer, as the reward math says, and 0.1 for the format.

    Parts: accuracy, and format: 1 if the reply is <think>...</think>...\\boxed{...}, from its beginning on.

    Raises:
        ValueError: the answer is empty.
    """
    accuracy = score_boxed(sample.response, sample.answer, "geo3k")["accuracy"]
    form = float(_is_well_formed(sample.response.strip()))
    return {"reward": 0.9 * accuracy + 0.1 * form, "accuracy": accuracy, "format": form}


def _is_well_formed(response: str) -> bool:
    thought = response.find("</think>") if response.startswith("<think>") else -1
    box = response.find(r"\boxed{", thought) if thought >= 0 else -1
    return box >= 0 and response.find("}", box) >= 0
