"""Adapters of rewards that were written for other interfaces to rewards of a sample or a group."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

from relaxd.rewards.interface import RewardInput
from relaxd.rewards.mathematics.boxed import last_boxed

VERL = frozenset({"data_source", "solution_str", "ground_truth", "extra_info"})
"""Names of the arguments that verl passes to `compute_score`."""
VERL_BATCH = frozenset(f"{name}s" for name in VERL)
"""Names of the parameters that verl passes to the batch form."""


def takes_group(reward: Callable[..., Any]) -> bool:
    """Return whether a reward scores all samples of a group at once: its first parameter is `samples`."""
    return next(iter(_parameters(reward)), "") == "samples"


def awaits(reward: Callable[..., Any]) -> bool:
    """Return whether a reward is a coroutine function, or a class with a coroutine as call."""
    function = inspect.unwrap(getattr(reward, "func", reward))
    function = getattr(function, "reward", function)  # of `adapt`
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def boxed(reward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reward of the content of the reply's last box, or of "" if there is none."""

    @wraps(reward)
    def of_box(sample: RewardInput) -> Any:
        return reward(replace(sample, response=last_boxed(sample.response) or "", response_messages=()))

    return of_box


def adapt(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return verl's `compute_score`, of one sample or of a batch, as a reward; anything else as it is.

    verl passes data_source, solution_str, ground_truth and extra_info by name, so that a function may take some of them
    and **kwargs, or **kwargs alone. Its other parameters are settings.
    """
    parameters = _parameters(function)
    only_names = bool(parameters) and all(one.kind is one.VAR_KEYWORD for one in parameters.values())
    if only_names or _is_given(parameters, VERL):

        def score(sample: RewardInput) -> Any:
            return function(**_accepted(parameters, _verl_arguments(sample)))

        return _named(score, function)
    if _is_given(parameters, VERL_BATCH):

        def scores(samples: Sequence[RewardInput]) -> Any:
            of_each = [_verl_arguments(sample) for sample in samples]
            lists = {f"{name}s": [one[name] for one in of_each] for name in of_each[0]}
            return function(**_accepted(parameters, lists))

        return _named(scores, function)
    return function


def _is_given(parameters: Mapping[str, inspect.Parameter], names: frozenset[str]) -> bool:
    """Return whether a function has parameters of these names for what it scores, and needs no others."""
    scored = scored_parameters(parameters)
    by_name = all(parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY for name in scored)
    return bool(scored) and scored <= names and by_name


def scored_parameters(parameters: Mapping[str, inspect.Parameter]) -> set[str]:
    """Return the names of the parameters that receive what is scored: those without a default, else the first one."""
    named = [one for one in parameters.values() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    return {one.name for one in named if one.default is one.empty} or {one.name for one in named[:1]}


def _verl_arguments(sample: RewardInput) -> dict[str, Any]:
    """Return the arguments of verl's `compute_score` for a sample, by name."""
    return {
        "data_source": sample.metadata.get("data_source", ""),
        "solution_str": sample.response,
        "ground_truth": ground_truth(sample),
        "extra_info": _extra_info(sample),
    }


def ground_truth(sample: RewardInput) -> Any:
    """Return verl's ground truth: metadata.reward_model.ground_truth unchanged, or else the answer."""
    model = sample.metadata.get("reward_model")
    return model["ground_truth"] if isinstance(model, dict) and "ground_truth" in model else sample.answer


def _extra_info(sample: RewardInput) -> dict[str, Any]:
    """Return verl's extra_info: metadata.extra_info, or else all metadata."""
    extra = sample.metadata.get("extra_info")
    return dict(extra) if isinstance(extra, dict) else dict(sample.metadata)


def _accepted(parameters: dict[str, inspect.Parameter], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function accepts."""
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some builtins have none
        return {}


def _named(score: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Give an adapter the name and place of the adapted reward, but not its signature."""
    score.__name__ = getattr(function, "__name__", type(function).__name__)
    score.reward = function  # type: ignore[attr-defined]  # for `place`
    return score
