"""Loading of rewards by name, in every supported form."""

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from relaxd.importing import describe_missing, import_file
from relaxd.rewards.calling import check_settings, check_signature, describe_error
from relaxd.rewards.interface import Reward
from relaxd.rewards.other_interfaces import adapt, boxed
from relaxd.rewards.table import BOXED, PACKAGES, REWARDS, UnknownRewardError, check_name


def resolve(name: str, settings: Mapping[str, Any] | None = None) -> Reward:
    """Return a reward by its name (see `check_name`) with its settings, importing what it needs.

    A class is made with the settings; a function gets them as keyword arguments of every call. Also imports the package
    that a bundled reward needs, which may take longer than the deadline of a sample.

    Raises:
        UnknownRewardError: unknown name, or the module or package can't be imported.
        BadRewardError: it can't be called with a sample, or doesn't take these settings.
    """
    check_name(name)
    settings = dict(settings or {})
    bare = name.removeprefix(BOXED)
    if bare in REWARDS:
        _import_package(bare)
    function: Any = REWARDS[bare] if bare in REWARDS else _find(name)
    if inspect.isclass(function):
        check_settings(name, function, settings)
        try:
            function = function(**settings)
        except Exception as error:  # a user's class may raise anything
            reason = describe_error(error)
            raise UnknownRewardError(f'reward "{name}" can\'t be made with {settings}: {reason}') from error
    else:
        function = _with_settings(name, function, settings)
    if bare in REWARDS:
        return cast(Reward, function if bare == name else boxed(function))
    function = adapt(function)
    check_signature(function)
    return cast(Reward, function)


def _with_settings(name: str, function: Callable[..., Any], settings: dict[str, Any]) -> Callable[..., Any]:
    if not settings:
        return function
    check_settings(name, function, settings)
    return partial(function, **settings)


def _import_package(name: str) -> None:
    if name in PACKAGES:
        package, requirement = PACKAGES[name]
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise UnknownRewardError(f"reward \"{name}\": {error} (pip install '{requirement}')") from error


def _find(name: str) -> Any:
    """Import a user's module or file and return the named function or class."""
    module_name, _, function_name = name.rpartition(":")
    try:
        if module_name.endswith(".py"):
            module = import_file(module_name, "reward")
        else:
            module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        reason = describe_error(error) + describe_missing(module_name, error)
        raise UnknownRewardError(f'reward "{name}": module {module_name} cannot be imported: {reason}') from error
    function = getattr(module, function_name, None)
    if function is None:
        near = difflib.get_close_matches(function_name, vars(module), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UnknownRewardError(f'reward "{name}": module {module_name} has no {function_name}{hint}')
    if not callable(function):
        raise UnknownRewardError(f'reward "{name}": {function_name} is a {type(function).__name__}, not a function')
    return function
