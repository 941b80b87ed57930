"""Tools in verl's format, created from a file, and the environment whose conversations use them.

Has stand-ins for the verl modules that tool files import, for use without verl."""

import asyncio
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, Field

from relaxd.data.tools_file import ToolEntry, ToolsFileError, read_tools
from relaxd.envs.environment import Environment, Reply, Sample, Step, ToolCall, tool_message
from relaxd.importing import ImportProblem, describe_error, import_own

CALL_SECONDS = 5.0


class ToolFailure(RuntimeError):
    """A tool failed to begin, score or end a conversation. The message names the tool and the place in its file."""


class BadToolResult(ValueError):
    """A tool returned a wrong type, or a reward that is no finite number. The message says what."""


class VerlTools:
    """Tools of one conversation. The given tool objects may serve many conversations at once."""

    def __init__(
        self,
        tools: Mapping[str, Any],
        tools_kwargs: Mapping[str, Any] | None = None,
        call_seconds: float = CALL_SECONDS,
        max_calls: int = 0,
    ) -> None:
        """Prepare a conversation, which `reset` begins.

        Args:
            tools: tool objects like verl's BaseTool, by name.
            tools_kwargs: create_kwargs, execute_kwargs, calc_reward_kwargs and release_kwargs, by name of the tool.
            call_seconds: time limit, in seconds, of each call of a tool's method that awaits something.
            max_calls: maximum number of a reply's calls that are executed; 0: all.

        Raises ValueError: tools_kwargs names an unknown tool, or hasn't verl's form.
        """
        self._tools = tools
        self._kwargs = {name: one for name, one in (tools_kwargs or {}).items() if one is not None}
        for name, one in self._kwargs.items():
            if name not in tools:
                raise ValueError(f"extra_info.tools_kwargs has {name!r}, but the tools are {', '.join(tools)}")
            if not isinstance(one, Mapping):
                raise ValueError(f"extra_info.tools_kwargs.{name} must be an object, such as {{create_kwargs: {{}}}}")
        self._call_seconds = call_seconds
        self._max_calls = max_calls
        self._instances: dict[str, Any] = {}

    async def reset(self) -> None:
        """Begin the conversation: create an instance of each tool. Raises ToolFailure."""
        for name in self._tools:
            given = self._given(name, "create")
            own = str(uuid4())
            created = await self._must(name, "create", own, **given, create_kwargs=given)
            instance = created[0] if isinstance(created, tuple) else created
            self._instances[name] = own if instance is None else instance

    async def execute(self, calls: Sequence[ToolCall]) -> tuple[list[str], dict[str, float]]:
        """Execute calls, one after the other. The answer to a failed call, or to a call of an unknown tool, is "Error:
        ...".

        Returns:
            The tools' answers, and an info with reward (the sum of step rewards), calls (their number) and errors (the
            number of failed calls).

        Raises BadToolResult: a tool returned an invalid result.
        """
        answers, reward, errors = [], 0.0, 0
        for call in calls[: self._max_calls or None]:
            answer, step_reward = await self._answer(call)
            if step_reward is None:
                errors += 1
            answers.append(answer)
            reward += step_reward or 0.0
        return answers, {"reward": reward, "calls": float(len(answers)), "errors": errors}

    async def final_reward(self) -> float:
        """Return the sum of the rewards that the tools give for the whole conversation. Raises ToolFailure and
        BadToolResult."""
        total = 0.0
        for name, instance in self._instances.items():
            value = await self._must(name, "calc_reward", instance, **self._given(name, "calc_reward"))
            total += _number(value, f"the reward of calc_reward of the tool {name}")
        return total

    async def close(self) -> None:
        """Release every tool's instance. Then raise the first ToolFailure, if a release failed."""
        problems = []
        while self._instances:
            name, instance = self._instances.popitem()
            try:
                await self._must(name, "release", instance, **self._given(name, "release"))
            except ToolFailure as failure:
                problems.append(failure)
        if problems:
            raise problems[0]

    async def _answer(self, call: ToolCall) -> tuple[str, float | None]:
        """Return a tool's answer to a call, and its step reward; None if the call failed."""
        if call.problem:
            return f"Error: {call.problem}", None
        if call.name not in self._tools:
            return f"Error: there is no tool {call.name!r}; there are {', '.join(self._tools)}", None
        tool, instance = self._tools[call.name], self._instances[call.name]
        try:
            result = await self._within(tool.execute, instance, call.arguments, **self._given(call.name, "execute"))
        except TimeoutError as error:
            return f"Error: {error or f'TimeoutError in {call.name}'}", None
        except Exception as error:  # a user's tool may raise anything
            return f"Error: {type(error).__name__}: {error}", None
        if not isinstance(result, tuple) or len(result) < 2:
            raise BadToolResult(
                f"execute of the tool {call.name} returned a {type(result).__name__}: it must return its answer, a "
                "step reward and metrics"
            )
        return _text(result[0]), _number(result[1], f"the step reward of the tool {call.name}")

    def _given(self, name: str, method: str) -> dict[str, Any]:
        """Return the extra arguments for a tool's method that the prompt's tools_kwargs give."""
        given = self._kwargs.get(name, {}).get(f"{method}_kwargs") or {}
        return {key: value for key, value in given.items() if value is not None and key != "instance_id"}

    async def _must(self, name: str, method: str, *args: Any, **given: Any) -> Any:
        """Call a tool's method, whose failure fails the conversation. Raises ToolFailure."""
        try:
            return await self._within(getattr(self._tools[name], method), *args, **given)
        except Exception as error:  # a user's tool may raise anything
            raise ToolFailure(f"{method} of the tool {name} failed: {describe_error(error)}") from error

    async def _within(self, method: Callable[..., Any], *args: Any, **given: Any) -> Any:
        """Call a method with the arguments that it accepts. Raises TimeoutError after the time limit of a call."""
        parameters = inspect.signature(method).parameters.values()
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            taken = {one.name for one in parameters}
            given = {key: value for key, value in given.items() if key in taken}
        limit = asyncio.timeout(self._call_seconds)
        try:
            async with limit:
                result = method(*args, **given)
                return await result if inspect.isawaitable(result) else result
        except TimeoutError as error:
            if not limit.expired():
                raise
            what = getattr(method, "__qualname__", str(method))
            raise TimeoutError(f"{what} took longer than {self._call_seconds:g} s") from error


def _text(answer: Any) -> str:
    """Return the text of a tool's answer: the answer itself, or its `text` if it is a mapping or verl's object. Images
    are left out."""
    text = answer.get("text") if isinstance(answer, Mapping) else getattr(answer, "text", answer)
    return "" if text is None else str(text)


def _number(value: Any, what: str) -> float:
    if value is None:
        return 0.0
    if not isinstance(value, Real) or not math.isfinite(value):
        raise BadToolResult(f"{what} is {value!r:.80}: it must be a finite number")
    return float(value)


class VerlToolsEnvironment(Environment):
    """A conversation with the tools of a file in verl's form.

    A message without a call ends it; then the tools score it. The reward is the sum of all step rewards and of the
    tools' calc_reward at the end. Numbers: `calls` and `errors`.
    """

    def __init__(self, config: str, call_seconds: float = CALL_SECONDS, max_calls: int = 0) -> None:
        """Create the tools, once in a process.

        Args:
            config: verl's file of tools (YAML).
            call_seconds: time limit, in seconds, of each call of a tool that awaits something.
            max_calls: maximum number of a message's calls that are executed; 0: all.

        Raises ToolsFileError.
        """
        self._tools = _loaded(config)
        self.tools = [_schema_of(tool) for tool in self._tools.values()]
        self._call_seconds, self._max_calls = call_seconds, max_calls
        self._conversation: VerlTools | None = None
        self._totals = {"calls": 0.0, "errors": 0.0}

    async def open(self, sample: Sample) -> None:
        """Create the tools' instances. Raises ToolFailure, and ValueError: wrong tools_kwargs."""
        kwargs = tools_kwargs(sample.metadata)
        self._conversation = VerlTools(self._tools, kwargs, self._call_seconds, self._max_calls)
        await self._conversation.reset()

    async def step(self, reply: Reply) -> Step:
        """Execute the tool calls in a message of the model. Raises BadToolResult, ToolFailure."""
        assert self._conversation is not None
        if reply.problem and not reply.tool_calls:
            self._totals["errors"] += 1
            return Step(f"Error: {reply.problem}", info=self._totals)
        if not reply.tool_calls:
            return Step(None, await self._conversation.final_reward(), True, self._totals)
        answers, info = await self._conversation.execute(reply.tool_calls)
        self._totals = {name: total + info[name] for name, total in self._totals.items()}
        messages = [tool_message(*one) for one in zip(reply.tool_calls, answers, strict=False)]
        return Step(messages, info["reward"], info=self._totals)

    async def close(self) -> None:
        """Release the tools' instances. Raises ToolFailure."""
        if self._conversation is not None:
            await self._conversation.close()


def tools_kwargs(metadata: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a data row's extra_info.tools_kwargs, else the row's tools_kwargs. Raises ValueError if this is no
    object."""
    extra = metadata.get("extra_info")
    found = extra.get("tools_kwargs") if isinstance(extra, Mapping) else None
    found = metadata.get("tools_kwargs") if found is None else found
    if found is not None and not isinstance(found, Mapping):
        raise ValueError(f"extra_info.tools_kwargs is a {type(found).__name__}: it must be an object by a tool's name")
    return found


def _schema_of(tool: Any) -> dict[str, Any]:
    schema: Any = getattr(tool, "tool_schema", None)
    return schema.model_dump(exclude_none=True) if hasattr(schema, "model_dump") else schema


@lru_cache
def _loaded(config: str) -> dict[str, Any]:
    return load_tools(Path(config).expanduser())


METHODS = ("create", "execute", "calc_reward", "release")


def load_tools(path: Path) -> dict[str, Any]:
    """Create the tools of a file, and return them by name. Raises ToolsFileError."""
    entries = read_tools(path)
    try:
        provide_verl()
    except ImportError as error:
        raise ToolsFileError(str(error)) from error
    tools: dict[str, Any] = {}
    for entry in entries:
        tool = _made(entry, path)
        name = entry.name or str(getattr(tool, "name", ""))
        if not name or name in tools:
            raise ToolsFileError(f"{path}: {entry.class_name} is named {name!r}: a tool needs a name of its own")
        tools[name] = tool
    return tools


def _made(entry: ToolEntry, path: Path) -> Any:
    module, _, name = entry.class_name.rpartition(".")
    try:
        made_of = import_own(f"{module}:{name}")
        tool = made_of(config=entry.config, tool_schema=tool_schema(entry.schema) if entry.schema else None)
    except ImportProblem as problem:
        raise ToolsFileError(f"{path}: {problem}") from problem
    except Exception as error:  # a user's class may raise anything
        raise ToolsFileError(f"{path}: {entry.class_name} can't be made: {describe_error(error)}") from error
    if missing := [method for method in METHODS if not callable(getattr(tool, method, None))]:
        raise ToolsFileError(f"{path}: {entry.class_name} has no {', '.join(missing)}: it must be like verl's BaseTool")
    return tool


class OpenAIFunctionPropertySchema(BaseModel):
    """Stand-in for verl's class: schema of one parameter of a tool."""

    type: str | list[str]
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """Stand-in for verl's class: schema of all parameters of a tool."""

    type: str
    properties: dict[str, OpenAIFunctionPropertySchema]
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(BaseModel):
    """Stand-in for verl's class: schema of a tool's function."""

    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema = Field(
        default_factory=lambda: OpenAIFunctionParametersSchema(type="object", properties={})
    )
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """Stand-in for verl's class: schema of a tool."""

    type: str
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """Stand-in for verl's class: a tool's answer to a call."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        """Return True if the tool's answer has neither text nor media."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """Return True if the tool's answer has text and no media."""
        return bool(self.text) and not self.image and not self.video


class BaseTool:
    """Stand-in for verl's base class of tools."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        self.config = config
        self.tool_schema: Any = tool_schema or self.get_openai_tool_schema()
        assert self.tool_schema is not None, "Tool schema is not set!"
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        """Return the tool's schema, in OpenAI's form."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Create the tool's instance for a conversation. Returns the instance's id and the tool's first answer."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Execute a tool call. Returns the tool's answer, the step reward and metrics."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the tool's reward for the whole conversation."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Release the tool's instance at the end of a conversation."""


def rollout_trace_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function unchanged. Stand-in for verl's decorator, which traces calls."""
    return function


_SCHEMAS = (
    OpenAIFunctionPropertySchema, OpenAIFunctionParametersSchema, OpenAIFunctionSchema, OpenAIFunctionToolSchema,
    ToolResponse,
)  # fmt: skip
_MODULES: dict[str, tuple[Any, ...]] = {
    "verl": (),
    "verl.tools": (),
    "verl.tools.schemas": _SCHEMAS,
    "verl.tools.base_tool": (BaseTool, OpenAIFunctionToolSchema, ToolResponse),
    "verl.utils": (),
    "verl.utils.rollout_trace": (rollout_trace_op,),
}


def tool_schema(schema: dict[str, Any]) -> Any:
    """Convert a tool's schema to verl's class, or to its stand-in.

    Raises pydantic.ValidationError, and ImportError if verl is installed but can't be imported.
    """
    provide_verl()
    from verl.tools.schemas import OpenAIFunctionToolSchema as Schema

    return Schema.model_validate(schema)


def provide_verl() -> None:
    """Install the stand-ins for verl's modules unless verl is installed.

    Raises ImportError if verl is installed but can't be imported.
    """
    try:
        import verl.tools.base_tool  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "verl":
            raise ImportError(f"verl is installed, but verl.tools.base_tool can't be imported: {error}") from error
        for name, contents in _MODULES.items():
            module = ModuleType(name, "A stand-in of relaxd: verl isn't installed.")
            module.__path__ = []  # a package
            for one in contents:
                setattr(module, one.__name__, one)
            sys.modules[name] = module
