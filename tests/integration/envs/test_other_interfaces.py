"""Environments in interfaces of other frameworks, functions and verl's tools, in their hosts."""

from typing import Any

import pytest

from relaxd.envs.client import EnvironmentClient, SessionStep, hosted
from relaxd.envs.environment import Reply, Sample, ToolCall

OWN = "tests.integration.envs.other_conversations:"


def tool(text: str, call: str, name: str) -> dict[str, str]:
    return {"role": "tool", "name": name, "tool_call_id": call, "content": text}


CASES: dict[str, tuple[dict[str, Any], list[str], list[Any], list[SessionStep]]] = {
    "build_env": (
        {"step_reward": 0.5},
        [],
        [Reply("one", [ToolCall("add", {"a": 1}, id="c")]), Reply("it is 42")],
        [
            SessionStep(
                [
                    {
                        "role": "user",
                        "content": 'heard one\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
                    }
                ],
                0.5,
                False,
                {"reward": 0.5},
            ),
            SessionStep([], 0.5, True, {"reward": 0.5}),
        ],
    ),
    "Corridor": (
        {"length": 2},
        ["a corridor, seed 7, answer 42"],
        [Reply("forward"), Reply("forward")],
        [
            SessionStep([{"role": "user", "content": "1 left"}], -0.1, False, {"left": 1.0}),
            SessionStep([{"role": "user", "content": "0 left"}], -0.1, True, {"left": 0.0}),
        ],
    ),
    "double": (
        {},
        [],
        [Reply("", [ToolCall("double", {"number": 4}, id="c"), ToolCall("triple", {}, id="d")]), Reply("8")],
        [
            SessionStep(
                [tool("8", "c", "double"), tool("Error: there is no tool 'triple'; there are double", "d", "triple")],
                0.0,
                False,
                {"calls": 2.0, "errors": 1.0},
            ),
            SessionStep([], 0.0, True, {"calls": 2.0, "errors": 1.0}),
        ],
    ),
    "TOOLS": (
        {},
        [],
        [Reply("", [ToolCall("later", {"text": "x"}, id="c")]), Reply("", problem="a tool call has no name")],
        [
            SessionStep([tool("later x", "c", "later")], 0.0, False, {"calls": 1.0, "errors": 0.0}),
            SessionStep(
                [{"role": "user", "content": "Error: a tool call has no name"}],
                0.0,
                False,
                {"calls": 1.0, "errors": 1.0},
            ),
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
async def test_environments_in_other_forms_are_played(name: str) -> None:
    settings, opening, replies, steps = CASES[name]
    async with hosted(OWN + name, settings) as channel:
        client = EnvironmentClient(channel, 30.0, 600.0)
        opened = await client.open("a", Sample([{"role": "user", "content": "begin"}], "42", seed=7))
        assert [one["content"] for one in opened.messages] == opening
        assert [await client.step("a", turn, reply) for turn, reply in enumerate(replies, 1)] == steps
        await client.close_session("a")
