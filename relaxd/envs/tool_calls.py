"""Tool calls in Hermes's and Qwen's form: <tool_call>{"name": ..., "arguments": ...}</tool_call>."""

import json
from dataclasses import dataclass, field
from typing import Any

from relaxd.media.messages import tagged


@dataclass(frozen=True)
class ToolCall:
    """A tool call, or text in its place that isn't one."""

    name: str = ""
    """The tool's name."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of the call."""
    problem: str = ""
    """Reason why it isn't a valid call; "" if it is."""
    id: str = ""
    """Id of the call in the conversation, by which a tool's answer refers to it; "" if none was given."""


def calls_in(text: str) -> list[ToolCall]:
    """Return the calls of a reply in their order. Takes time linear in the text."""
    return [call_of(json_of(block)) for block in tagged(text, "tool_call")]


def call_of(value: Any) -> ToolCall:
    """Return the call that a value of JSON is, such as {"name": ..., "arguments": {...}}."""
    inner = value.get("function", value) if isinstance(value, dict) else value
    if not isinstance(inner, dict):
        return ToolCall(problem='a tool call is {"name": ..., "arguments": {...}} in JSON')
    name, arguments = inner.get("name"), inner.get("arguments", inner.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return ToolCall(problem="a tool call has no name")
    if isinstance(arguments, str):
        arguments = json_of(arguments)
    if not isinstance(arguments, dict):
        return ToolCall(name, problem=f"the arguments of {name} are no object in JSON")
    return ToolCall(name, arguments)


def json_of(text: str) -> Any:
    """Return the value of a JSON text; None if it isn't JSON."""
    try:
        return json.loads(text.strip())
    except (ValueError, RecursionError):
        return None
