"""The example of an environment in TypeScript, built and played as a run would play it."""

import subprocess
from pathlib import Path

import grpc
import pytest

from relaxd.envs.client import EnvironmentClient, EnvironmentFailed, SessionStep
from relaxd.envs.environment import Reply, Sample, ToolCall
from tests.kit.ports import free_port
from tests.kit.processes import kill
from tests.kit.typescript import build_example


def buys(*items: object) -> Reply:
    return Reply("", [ToolCall("buy", {"item": item}, id=f"c{number}") for number, item in enumerate(items)])


@pytest.mark.slow
async def test_an_environment_in_typescript(tmp_path: Path) -> None:
    folder = build_example("environment-typescript", "environment.proto", tmp_path)
    assert len((folder / "server.ts").read_text().splitlines()) < 80
    address = f"127.0.0.1:{free_port()}"
    server = subprocess.Popen(["node", "build/server.js", address], cwd=folder)
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            await channel.channel_ready()
            client = EnvironmentClient(channel, 30.0, 600.0)
            opened = await client.open("a", Sample([{"role": "user", "content": "Buy 2 pears."}], "pear,pear"))
            assert [tool["function"]["name"] for tool in opened.tools] == ["buy"]
            assert await client.open("a", Sample([], "pear,pear")) == opened
            first = await client.step("a", 1, buys("pear", 3))
            assert first.messages == [
                {"role": "tool", "name": "buy", "tool_call_id": "c0", "content": "You have pear."},
                {"role": "tool", "name": "buy", "tool_call_id": "c1", "content": "error: call buy with an item"},
            ]
            assert await client.step("a", 1, buys("pear", 3)) == first
            second = await client.step("a", 2, buys("pear"))
            assert second.messages[0]["content"] == "You have pear, pear."
            assert await client.step("a", 3, Reply("Done.")) == SessionStep([], 1.0, True, {"bought": 2.0})
            await client.open("short", Sample([], "pear"))
            assert (await client.step("short", 1, Reply("Done."))).reward == 0.0
            await client.close_session("a")
            await client.close_session("a")
            with pytest.raises(EnvironmentFailed, match="there is no session a"):
                await client.step("a", 4, Reply("Again."))
    finally:
        kill(server)
