"""Tools of a real MCP server, over stdio and streamable HTTP."""

import asyncio
import socket
import sys
from typing import Any

import pytest

from relaxd.envs.client import EnvironmentClient, EnvironmentFailed, hosted
from relaxd.envs.environment import BadEnvironmentError, Reply, Sample, ToolCall
from relaxd.envs.mcp_tools import McpTools
from tests.kit.ports import free_port
from tests.kit.processes import ROOT, kill, start_python
from tests.kit.waiting import eventually

MODULE = "tests.kit.mcp_server"
STDIO: dict[str, Any] = {"command": sys.executable, "args": ["-m", MODULE], "env": {"PYTHONPATH": str(ROOT)}}
SAMPLE = Sample([{"role": "user", "content": "2 + 3?"}])


def calls(*given: tuple[str, dict[str, Any]]) -> Reply:
    return Reply("", [ToolCall(name, arguments, id=f"c{number}") for number, (name, arguments) in enumerate(given)])


async def opened(**settings: Any) -> McpTools:
    environment = McpTools(**settings)
    await environment.open(SAMPLE)
    return environment


async def noted(environment: McpTools, text: str) -> str:
    """Write a note, and return all notes of the server."""
    step: Any = await environment.step(calls(("note", {"text": text})))  # type: ignore[misc]
    (message,) = step.observation
    return str(message["content"])


async def test_a_server_is_started_for_each_conversation_and_its_tools_are_called() -> None:
    async with hosted("mcp", {**STDIO, "max_chars": 100}) as channel:
        client = EnvironmentClient(channel, 60.0, 600.0)
        first, second = await asyncio.gather(client.open("a", SAMPLE), client.open("b", SAMPLE))
        assert first == second
        assert [tool["function"]["name"] for tool in first.tools] == ["add", "note", "fail", "picture"]
        function = first.tools[0]["function"]
        assert (function["description"], function["parameters"]["required"]) == ("Add two numbers.", ["a", "b"])
        step = await client.step("a", 1, calls(("add", {"a": 2, "b": 3}), ("note", {"text": "one"})))
        assert step.messages == [
            {"role": "tool", "name": "add", "tool_call_id": "c0", "content": "5"},
            {"role": "tool", "name": "note", "tool_call_id": "c1", "content": "one"},
        ]
        step = await client.step("b", 1, calls(("note", {"text": "two"})))
        assert step.messages[0]["content"] == "two"
        wrong = [
            ("fail", {"how": "raise"}),
            ("add", {"a": "x"}),
            ("sub", {}),
            ("picture", {}),
            ("fail", {"how": "long"}),
        ]
        step = await client.step("a", 2, calls(*wrong))
        raised, invalid, unknown, picture, long = [one["content"] for one in step.messages]
        assert raised.startswith("Error: ")
        assert "no luck" in raised
        assert invalid.startswith("Error: ")
        assert unknown == "Error: there is no tool 'sub'; there are add, note, fail, picture"
        assert picture == "[image, which is not shown]"
        assert long == f"{'x' * 50}\n[999900 characters left out]\n{'x' * 50}"
        last = await client.step("a", 3, Reply("It is 5."))
        assert (last.messages, last.reward, last.done, last.info) == ([], 0.0, True, {"calls": 7.0, "errors": 3.0})
        with pytest.raises(EnvironmentFailed, match="the MCP server is gone: Connection closed"):
            await client.step("b", 2, calls(("fail", {"how": "die"})))


async def test_conversations_may_share_a_server_and_connect_again_to_one_that_is_back() -> None:
    port = free_port()
    settings: dict[str, Any] = {"url": f"http://127.0.0.1:{port}/mcp", "tools": ["note", "fail"], "shared": True}
    for _ in range(2):
        server = start_python("-m", MODULE, str(port))
        try:
            await eventually(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, "the server")
            one, other = await opened(**settings), await opened(**settings)
            assert [tool["function"]["name"] for tool in one.tools] == ["note", "fail"]
            with pytest.raises(BadEnvironmentError, match="no tool 'sub'; it has add, note, fail, picture"):
                await opened(**{**settings, "tools": ["sub"]})
            assert await noted(one, "one") == "one"
            hanging = asyncio.ensure_future(one.step(calls(("fail", {"how": "hang"}))))  # type: ignore[arg-type]
            assert await noted(other, "two") == "one two"
            hanging.cancel()
            await one.close()
            assert await noted(other, "three") == "one two three"
        finally:
            kill(server)
        with pytest.raises(BadEnvironmentError, match="the MCP server is gone: "):
            await noted(other, "late")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, 'command is "" and url "": give one of them'),
        ({"url": "http://127.0.0.1:1/", "args": ["a"]}, "args and env belong to a command"),
        ({"command": "true", "headers": {"A": "b"}}, "headers belong to a url"),
        ({"command": "true", "max_chars": 0}, "max_chars is 0: it must be at least 1"),
        ({"command": "no-such-server"}, "the MCP server no-such-server: FileNotFoundError"),
        ({"command": "true"}, "the MCP server true: MCPError: Connection closed"),
        ({"url": "http://127.0.0.1:1/"}, "the MCP server http://127.0.0.1:1/: ConnectError: "),
    ],
)
async def test_a_server_that_cannot_be_used_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        await opened(**settings)
