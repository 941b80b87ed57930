"""Loading of environments by name, in every supported form."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from relaxd.envs.environment import BadEnvironmentError, Environment
from relaxd.envs.function_tools import FunctionTool, ToolsEnvironment
from relaxd.envs.other_interfaces import GymEnvironment, RelaxEnvironment
from relaxd.importing import ImportProblem, check_known_or_own, import_own

BUNDLED: Mapping[str, str] = {
    "calculator": "relaxd.envs.calculator:Calculator",
    "gem": "relaxd.envs.libraries.gem_environment:GemEnvironment",
    "mcp": "relaxd.envs.mcp_tools:McpTools",
    "nemo_gym": "relaxd.envs.libraries.nemo_gym_server:NemoGymServer",
    "nim": "relaxd.envs.nim:Nim",
    "number_guessing": "relaxd.envs.number_guessing:NumberGuessing",
    "openenv": "relaxd.envs.libraries.openenv_server:OpenEnvServer",
    "python": "relaxd.envs.python_sandbox:PythonSandbox",
    "reasoning_gym": "relaxd.envs.reasoning_gym_hints:ReasoningGymHints",
    "search": "relaxd.envs.search:Search",
    "textarena": "relaxd.envs.libraries.textarena_game:TextArenaGame",
    "verifiers": "relaxd.envs.libraries.verifiers_task:VerifiersTask",
    "verl_tools": "relaxd.envs.verl_tools:VerlToolsEnvironment",
    "zoom": "relaxd.envs.zoom:Zoom",
}
"""Bundled environments by name."""


def check_name(name: str, setting: str = "agent.environment") -> str:
    """Return an environment's name without importing anything. Raises ValueError, which names the setting."""
    own = "An environment of your own"
    return check_known_or_own(setting, name, sorted(BUNDLED), "bundled are", own)


def load_environment(name: str, settings: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a function that makes an instance for each conversation, having imported the environment.

    Args:
        name: a bundled one, "package.module:Class" or "file.py:Class", whose class may also be one of gymnasium's
            interface; or, in place of the class, build_env of Relax, a function, or a list of functions.
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
    what, made_of = _maker(name, found, settings)
    try:
        inspect.signature(what).bind(**settings)
    except TypeError as error:
        raise BadEnvironmentError(
            f'environment "{name}" can\'t be made with {dict(settings)}: {error}; it is '
            f"{name.rpartition(':')[2]}{inspect.signature(what)}"
        ) from error
    return made_of


def _maker(name: str, found: Any, settings: Mapping[str, Any]) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """Return the callable that takes the settings, and a maker of instances. Raises BadEnvironmentError."""
    if inspect.isclass(found):
        step = getattr(found, "step", None)
        if not callable(step) or step is Environment.step:
            raise BadEnvironmentError(
                f'environment "{name}" has no step: its class must have step(self, reply), which returns a Step'
            )
        if hasattr(found, "reset") and not hasattr(found, "open"):
            return found, lambda: GymEnvironment(found(**settings))
        return found, lambda: found(**settings)
    if inspect.isfunction(found) and found.__name__ == "build_env":
        return _any_settings, lambda: RelaxEnvironment(found, settings)
    functions = list(found) if isinstance(found, list | tuple) else [found]
    if not functions or not all(inspect.isfunction(one) for one in functions):
        raise BadEnvironmentError(
            f'environment "{name}" is a {type(found).__name__}: it must be a class, a function or a list of functions '
            "that the model may call, or build_env of Relax"
        )
    tools = [FunctionTool(one) for one in functions]
    return _no_settings, lambda: ToolsEnvironment(tools)


def _any_settings(**settings: Any) -> None:
    """Take what build_env of Relax gets as `args`."""


def _no_settings() -> None:
    """Take the settings of functions, which have none."""
