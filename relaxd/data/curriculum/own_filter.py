"""A user's own filter of groups: it decides whether a scored group is trained on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from relaxd.importing import ImportProblem, describe_error, import_own

COLUMNS = ("prompt", "text", "finish", "sample_of_sequence", "lengths", "reward", "reward_parts")
"""Names of the board columns from which a filter's samples are built."""


@dataclass(frozen=True)
class ScoredSample:
    """A sample of a group, in the form that filters get."""

    prompt: str
    """Text of the prompt's last message."""
    response: str
    """Text of the model's answer; in a conversation, of the last answer."""
    answer: str
    """Reference answer of the prompt."""
    metadata: Mapping[str, Any]
    """Metadata of the prompt: further fields of its row in the data."""
    reward: float
    """Reward of the sample."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Values of the parts of the sample's reward, by name. Other samples may have other parts."""
    tokens: int = 0
    """Number of tokens of the answer; in a conversation, of all sequences."""
    truncated: bool = False
    """True if the answer was cut off at its maximum length."""


class FilterError(ValueError):
    """A user's own filter can't be used, or failed."""


class GroupFilter:
    """Calls a user's own filter. A filter that fails is reloaded from its file for the next group."""

    def __init__(self, name: str) -> None:
        """Import the user's filter function. Raises FilterError if it can't be imported, or isn't a function."""
        self._who = f'the filter "{name}"'
        self._name = name
        self._function: Callable[[Sequence[ScoredSample]], Any] | None = self._load()

    def keeps(self, columns: Mapping[str, Any]) -> bool:
        """Return True if the filter wants to train on a group. `columns` are the group's columns (`COLUMNS`). Raises
        FilterError if the filter fails."""
        function = self._function = self._function or self._load()
        samples = samples_of(columns)
        try:
            kept = function(samples)
            if not isinstance(kept, bool | np.bool_):
                raise TypeError(f"it returned {kept!r}: it must be True, to train on the group, or False")
        except Exception as error:  # a user's function may raise anything
            self._function = None
            raise FilterError(f"{self._who} failed: {describe_error(error)}") from error
        return bool(kept)

    def _load(self) -> Callable[[Sequence[ScoredSample]], Any]:
        try:
            function = import_own(self._name)
        except ImportProblem as error:
            raise FilterError(f"{self._who} can't be used: {error}") from error
        if not callable(function):
            raise FilterError(f"{self._who} is a {type(function).__name__}, not a function")
        found: Callable[[Sequence[ScoredSample]], Any] = function
        return found


def samples_of(columns: Mapping[str, Any]) -> list[ScoredSample]:
    """Return the samples of a scored group, built from its columns (`COLUMNS`)."""
    prompt, parts, rewards = columns["prompt"], columns["reward_parts"], np.asarray(columns["reward"])
    sample_of_sequence = np.asarray(columns["sample_of_sequence"])
    tokens = np.bincount(sample_of_sequence, np.asarray(columns["lengths"]), rewards.size)
    last = dict(zip(sample_of_sequence.tolist(), zip(columns["text"], columns["finish"], strict=True), strict=True))
    return [
        ScoredSample(
            prompt=prompt["text"],
            response=last[number][0],
            answer=prompt["answer"],
            metadata=prompt["metadata"],
            reward=float(reward),
            parts={name: values[number] for name, values in parts.items() if values[number] is not None},
            tokens=int(tokens[number]),
            truncated=last[number][1] == "length",
        )
        for number, reward in enumerate(rewards)
    ]
