"""Tools made from functions."""

from typing import Any, Literal

import pytest

from relaxd.envs.environment import BadEnvironmentError, ToolCall
from relaxd.envs.function_tools import FunctionTool
from tests.kit.vision import picture


def search(query: str, limit: int = 5, kind: Literal["exact", "near"] = "near") -> str:
    """Search the corpus.

    Args:
        query: words to look for.
        limit (int): most results.

    Returns:
        The results.
    """
    if query == "raise":
        raise LookupError("nothing found")
    return f"{limit} {kind} results for {query}"


async def wait(seconds: float) -> float:
    """Wait."""
    return seconds


def undocumented(a: int) -> int:
    return a


def variable(*args: int) -> None:
    """Take numbers."""


def unknown(a: object, b: "Missing") -> None:  # type: ignore[name-defined]  # noqa: F821
    """Take something."""


def test_a_schema_has_types_defaults_and_descriptions() -> None:
    assert FunctionTool(search).schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the corpus.",
            "parameters": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "query": {"type": "string", "description": "words to look for."},
                    "limit": {"type": "integer", "default": 5, "description": "most results."},
                    "kind": {"type": "string", "enum": ["exact", "near"], "default": "near"},
                },
                "required": ["query"],
            },
        },
    }


@pytest.mark.parametrize(
    ("function", "arguments", "answer"),
    [
        (search, {"query": "cats", "limit": "3"}, "3 near results for cats"),
        (search, {"limit": 3}, "Error: search: query: Field required"),
        (search, {"query": "cats", "size": 3}, "Error: search: size: Extra inputs are not permitted"),
        (search, {"query": "raise"}, "Error: LookupError: nothing found"),
        (wait, {"seconds": 1}, "1.0"),
    ],
)
async def test_calls_are_checked_and_answered(function: Any, arguments: dict[str, Any], answer: str) -> None:
    assert await FunctionTool(function).answer(ToolCall("x", arguments)) == answer


SEEN = picture(16, 16)


def look(several: bool) -> Any:
    """Look around.

    Args:
        several: whether to say something, too.
    """
    return ["here: ", SEEN, 5] if several else SEEN


async def test_images_are_parts_of_the_answer() -> None:
    part = {"type": "image", "image": SEEN}
    tool = FunctionTool(look)
    assert await tool.answer(ToolCall("look", {"several": False})) == [part]
    assert await tool.answer(ToolCall("look", {"several": True})) == ["here: ", part, "5"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (undocumented, "the tool undocumented has no docstring"),
        (variable, "the tool variable has the parameter *args: int: models give arguments by name"),
        (unknown, "the tool unknown can't have a schema: name 'Missing' is not defined"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused(function: Any, message: str) -> None:
    with pytest.raises(BadEnvironmentError) as refused:
        FunctionTool(function)
    assert message in str(refused.value)
