"""Search-R1's reward for short answers to questions (Jin et al. 2025, arXiv 2503.09516)."""

from collections.abc import Mapping
from typing import Any

from relaxd.media.messages import tagged
from relaxd.rewards.hub.f1 import words
from relaxd.rewards.interface import RewardInput, ground_truth, references

_MOST_TAGS = 10
"""Maximum number of <answer> or </answer> tags; a right reply with more gets 0.25, because it tries many answers."""


def search_r1(sample: RewardInput) -> dict[str, float]:
    """1 if the text in the reply's last <answer>...</answer> is among the right answers, else 0.

    Words are compared as by f1: without case, punctuation and articles. The right answers are
    metadata.reward_model.ground_truth.target, a text or a list, as in verl's data, or else the answer's references.
    With more than ten tags a right reply gets 0.25. Parts: accuracy: 1 or 0, and format: 1 if there is such a tag.

    Raises:
        ValueError: no right answer has words.
    """
    truth = ground_truth(sample)
    right = [found for one in _targets(truth) if (found := words(str(one)))]
    if not right:
        raise ValueError(
            f"answer, or metadata.reward_model.ground_truth, is {truth!r}: the reward search_r1 needs a text with "
            "words, or a list of such texts"
        )
    found = tagged(sample.response)
    accuracy = float(bool(found) and words(found[-1]) in right)
    response = sample.response.lower()
    many = max(response.count("<answer>"), response.count("</answer>")) > _MOST_TAGS
    return {"reward": accuracy / 4 if many else accuracy, "accuracy": accuracy, "format": float(bool(found))}


def _targets(truth: Any) -> list[Any]:
    if isinstance(truth, Mapping):
        truth = truth.get("target")
    if isinstance(truth, str):
        return list(references(truth))
    given = truth if isinstance(truth, list | tuple) else [truth]
    return [one for one in given if one is not None]
