"""Tools that call plain Python functions. A function's signature and docstring give the schema that checks
arguments."""

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from relaxd.envs.environment import BadEnvironmentError, Environment, Reply, Step, ToolCall, tool_message
from relaxd.envs.observation_media import content_of_result

_PARAMETER = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


class FunctionTool:
    """A Python function as a tool that the model may call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Build the tool's schema from the function. Raises BadEnvironmentError if the function has no docstring, or a
        parameter can't have a schema."""
        self.name = function.__name__
        self._function = function
        self.awaits = inspect.iscoroutinefunction(function)
        description, parameters = _documentation(function)
        self._arguments = _model_of(function, parameters)
        schema = self._arguments.model_json_schema()
        schema.pop("title", None)
        for one in schema.get("properties", {}).values():
            one.pop("title", None)
        schema.setdefault("properties", {})
        function_schema = {"name": self.name, "description": description, "parameters": schema}
        self.schema: dict[str, Any] = {"type": "function", "function": function_schema}
        """Schema of the tool in OpenAI's form."""

    async def answer(self, call: ToolCall) -> str | list[Any]:
        """Call the function with a call's arguments, and return its result as a text, or as parts if it has media.

        For bad arguments and exceptions the result is "Error: ...". Raises BadEnvironmentError if the function raises
        it.
        """
        try:
            checked = self._arguments.model_validate(call.arguments)
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            return f"Error: {self.name}: {'; '.join(problems)}"
        try:
            result = self._function(**{name: getattr(checked, name) for name in type(checked).model_fields})
            if inspect.isawaitable(result):
                result = await result
        except BadEnvironmentError:
            raise
        except Exception as error:  # a user's function may raise anything
            return f"Error: {type(error).__name__}: {error}"
        return content_of_result(result)


class Tool(Protocol):
    """Interface of a tool that the model may call."""

    name: str
    schema: dict[str, Any]
    """Schema of the tool in OpenAI's form."""
    awaits: bool
    """True if the method `answer` awaits something. If False, it may block its thread."""

    async def answer(self, call: ToolCall) -> str | list[Any]:
        """Return the answer to a tool call: a text or a list of parts. The answer to a failed call begins with "Error:
        "."""


class ToolsEnvironment(Environment):
    """Environment that answers tool calls.

    A message without a call ends the conversation; `score` returns its reward. The metrics are `calls`, and `errors`
    (the failed calls).
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._calls = self._errors = 0
        self.set_tools(tools)

    def set_tools(self, tools: Sequence[Tool]) -> None:
        """Replace the tools that the model may call."""
        self._tools = {one.name: one for one in tools}
        self.tools = [one.schema for one in tools]
        self._awaits = any(one.awaits for one in tools)

    def score(self, reply: Reply) -> float:
        """Return the reward of the final message, which has no call. By default 0: the run's reward scores the
        conversation."""
        return 0.0

    def step(self, reply: Reply) -> Step | Awaitable[Step]:
        """Answer the tool calls of a message in order. Without a call, even a broken one, end the conversation."""
        answering = self._step(reply)
        return answering if self._awaits else asyncio.run(answering)  # in a thread, where a function may block

    async def _step(self, reply: Reply) -> Step:
        if reply.problem and not reply.tool_calls:
            self._errors += 1
            return Step(f"Error: {reply.problem}", info=self._info)
        if not reply.tool_calls:
            return Step(None, self.score(reply), True, self._info)
        messages = []
        for call in reply.tool_calls:
            tool = self._tools.get(call.name)
            unknown = f"Error: there is no tool {call.name!r}; there are {', '.join(self._tools)}"
            content = unknown if tool is None else await tool.answer(call)
            self._calls += 1
            self._errors += isinstance(content, str) and content.startswith("Error: ")
            messages.append(tool_message(call, content))
        return Step(messages, info=self._info)

    @property
    def _info(self) -> dict[str, float]:
        return {"calls": float(self._calls), "errors": float(self._errors)}


def _model_of(function: Callable[..., Any], descriptions: dict[str, str]) -> type[BaseModel]:
    name = function.__name__
    fields: dict[str, Any] = {}
    try:
        hints = get_type_hints(function)
        for one in inspect.signature(function).parameters.values():
            if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY):
                raise BadEnvironmentError(f"the tool {name} has the parameter {one}: models give arguments by name")
            default = ... if one.default is one.empty else one.default
            fields[one.name] = (hints.get(one.name, Any), default)
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        for parameter, description in descriptions.items():
            if parameter in model.model_fields:
                model.model_fields[parameter].description = description
        model.model_rebuild(force=True)
        model.model_json_schema()
    except BadEnvironmentError:
        raise
    except Exception as error:  # pydantic raises many kinds for what no schema can have
        reason = str(error).partition("\n")[0]
        raise BadEnvironmentError(f"the tool {name} can't have a schema: {reason}") from error
    return model


def _documentation(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return the descriptions of a function and of its parameters, from its docstring and the section "Args:"."""
    text = inspect.getdoc(function) or ""
    description, _, rest = text.partition("\nArgs:")
    if not description.strip():
        raise BadEnvironmentError(f"the tool {function.__name__} has no docstring: write for the model what it does")
    parameters: dict[str, str] = {}
    for line in rest.splitlines():
        if line and not line.startswith(" "):
            break  # another section, such as "Returns:"
        if found := _PARAMETER.match(line):
            parameters[found[1]] = found[2]
    return description.strip(), parameters
