"""Loading of environments by name, in whatever form they are written."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from relaxd.envs.environment import BadEnvironmentError, Environment
from relaxd.importing import ImportProblem, check_known_or_own, import_own

BUNDLED: Mapping[str, str] = {
    "calculator": "relaxd.envs.calculator:Calculator",
}
"""Bundled environments by name."""


def check_name(name: str, setting: str = "agent.environment") -> str:
    """Return an environment's name without importing anything. Raises ValueError, which names the setting."""
    own = "An environment of your own"
    return check_known_or_own(setting, name, sorted(BUNDLED), "bundled are", own)


def load_environment(name: str, settings: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a function that makes an instance for each conversation, having imported the environment.

    Args:
        name: a bundled one, "package.module:Class" or "file.py:Class".
        settings: keyword arguments of the class.

    Raises BadEnvironmentError: there is none, it has no method `step`, or doesn't take these settings.
    """
    if ":" not in name and name not in BUNDLED:
        try:
            check_name(name)
        except ValueError as error:
            raise BadEnvironmentError(str(error)) from error
    try:
        found = import_own(BUNDLED.get(name, name))
    except ImportProblem as error:
        raise BadEnvironmentError(f'environment "{name}": {error}') from error
    made_of = _class_of(name, found)
    try:
        inspect.signature(made_of).bind(**settings)
    except TypeError as error:
        raise BadEnvironmentError(
            f'environment "{name}" can\'t be made with {dict(settings)}: {error}; it is {_signature(name, made_of)}'
        ) from error
    return lambda: made_of(**settings)


def _class_of(name: str, found: Any) -> Callable[..., Any]:
    if not inspect.isclass(found):
        raise BadEnvironmentError(f'environment "{name}" is a {type(found).__name__}: it must be a class')
    step = getattr(found, "step", None)
    if not callable(step) or step is Environment.step:
        raise BadEnvironmentError(
            f'environment "{name}" has no step: its class must have step(self, reply), which returns a Step'
        )
    return found


def _signature(name: str, made_of: Callable[..., Any]) -> str:
    return f"{name.rpartition(':')[2]}{inspect.signature(made_of)}"
