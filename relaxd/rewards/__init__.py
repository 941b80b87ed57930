"""Rewards, one file each: pure functions over a sample, listed in `REWARDS`."""

import difflib
import importlib
from typing import cast

from relaxd.rewards.addition import addition
from relaxd.rewards.base import BadRewardError, Reward, RewardInput, RewardOutput, check_output
from relaxd.rewards.calling import check_signature, describe_error
from relaxd.rewards.exact_match import exact_match
from relaxd.rewards.f1 import f1
from relaxd.rewards.multiple_choice import multiple_choice
from relaxd.rewards.reasoning_gym import reasoning_gym

__all__ = [
    "REWARDS",
    "BadRewardError",
    "Reward",
    "RewardInput",
    "RewardOutput",
    "UnknownRewardError",
    "check_name",
    "check_output",
    "describe",
    "resolve",
]

REWARDS: dict[str, Reward] = {
    "addition": addition,
    "exact_match": exact_match,
    "f1": f1,
    "multiple_choice": multiple_choice,
    "reasoning_gym": reasoning_gym,
}
"""The bundled rewards by name."""
PACKAGES = {"reasoning_gym": ("reasoning_gym", "relaxd[reasoning]")}
"""Packages that bundled rewards import on first use, and their requirements."""


class UnknownRewardError(ValueError):
    """There is no reward of that name."""


def check_name(name: str) -> None:
    """Check a reward's name, bundled or "package.module:function", without importing anything.

    Raises:
        UnknownRewardError: the message has the nearest names.
    """
    if name in REWARDS:
        return
    module, colon, function = name.partition(":")
    if colon and function.isidentifier() and all(part.isidentifier() for part in module.split(".")):
        return
    near = difflib.get_close_matches(name, REWARDS, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"bundled are {', '.join(sorted(REWARDS))}."
    raise UnknownRewardError(f'unknown reward "{name}": {hint} Your own is named as "package.module:function"')


def resolve(name: str) -> Reward:
    """Return a reward by its bundled name or "package.module:function", importing the module.

    Also imports the package that a bundled reward needs, which may take longer than the deadline of a sample.

    Raises:
        UnknownRewardError: unknown name, or the module or package can't be imported.
        BadRewardError: the function can't be called with a sample.
    """
    check_name(name)
    if name in REWARDS:
        if name in PACKAGES:
            package, requirement = PACKAGES[name]
            try:
                importlib.import_module(package)
            except ImportError as error:
                raise UnknownRewardError(f"reward \"{name}\": {error} (pip install '{requirement}')") from error
        return REWARDS[name]
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        reason = describe_error(error)
        raise UnknownRewardError(f'reward "{name}": module {module_name} cannot be imported: {reason}') from error
    function = getattr(module, function_name, None)
    if function is None:
        near = difflib.get_close_matches(function_name, vars(module), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UnknownRewardError(f'reward "{name}": module {module_name} has no {function_name}{hint}')
    if not callable(function):
        raise UnknownRewardError(f'reward "{name}": {function_name} is a {type(function).__name__}, not a function')
    check_signature(function)
    return cast(Reward, function)


def describe(name: str) -> str:
    """Return the first line of a bundled reward's docstring."""
    return (REWARDS[name].__doc__ or "").strip().partition("\n")[0]
