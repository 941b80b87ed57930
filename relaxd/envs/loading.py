"""Loading of environments by name: bundled environments, users' classes and functions, and those of Relax and
gymnasium."""

import inspect
import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from relaxd.envs.environment import BadEnvironmentError, Environment, Reply, Sample, Step
from relaxd.envs.function_tools import FunctionTool, ToolsEnvironment
from relaxd.importing import ImportProblem, check_known_or_own, import_own
from relaxd.media.placeholders import KINDS

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
"""Import paths of the bundled environments, by name."""


def check_name(name: str, setting: str = "agent.environment") -> str:
    """Check an environment's name without importing it, and return the name. Raises ValueError, which names the
    setting."""
    own = "An environment of your own"
    return check_known_or_own(setting, name, sorted(BUNDLED), "bundled are", own)


def load_environment(name: str, settings: Mapping[str, Any]) -> Callable[[], Any]:
    """Import an environment, and return a function that creates an instance for each conversation.

    Args:
        name: name of a bundled environment, or "package.module:NAME" or "file.py:NAME", where NAME is a class with the
            interface of `Environment` or gymnasium's, Relax's build_env, a function, or a list of functions.
        settings: keyword arguments of the class.

    Raises BadEnvironmentError if the environment doesn't exist, has no method `step`, or rejects the settings.
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
    """Return a callable whose signature the settings must fit, and a function that creates instances of the
    environment. Raises BadEnvironmentError if `found` is no environment."""
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
    """Accept any settings, because Relax's build_env gets all of them as `args`."""


def _no_settings() -> None:
    """Reject all settings, because environments that are functions take none."""


class RelaxEnvironment(Environment):
    """Adapter for an environment of Relax: build_env(sample, args) returns an object with reset, step and close.

    `sample` has prompt (messages), label (the answer), metadata and seed; `args` has the settings as attributes. As in
    Relax, the model doesn't see the result of reset. The entry `reward` of step's info is the step's reward.
    """

    def __init__(self, build: Callable[..., Any], settings: Mapping[str, Any]) -> None:
        self._build = build
        self._args = SimpleNamespace(**settings)
        self._environment: Any = None

    def open(self, sample: Sample) -> Any:
        """Create the Relax environment for a sample, and reset it."""
        given = SimpleNamespace(
            prompt=list(sample.messages), label=sample.answer, metadata=dict(sample.metadata), seed=sample.seed
        )
        if _takes(self._build, "sample", "args"):
            self._environment = self._build(sample=given, args=self._args)
        else:
            self._environment = self._build(given, self._args)
        return _then(self._environment.reset(), lambda _: None)

    def step(self, reply: Reply) -> Any:
        """Give the model's message to the Relax environment as text, with tool calls in Hermes's and Qwen's form."""
        calls = [json.dumps({"name": call.name, "arguments": call.arguments}) for call in reply.tool_calls]
        text = "\n".join(filter(None, [reply.text, *(f"<tool_call>\n{one}\n</tool_call>" for one in calls)]))
        return _then(self._environment.step(text), self._step_of)

    def _step_of(self, returned: Any) -> Step:
        if not isinstance(returned, tuple) or len(returned) != 3:
            raise BadEnvironmentError(f"step() returned {returned!r:.80}: it must return (observation, done, info)")
        observation, done, info = returned
        info = info if isinstance(info, Mapping) else {}
        message = None if done else self._message(observation)
        return Step(message, info.get("reward", 0.0), bool(done), info)

    def close(self) -> Any:
        """Close the Relax environment, if it has a method `close`."""
        return self._environment.close() if hasattr(self._environment, "close") else None

    def _message(self, observation: Any) -> dict[str, Any]:
        format_observation = getattr(self._environment, "format_observation", None)
        if format_observation is not None:
            message = dict(format_observation(observation))
        elif isinstance(observation, Mapping):
            message = {"role": "user", "content": _content(observation)}
        else:
            raise BadEnvironmentError(f"step() returned the observation {observation!r:.80}: it must have obs_str")
        parts = message.get("content")
        if isinstance(parts, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts):
            message["content"] = "\n".join(str(part["text"]) for part in parts)
        return message


class GymEnvironment(Environment):
    """Adapter for an environment of gymnasium whose observations and actions are texts.

    The observation that reset returns follows the prompt. The text of each message of the model is an action.
    """

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    def open(self, sample: Sample) -> Any:
        """Reset the gymnasium environment with the group's seed, and with the sample as its options."""
        options = {"messages": list(sample.messages), "answer": sample.answer, "metadata": dict(sample.metadata)}
        given: dict[str, Any] = {"seed": sample.seed, "options": options}
        reset = self._environment.reset
        returned = reset(**{name: value for name, value in given.items() if _takes(reset, name)})
        return _then(returned, lambda one: _text(one[0] if isinstance(one, tuple) else one, "reset()"))

    def step(self, reply: Reply) -> Any:
        """Give the text of the model's message to the gymnasium environment as an action."""
        return _then(self._environment.step(reply.text), self._step_of)

    def _step_of(self, returned: Any) -> Step:
        if not isinstance(returned, tuple) or len(returned) != 5:
            raise BadEnvironmentError(
                f"step() returned {returned!r:.80}: it must return (observation, reward, terminated, truncated, info)"
            )
        observation, reward, terminated, truncated, info = returned
        return Step(_text(observation, "step()"), reward, bool(terminated or truncated), info)

    def close(self) -> Any:
        """Close the gymnasium environment, if it has a method `close`."""
        return self._environment.close() if hasattr(self._environment, "close") else None


def _content(observation: Mapping[str, Any]) -> str | list[Any]:
    """Convert an observation of Relax to message content, with media before the text."""
    text, media = observation.get("obs_str", ""), observation.get("multi_modal_data") or {}
    if other := [kind for kind in media if kind not in KINDS]:
        known = ", ".join(KINDS)
        raise BadEnvironmentError(f"step() returned an observation with multi_modal_data of {other[0]!r}: only {known}")
    parts = []
    for kind, given in media.items():
        items = given if isinstance(given, list | tuple) else [given] if given is not None else []
        parts += [{"type": kind, kind: item} for item in items]
    return [*parts, {"type": "text", "text": text}] if parts else text


def _text(observation: Any, what: str) -> str:
    if not isinstance(observation, str):
        raise BadEnvironmentError(f"{what} returned the observation {observation!r:.80}: it must be text")
    return observation


def _takes(function: Callable[..., Any], *names: str) -> bool:
    """Return True if a function takes arguments with these names."""
    parameters = inspect.signature(function).parameters
    return any(one.kind is one.VAR_KEYWORD for one in parameters.values()) or all(name in parameters for name in names)


def _then(result: Any, follow: Callable[[Any], Any]) -> Any:
    """Call `follow` with a result and return what it returns. If the result is awaitable, return a coroutine that
    awaits the result first."""
    if not inspect.isawaitable(result):
        return follow(result)

    async def wait() -> Any:
        return follow(await result)

    return wait()
