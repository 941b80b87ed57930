"""The tool calls of a reply, as Hermes and Qwen write them: <tool_call>{"name": ..., "arguments": ...}</tool_call>."""

import json
from dataclasses import dataclass, field
from typing import Any

from relaxd.rewards.tags import tagged


@dataclass(frozen=True)
class Call:
    """A call, or what is written as one."""

    name: str = ""
    """The tool's name."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Its arguments."""
    problem: str = ""
    """Why it is none; "" if it is."""


def calls_in(text: str) -> list[Call]:
    """Return the calls of a reply in their order. Takes time linear in the text."""
    return [_call(block.strip()) for block in tagged(text, "tool_call")]


def _call(block: str) -> Call:
    value = _json(block)
    inner = value.get("function", value) if isinstance(value, dict) else value
    if not isinstance(inner, dict):
        return Call(problem='a tool call is {"name": ..., "arguments": {...}} in JSON')
    name, arguments = inner.get("name"), inner.get("arguments", {})
    if not isinstance(name, str) or not name:
        return Call(problem="a tool call has no name")
    if isinstance(arguments, str):
        arguments = _json(arguments)
    if not isinstance(arguments, dict):
        return Call(name, problem=f"the arguments of {name} are no object in JSON")
    return Call(name, arguments)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
