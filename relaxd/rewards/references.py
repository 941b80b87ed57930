"""Answers with several references, of which any is right."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

from relaxd.rewards.base import RewardInput, check_output


def references(answer: str) -> list[str]:
    """Return the references in an answer: the texts of a JSON list, as data with lists have them, or the answer."""
    if answer.startswith("[") and answer.endswith("]"):
        try:
            found = json.loads(answer)
        except ValueError:
            return [answer]
        if all(isinstance(one, str) for one in found) and (texts := [one for one in found if one.strip()]):
            return texts
    return [answer]


def best_of_references(reward: Callable[[RewardInput], Any]) -> Callable[[RewardInput], Any]:
    """Return a reward that gives what the reference that fits best gets."""

    @wraps(reward)
    def best(sample: RewardInput) -> Any:
        scores = [reward(replace(sample, answer=one)) for one in references(sample.answer)]
        return max(scores, key=lambda score: check_output(score).reward)

    return best
