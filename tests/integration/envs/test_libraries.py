"""Unmodified environments of other libraries. Each has an interpreter of its own, as their packages conflict.

RELAXD_TEST_GEM_PYTHON and so on name interpreters that have a library and relaxd's own requirements; without one, its
tests are skipped. That of RELAXD_TEST_NEMO_GYM_PYTHON runs NeMo Gym's server alone, and needs none of relaxd's.
"""

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from relaxd.envs.client import EnvironmentClient, EnvironmentFailed, SessionStep, hosted
from relaxd.envs.environment import Reply, Sample, ToolCall
from tests.kit.ports import free_port
from tests.kit.processes import kill, start_python
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.night, pytest.mark.timeout(300)]

PACKAGES = {"gem": "gem-llm", "openenv": "openenv", "textarena": "textarena", "verifiers": "verifiers 0.4"}
COUNTER_TOOLS = [
    {"type": "function", "name": "increment_counter", "parameters": {"type": "object"}, "strict": True},
    {"type": "function", "name": "get_counter_value", "parameters": None, "strict": True},
]
COUNTER_ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "Add 1 and 2."}], "tools": COUNTER_TOOLS},
    "initial_count": 3,
    "expected_count": 6,
}
SAMPLE = Sample([{"role": "user", "content": "Play."}], seed=3)
TASKSET = "tests.integration.envs.verifiers_tasks:Sums"
MOVER = "tests.integration.envs.library_conversations:first_move"


def interpreter(name: str) -> str:
    """The interpreter that has a library; skips the test without one."""
    variable = f"RELAXD_TEST_{name.upper()}_PYTHON"
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no interpreter with {PACKAGES[name]} and relaxd's requirements")
    return os.environ[variable]


@asynccontextmanager
async def client_of(name: str, settings: dict[str, Any]) -> AsyncIterator[EnvironmentClient]:
    async with hosted(name, settings, interpreter(name)) as channel:
        yield EnvironmentClient(channel, 60.0, 600.0)


async def played(client: EnvironmentClient, session: str, replies: list[str]) -> tuple[str, list[SessionStep]]:
    """What the environment says first, and its answers to replies until it ends."""
    opened = await client.open(session, SAMPLE)
    steps: list[SessionStep] = []
    for turn, reply in enumerate(replies, 1):
        steps.append(await client.step(session, turn, Reply(reply)))
        if steps[-1].done:
            break
    return opened.messages[0]["content"], steps


GUESSES = {
    "gem": ({"env_id": "game:GuessTheNumber-v0-easy"}, r"\boxed{%d}", range(1, 11)),
    "textarena": ({"env_id": "GuessTheNumber-v0", "min_number": 1, "max_number": 9}, "[%d]", range(1, 10)),
}


@pytest.mark.parametrize("name", GUESSES)
async def test_a_number_is_guessed_and_is_the_same_for_one_seed(name: str) -> None:
    settings, form, numbers = GUESSES[name]
    async with client_of(name, settings) as client:
        for session in ("a", "b"):
            low, high = min(numbers), max(numbers)
            first = (await client.open(session, SAMPLE)).messages[0]["content"]
            assert "Guess The Number" in first
            for turn in range(1, 9):
                guess = (low + high) // 2
                step = await client.step(session, turn, Reply(form % guess))
                if step.done:
                    break
                assert first not in step.messages[0]["content"]
                low, high = (guess + 1, high) if "higher" in step.messages[0]["content"] else (low, guess - 1)
            assert step.reward == 1.0
            if session == "a":
                number = guess
        assert guess == number


async def test_a_game_of_textarena_is_played_against_a_function() -> None:
    settings = {"env_id": "TicTacToe-v0", "players": 2, "opponent": MOVER}
    async with client_of("textarena", settings) as client:
        first, steps = await played(client, "won", ["[4]", "[8]", "[2]", "[6]", "[5]", "[3]"])
        assert "You are Player 0 in Tic Tac Toe" in first
        assert "Player 1 placed their symbol (X) in cell 0." in steps[0].messages[0]["content"]
        assert steps[-1] == SessionStep([], 1.0, True, {"moves": 4.0, "invalid_move": 0.0})
        _, steps = await played(client, "wrong", ["anywhere"] * 3)
        assert steps[-1] == SessionStep([], -1.0, True, {"moves": 2.0, "invalid_move": 1.0})
        _, steps = await played(client, "lost", ["[8]", "[5]", "[7]", "[6]"])
        assert (steps[-1].reward, steps[-1].done) == (-1.0, True)


async def test_tasks_of_verifiers_are_asked_and_scored() -> None:
    settings = {"taskset": TASKSET, "config": {"first": 5}, "max_tasks": 2}
    async with client_of("verifiers", settings) as client:
        opened = await client.open("a", SAMPLE)  # the seed 3 is task 1
        assert opened.messages == [{"role": "user", "content": "Be short.\n\nWhat is 5 + 1?"}]
        step = await client.step("a", 1, Reply("It is 6."))
        assert step == SessionStep([], 2.0, True, {"right": 1.0, "length": 8.0})
        opened = await client.open("b", Sample([], metadata={"idx": 0}))
        assert opened.messages[0]["content"].endswith("What is 5 + 0?")
        assert (await client.step("b", 1, Reply("It is 6."))).reward == 0.0
        with pytest.raises(EnvironmentFailed, match="idx is 2: the taskset has the tasks 0 to 1"):
            await client.open("c", Sample([], metadata={"idx": 2}))


async def test_a_server_of_openenv_has_a_session_for_each_conversation() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with client_of("openenv", {"url": url, "observation_key": "prompt"}) as client:
        with pytest.raises(EnvironmentFailed, match=f"the OpenEnv server {url} can't be reached"):
            await client.open("early", SAMPLE)
        server = start_python("-m", "tests.integration.envs.openenv_server", str(port), python=interpreter("openenv"))
        try:
            await eventually(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, "the server", 180)
            first = await client.open("a", SAMPLE)
            assert first.messages == [{"role": "user", "content": "What is 2 + 3?"}]
            other = await client.open("b", Sample([], seed=5))
            assert other.messages[0]["content"] == "What is 2 + 5?"
            wrong = await client.step("a", 1, Reply("It is 7."))
            assert wrong == SessionStep([{"role": "user", "content": "No, again."}], -0.1, False, {})
            assert await client.step("a", 2, Reply("It is 5.")) == SessionStep(
                [{"role": "user", "content": "Yes."}], 1.0, True, {}
            )
            assert (await client.step("b", 1, Reply("It is 7."))).done
        finally:
            kill(server)


async def test_a_resources_server_of_nemo_gym_answers_calls_and_verifies() -> None:
    variable = "RELAXD_TEST_NEMO_GYM_PYTHON"
    if not (python := os.environ.get(variable)):
        pytest.skip(f"{variable} names no interpreter with nemo-gym, which needs Python 3.13")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    add = [ToolCall("increment_counter", {"count": count}, id=f"call_{count}") for count in (1, 2)]
    sample = Sample(COUNTER_ROW["responses_create_params"]["input"], metadata=COUNTER_ROW)
    async with hosted("nemo_gym", {"url": url, "max_steps": 3}) as channel:
        client = EnvironmentClient(channel, 60.0, 600.0)
        with pytest.raises(EnvironmentFailed, match=f"the NeMo Gym server {url} can't be reached"):
            await client.open("early", sample)
        server = start_python("-m", "tests.integration.envs.nemo_gym_server", str(port), python=python)
        try:
            await eventually(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, "the server", 180)
            opened = await client.open("a", sample)
            await client.open("b", sample)  # which has a counter of its own
            assert [tool["function"]["name"] for tool in opened.tools] == ["increment_counter", "get_counter_value"]
            step = await client.step("a", 1, Reply("", add))
            assert [message["content"] for message in step.messages] == ['{"success":true}'] * 2
            step = await client.step(
                "a", 2, Reply("", [ToolCall("get_counter_value", id="c"), ToolCall("verify", id="d")])
            )
            assert [message["content"] for message in step.messages] == [
                '{"count":6}',
                "Error: there is no tool 'verify'; there are increment_counter, get_counter_value",
            ]
            assert not step.done
            assert await client.step("a", 3, Reply("It is 6.")) == SessionStep([], 1.0, True, {})
            assert (await client.step("b", 1, Reply("", add[:1]))).reward == 0.0
            assert not (await client.step("b", 2, Reply("", add[:1]))).done
            last = await client.step("b", 3, Reply("", add[:1]))
            assert (last.reward, last.done) == (1.0, True)  # 3 + 1 + 1 + 1, verified at max_steps
            with pytest.raises(EnvironmentFailed, match=r"seed_session answered 422: .*initial_count"):
                await client.open("c", Sample([], metadata=COUNTER_ROW | {"initial_count": "many"}))
            with pytest.raises(EnvironmentFailed, match=r'set data.prompt_key = "responses_create_params.input"'):
                await client.open("d", Sample([]))
        finally:
            kill(server)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("gem", {"env_id": "game:Nothing"}, "ValueError: Environment game:Nothing not found in registry"),
        ("verifiers", {"taskset": TASKSET.replace("Sums", "WithTools")}, "WithTools has tools or needs a container"),
        ("textarena", {"env_id": "Nothing"}, "ValueError: Environment Nothing not found in registry"),
        ("textarena", {"env_id": "TicTacToe-v0", "players": 2}, 'players is 2 and opponent "": name a function'),
        ("textarena", {"env_id": "TicTacToe-v0", "player": 1}, "player is 1: it must be 0 to 0, as players is 1"),
    ],
)
async def test_what_is_wrong_is_said_by_name(name: str, settings: dict[str, Any], message: str) -> None:
    async with client_of(name, settings) as client:
        with pytest.raises(EnvironmentFailed, match=message):
            await client.open("a", SAMPLE)
