"""The scorer of a run: a single reward, a weighted sum, or a reward chosen for each group."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from relaxd.config import RewardConfig
from relaxd.config.reward import RewardTerm
from relaxd.rewards.calling import Outcome, awaits, call, takes_group
from relaxd.rewards.interface import RewardInput, RewardOutput
from relaxd.rewards.loading import resolve
from relaxd.rewards.logged import is_logged
from relaxd.rewards.table import UnknownRewardError, check_name, is_bundled, reward_of_data_source


class Scorer(Protocol):
    """Interface: scores the samples of a group with the run's reward or rewards."""

    takes_group: bool
    """True if the scorer must be given all samples of a group in one call."""
    awaits: bool
    """True if a reward is async, so that scoring many samples in one call is faster."""

    def score(self, samples: Sequence[RewardInput], runner: asyncio.Runner) -> list[Outcome]:
        """Score samples of a group; async rewards run in `runner`. Returns each sample's score, or the exception that
        its reward raised."""


class Single:
    """Scorer for a run with a single reward."""

    def __init__(self, name: str, settings: Mapping[str, Any] | None = None, key: str = "") -> None:
        """Load the reward `name` with its settings. Raises UnknownRewardError and BadRewardError."""
        self._reward: Callable[..., Any] = resolve(name, settings)
        self._key = key
        self.takes_group = takes_group(self._reward)
        self.awaits = awaits(self._reward)

    def score(self, samples: Sequence[RewardInput], runner: asyncio.Runner) -> list[Outcome]:
        return call(self._reward, samples, runner, self._key)


class Sum:
    """Scorer whose reward is a weighted sum of several rewards, the terms of reward.terms.

    Parts: each term's value, named by the term's label, and each term's parts, named label_part.
    """

    def __init__(self, terms: Sequence[RewardTerm]) -> None:
        """Load the reward of each term. Raises UnknownRewardError and BadRewardError."""
        self._terms = [(term, Single(term.name, term.settings, term.key)) for term in terms]
        self.takes_group = any(scorer.takes_group for _, scorer in self._terms)
        self.awaits = any(scorer.awaits for _, scorer in self._terms)

    def score(self, samples: Sequence[RewardInput], runner: asyncio.Runner) -> list[Outcome]:
        outputs = [scorer.score(samples, runner) for _, scorer in self._terms]
        return [self._sum(of_sample) for of_sample in zip(*outputs, strict=True)]

    def _sum(self, outcomes: Sequence[Outcome]) -> Outcome:
        outputs = [outcome for outcome in outcomes if isinstance(outcome, RewardOutput)]
        if len(outputs) < len(outcomes):
            return next(outcome for outcome in outcomes if isinstance(outcome, BaseException))
        terms = [term for term, _ in self._terms]
        parts: dict[str, float] = {}
        for term, output in zip(terms, outputs, strict=True):
            parts |= parts_of_term(term, output)
        return RewardOutput(total(terms, parts), parts)


def parts_of_term(term: RewardTerm, output: RewardOutput) -> dict[str, float]:
    """Return the parts that a term adds to the result of a weighted sum of rewards.

    They are the term's value, clipped to its minimum and maximum and named by its label, and the term's parts, named
    label_part. Numbers that the term logged keep their names.
    """
    value = output.reward
    if term.minimum is not None:
        value = max(value, term.minimum)
    if term.maximum is not None:
        value = min(value, term.maximum)
    named = {name if is_logged(name) else f"{term.shown}_{name}": part for name, part in output.parts.items()}
    return {term.shown: value, **named}


def total(terms: Sequence[RewardTerm], values: Mapping[str, float]) -> float:
    """Return the weighted sum of the terms' values, which `values` has by label.

    A term with `only_if` counts only if the value of that label is above 0.
    """
    return sum(term.weight * values[term.shown] for term in terms if not term.only_if or values[term.only_if] > 0)


class Choice:
    """Scorer that chooses a reward for each group, by a field of the prompt's metadata (reward.choose_by)."""

    def __init__(self, config: RewardConfig, otherwise: Scorer | None) -> None:
        """Load the rewards of reward.choices. Raises UnknownRewardError and BadRewardError."""
        self._key = config.choose_by
        self._scorers: dict[str, Scorer] = {
            value: Single(one.name, one.settings, one.key) for value, one in config.choices.items()
        }
        self._otherwise = otherwise
        scorers = [*self._scorers.values(), *([otherwise] if otherwise else [])]
        self.takes_group = any(scorer.takes_group for scorer in scorers)
        self.awaits = any(scorer.awaits for scorer in scorers)

    def score(self, samples: Sequence[RewardInput], runner: asyncio.Runner) -> list[Outcome]:
        """Score a group with the reward that its first sample names: all samples share the prompt's metadata."""
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
    """Load all rewards that a run's configuration names, and return their scorer.

    Raises UnknownRewardError and BadRewardError.
    """
    scorer: Scorer | None = Sum(config.terms) if config.terms else None
    if config.name:
        scorer = Single(config.name, config.settings, config.key)
    if config.choose_by:
        scorer = Choice(config, scorer)
    assert scorer is not None  # checked by the configuration
    return scorer


def check_names(config: RewardConfig) -> None:
    """Check the names of all rewards in a run's configuration, without importing them. Raises UnknownRewardError."""
    for name in [config.name, *(term.name for term in config.terms), *(one.name for one in config.choices.values())]:
        if name:
            check_name(name)
