"""The reward for Geometry3K: a boxed answer after tagged thinking."""

from relaxd.rewards.interface import RewardInput
from relaxd.rewards.mathematics.math import score_boxed


def geo3k(sample: RewardInput) -> dict[str, float]:
    """0.9 if the last box equals the answer, as the reward math says, and 0.1 for the format.

    Parts: accuracy, and format: 1 if the reply begins with <think>, followed by </think> and then \\boxed{...}.

    Raises:
        ValueError: the answer is empty.
    """
    accuracy = score_boxed(sample.response, sample.answer, "geo3k")["accuracy"]
    form = float(_is_well_formed(sample.response.strip()))
    return {"reward": 0.9 * accuracy + 0.1 * form, "accuracy": accuracy, "format": form}


def _is_well_formed(response: str) -> bool:
    # Searches from the end: if any box and tag fit together, the last ones do.
    box = response.rfind(r"\boxed{", 0, response.rfind("}") + 1) if response.startswith("<think>") else -1
    return box >= 0 and response.rfind("</think>", 0, box) >= 0
