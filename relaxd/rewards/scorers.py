"""The reward of a run: one function, a sum of several, or one chosen for each sample."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from relaxd.config import RewardConfig
from relaxd.config.reward import RewardTerm
from relaxd.rewards.adapters import awaits, takes_group
from relaxd.rewards.base import RewardInput, RewardOutput
from relaxd.rewards.calling import Outcome, call
from relaxd.rewards.data_sources import reward_of_data_source
from relaxd.rewards.loading import resolve
from relaxd.rewards.table import UnknownRewardError, check_name, is_bundled


class Scorer(Protocol):
    """Scores samples."""

    takes_group: bool
    """Whether it must get all samples of a group at once."""
    awaits: bool
    """Whether it awaits something, so that it is faster if it gets them at once."""

    def score(self, samples: Sequence[RewardInput], runner: asyncio.Runner) -> list[Outcome]:
        """Score samples of a group. Coroutines run in `runner`. Returns for each its score, or what a reward raised."""


class Single:
    """One reward."""

    def __init__(self, name: str, settings: Mapping[str, Any] | None = None, key: str = "") -> None:
        """Load it. Raises UnknownRewardError and BadRewardError."""
        self._reward: Callable[..., Any] = resolve(name, settings)
        self._key = key
        self.takes_group = takes_group(self._reward)
        self.awaits = awaits(self._reward)

    def score(self, samples: Sequence[RewardInput], runner: asyncio.Runner) -> list[Outcome]:
        """See Scorer."""
        return call(self._reward, samples, runner, self._key)


class Sum:
    """The weighted sum of terms. Its parts are the terms' values by label, and their parts as label_part."""

    def __init__(self, terms: Sequence[RewardTerm]) -> None:
        """Load the terms. Raises UnknownRewardError and BadRewardError."""
        self._terms = [(term, Single(term.name, term.settings, term.key)) for term in terms]
        self.takes_group = any(scorer.takes_group for _, scorer in self._terms)
        self.awaits = any(scorer.awaits for _, scorer in self._terms)

    def score(self, samples: Sequence[RewardInput], runner: asyncio.Runner) -> list[Outcome]:
        """See Scorer."""
        outputs = [scorer.score(samples, runner) for _, scorer in self._terms]
        return [self._sum(of_sample) for of_sample in zip(*outputs, strict=True)]

    def _sum(self, outcomes: Sequence[Outcome]) -> Outcome:
        outputs = [outcome for outcome in outcomes if isinstance(outcome, RewardOutput)]
        if len(outputs) < len(outcomes):
            return next(outcome for outcome in outcomes if isinstance(outcome, BaseException))
        values = {term.shown: _clip(term, output) for (term, _), output in zip(self._terms, outputs, strict=True)}
        parts: dict[str, float] = {}
        total = 0.0
        for (term, _), output in zip(self._terms, outputs, strict=True):
            if not term.only_if or values[term.only_if] > 0:
                total += term.weight * values[term.shown]
            parts |= {term.shown: values[term.shown]}
            parts |= {f"{term.shown}_{name}": value for name, value in output.parts.items()}
        return RewardOutput(total, parts)


class Choice:
    """The reward that each sample's metadata name."""

    def __init__(self, config: RewardConfig, otherwise: Scorer | None) -> None:
        """Load the rewards of reward.choices. Raises UnknownRewardError and BadRewardError."""
        self._key = config.choose_by
        self._scorers: dict[str, Scorer] = {value: Single(name) for value, name in config.choices.items()}
        self._otherwise = otherwise
        scorers = [*self._scorers.values(), *([otherwise] if otherwise else [])]
        self.takes_group = any(scorer.takes_group for scorer in scorers)
        self.awaits = any(scorer.awaits for scorer in scorers)

    def score(self, samples: Sequence[RewardInput], runner: asyncio.Runner) -> list[Outcome]:
        """See Scorer. Samples of a group have the same prompt, and so the same reward."""
        return self._of(samples[0]).score(samples, runner)

    def _of(self, sample: RewardInput) -> Scorer:
        chosen = sample.metadata.get(self._key)
        if chosen is None or chosen == "":
            if self._otherwise is None:
                raise ValueError(
                    f"metadata.{self._key} is missing: it names the reward; or set reward.name for such prompts"
                )
            return self._otherwise
        value = str(chosen)
        if value not in self._scorers:
            name = (reward_of_data_source(value) if self._key == "data_source" else None) or value
            # The data may not name code to run: only reward.choices does.
            if not is_bundled(name):
                known = ", ".join(self._scorers) or "none"
                raise UnknownRewardError(
                    f"metadata.{self._key} is {value!r}, neither a bundled reward nor in reward.choices ({known})"
                )
            check_name(name)
            self._scorers[value] = Single(name)
        return self._scorers[value]


def scorer_of(config: RewardConfig) -> Scorer:
    """Load the reward of a run.

    Raises UnknownRewardError and BadRewardError, whose message names what is wrong.
    """
    scorer: Scorer | None = Sum(config.terms) if config.terms else None
    if config.name:
        scorer = Single(config.name, config.settings, config.key)
    if config.choose_by:
        scorer = Choice(config, scorer)
    assert scorer is not None  # checked by the configuration
    return scorer


def check_names(config: RewardConfig) -> None:
    """Check the names of all rewards of a run, without importing anything. Raises UnknownRewardError."""
    for name in [config.name, *(term.name for term in config.terms), *config.choices.values()]:
        if name:
            check_name(name)


def _clip(term: RewardTerm, output: RewardOutput) -> float:
    value = output.reward
    if term.minimum is not None:
        value = max(value, term.minimum)
    return value if term.maximum is None else min(value, term.maximum)
