"""Environments of other libraries, unmodified, each in an interpreter of its own: they exclude each other.

RELAXD_TEST_GEM_PYTHON and so on name interpreters that have a library and relaxd's own requirements; without one, its
tests are skipped.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from relaxd.envs.client import EnvironmentClient, EnvironmentFailed, SessionStep, hosted
from relaxd.envs.environment import Reply, Sample

pytestmark = [pytest.mark.night, pytest.mark.timeout(300)]

PACKAGES = {"gem": "gem-llm", "textarena": "textarena"}
SAMPLE = Sample([{"role": "user", "content": "Play."}], seed=3)
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


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("gem", {"env_id": "game:Nothing"}, "ValueError: Environment game:Nothing not found in registry"),
        ("textarena", {"env_id": "Nothing"}, "ValueError: Environment Nothing not found in registry"),
        ("textarena", {"env_id": "TicTacToe-v0", "players": 2}, 'players is 2 and opponent "": name a function'),
        ("textarena", {"env_id": "TicTacToe-v0", "player": 1}, "player is 1: it must be 0 to 0, as players is 1"),
    ],
)
async def test_what_is_wrong_is_said_by_name(name: str, settings: dict[str, Any], message: str) -> None:
    async with client_of(name, settings) as client:
        with pytest.raises(EnvironmentFailed, match=message):
            await client.open("a", SAMPLE)
