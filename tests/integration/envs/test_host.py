"""Environments in the processes that host them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from relaxd.envs.client import EnvironmentClient, EnvironmentFailed, hosted
from relaxd.envs.environment import BadEnvironmentError, Reply, Sample, ToolCall
from tests.kit.waiting import eventually

SAMPLE = Sample([{"role": "user", "content": "hello"}], "42", {"level": 1}, seed=7)
OWN = "tests.integration.envs.conversations:"


@asynccontextmanager
async def client_of(
    name: str, settings: dict[str, object] | None = None, call_seconds: float = 30.0, lease_seconds: float = 600.0
) -> AsyncIterator[EnvironmentClient]:
    async with hosted(OWN + name, settings or {}) as channel:
        yield EnvironmentClient(channel, call_seconds, lease_seconds)


async def test_sessions_are_apart_and_each_turn_is_answered_once(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    async with client_of("Echo", {"notes": str(notes)}) as client:
        opened = await client.open("a", SAMPLE)
        assert opened.messages == [{"role": "user", "content": "hello 42 {'level': 1} 7"}]
        assert opened.tools == []
        await client.open("b", SAMPLE)
        assert await client.open("a", SAMPLE) == opened
        answers = await asyncio.gather(*(client.step("a", 1, Reply("one")) for _ in range(3)))
        assert answers[0].messages == [{"role": "user", "content": "you said one"}]
        assert (answers[0].reward, answers[0].done, answers[0].info) == (0.5, False, {"length": 3.0})
        assert answers[1:] == answers[:1] * 2
        with pytest.raises(EnvironmentFailed, match="turn is 3, but the session's last turn is 1"):
            await client.step("a", 3, Reply("three"))
        assert (await client.step("a", 2, Reply("end"))).done
        calls = [ToolCall("add", {"a": 1}, id="c1"), ToolCall("add", {"a": 2}, id="c2")]
        answer = await client.step("b", 1, Reply("two", calls))
        assert [(one["role"], one["tool_call_id"]) for one in answer.messages] == [("tool", "c1"), ("tool", "c2")]
        await client.close_session("a")
        await client.close_session("a")
        with pytest.raises(EnvironmentFailed, match='session_id is "a": there is no such session'):
            await client.step("a", 3, Reply("three"))
        assert notes.read_text().split() == ["open", "open", "one", "end", "two", "close"]


async def test_what_an_environment_tells_people_comes_with_its_answers() -> None:
    told: list[str] = []
    async with hosted(f"{OWN}Telling", {}) as channel:
        client = EnvironmentClient(channel, 30.0, 600.0, told.extend)
        await client.open("a", SAMPLE)
        assert told == ["opened"]
        with pytest.raises(EnvironmentFailed, match="no luck"):
            await client.step("a", 1, Reply("raise"))
        await client.open("b", SAMPLE)
    assert sorted(told) == ["heard raise", "opened", "opened"]


async def test_a_session_is_closed_when_its_lease_ends(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    async with client_of("Echo", {"notes": str(notes)}, lease_seconds=0.05) as client:
        await client.open("a", SAMPLE)
        await eventually(lambda: notes.read_text().split() == ["open", "close"], "the end of the lease")
        with pytest.raises(EnvironmentFailed, match="its lease has ended"):
            await client.step("a", 1, Reply("one"))


BAD = {
    "raise": r"^RuntimeError: no luck \(conversations.py:\d+, in step\)$",
    "leave": r"^SystemExit: 3 \(conversations.py:\d+, in step\)$",
    "hang": r"^step\(\) took longer than 0.5 s \(at conversations.py:\d+, in step\)$",
    "none": r"step\(\) returned None \(NoneType\): return Step\(observation, reward, done, info\), or a tuple",
    "text reward": r"step\(\) returned the reward 'good' \(str\): it must be a finite number",
    "nan": r"step\(\) returned the reward nan: it must be a finite number",
    "huge": r"step\(\) returned a message of 100000000 bytes, which is more than 1048576",
    "invalid": r"step\(\) returned messages with text that isn't valid UTF-8: it has the character '\\udcff'",
    "number": r"step\(\) returned the observation 3 \(int\): it must be a text, a message, a list of messages or None",
    "picture": r"step\(\) returned messages of which messages\[0\].content\[0\] has no item",
    "done": r"step\(\) returned done = 'yes' \(str\): it must be True or False",
}


async def test_what_an_environment_does_wrong_ends_its_session_alone_and_says_where() -> None:
    async with client_of("Bad") as client, client_of("Bad", call_seconds=0.5) as hurried:
        await client.open("good", SAMPLE)
        for text, message in BAD.items():
            asked = hurried if text == "hang" else client  # 100 MB take longer on a busy machine
            await asked.open(text, SAMPLE)
            with pytest.raises(EnvironmentFailed, match=message):
                await asked.step(text, 1, Reply(text))
            with pytest.raises(EnvironmentFailed, match="turn is 2, but the session has failed: "):
                await asked.step(text, 2, Reply("again"))
            assert (await client.step("good", 1, Reply("well"))).reward == 1.0
        await client.open("die", SAMPLE)
        with pytest.raises(EnvironmentFailed, match="exited with code 7"):
            await client.step("die", 1, Reply("die"))


async def test_a_session_that_cannot_be_opened_says_why_and_is_gone() -> None:
    async with client_of("Bad", {"opening": "make"}) as client:
        with pytest.raises(EnvironmentFailed, match=r"^KeyError: 'no such key' \(conversations.py:\d+, in __init__\)$"):
            await client.open("a", SAMPLE)
        with pytest.raises(EnvironmentFailed, match="there is no such session"):
            await client.step("a", 1, Reply("well"))


async def test_async_methods_that_take_too_long_end_their_session() -> None:
    async with client_of("BadAsync", call_seconds=2) as client:
        for text in ("fast", "await", "block"):
            await client.open(text, SAMPLE)
        assert (await client.step("fast", 1, Reply("fast"))).messages[0]["content"] == "fast"
        with pytest.raises(EnvironmentFailed, match=r"^step\(\) took longer than 2 s$"):
            await client.step("await", 1, Reply("await"))
        with pytest.raises(EnvironmentFailed, match=r"took longer than 2 s \(at conversations.py:\d+, in step\)$"):
            await client.step("block", 1, Reply("block"))


async def test_an_environment_that_cannot_be_used_is_refused_at_the_start() -> None:
    with pytest.raises(BadEnvironmentError, match="has no step: its class must have step"):
        async with hosted(OWN + "WithoutStep", {}):
            pass


async def test_the_calculator_is_played() -> None:
    async with hosted("calculator", {}) as channel:
        client = EnvironmentClient(channel, 30.0, 600.0)
        opened = await client.open("a", SAMPLE)
        assert opened.tools[0]["function"]["name"] == "calculator"
        called = await client.step("a", 1, Reply("", [ToolCall("calculator", {"expression": "6 * 7"}, id="c")]))
        assert called.messages == [{"role": "tool", "name": "calculator", "tool_call_id": "c", "content": "42"}]
        last = await client.step("a", 2, Reply("It is 42."))
        assert (last.messages, last.reward, last.done, last.info) == ([], 1.0, True, {"calls": 1.0, "bad_calls": 0.0})
