"""Environments of a notebook's cells, in the processes that host them."""

import linecache
from pathlib import Path
from types import MethodType
from typing import Any

import pytest

from relaxd.envs.client import EnvironmentClient, hosted
from relaxd.envs.environment import Reply, Sample, ToolCall
from relaxd.envs.loading import load_environment
from relaxd.importing import write_environment

CELL = """
from dataclasses import dataclass
from typing import Literal

from relaxd.envs.environment import Environment, Reply, Sample, Step


if True:
    @dataclass
    class Countdown(Environment):
        start: int = 3

        def open(self, sample: Sample) -> str:
            from math import floor

            return f"Say {floor(self.start + 0.5)}."

        def step(self, reply: Reply) -> Step:
            return Step(None, float(reply.text == str(self.start)), done=True)


def turn(direction: Literal["left", "right"]) -> str:
    '''Turn around.'''
    return f"turned {direction}"


async def look() -> str:
    '''Look around.'''
    return "nothing"


class Plain:
    def step(self, reply):
        return None, 0.0


class Bodiless(Environment):
    limit = 3
"""
SAMPLE = Sample([{"role": "user", "content": "go"}])


@pytest.fixture
def cell() -> dict[str, Any]:
    """The names of a cell, executed as Jupyter does: it has a source for inspect, but no module."""
    names: dict[str, Any] = {}
    linecache.cache["<cell 1>"] = (len(CELL), None, CELL.splitlines(keepends=True), "<cell 1>")
    exec(compile(CELL, "<cell 1>", "exec"), names)
    return names


async def test_a_class_is_an_environment(cell: dict[str, Any], tmp_path: Path) -> None:
    name = write_environment(cell["Countdown"], tmp_path)
    assert name == write_environment(cell["Countdown"], tmp_path)
    async with hosted(name, {"start": 4}) as channel:
        client = EnvironmentClient(channel, 30.0, 600.0)
        assert (await client.open("a", SAMPLE)).messages == [{"role": "user", "content": "Say 4."}]
        answer = await client.step("a", 1, Reply("4"))
        assert (answer.reward, answer.done) == (1.0, True)


def test_a_class_needs_no_decorator_and_no_base(cell: dict[str, Any], tmp_path: Path) -> None:
    assert isinstance(load_environment(write_environment(cell["Plain"], tmp_path), {})().step, MethodType)


async def test_functions_are_tools(cell: dict[str, Any], tmp_path: Path) -> None:
    async with hosted(write_environment([cell["turn"], cell["look"]], tmp_path), {}) as channel:
        client = EnvironmentClient(channel, 30.0, 600.0)
        opened = await client.open("a", SAMPLE)
        assert [tool["function"]["name"] for tool in opened.tools] == ["turn", "look"]
        assert opened.tools[0]["function"]["parameters"]["properties"]["direction"]["enum"] == ["left", "right"]
        calls = [ToolCall("turn", {"direction": "left"}, id="c1"), ToolCall("turn", {"direction": "up"}, id="c2")]
        answer = await client.step("a", 1, Reply("", [*calls, ToolCall("look", id="c3")]))
        said = [message["content"] for message in answer.messages]
        assert (said[0], said[1][:27], said[2]) == ("turned left", "Error: turn: direction: Inp", "nothing")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (lambda: 0, "it must be a class, or a list of functions that `def` made"),
        ([], r"environment is \[\]: it must be a class"),
        ("calculator", "environment is 'calculator': it must be a class"),
        ("Bodiless", "the source of the environment Bodiless can't be read: write it to a file"),
    ],
)
def test_other_values_are_refused(cell: dict[str, Any], environment: Any, message: str, tmp_path: Path) -> None:
    found = cell.get(environment, environment) if isinstance(environment, str) else environment
    with pytest.raises(ValueError, match=message):
        write_environment(found, tmp_path)
