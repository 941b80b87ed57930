"""Calling of rewards: their signature, their place in the source, and those that are coroutines."""

import asyncio
import inspect
import re
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from relaxd.rewards.base import BadRewardError, Reward, RewardInput, RewardOutput, check_output

MACHINERY = (__file__, str(Path(__file__).with_name("__init__.py")))
"""Files that call and import rewards."""
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
"""A frame in a faulthandler dump."""
SIGNATURE = "def {name}(sample), with sample.prompt, .response, .answer and .metadata"


def check_signature(reward: Callable[..., Any]) -> None:
    """Check that a reward can be called with a sample.

    Raises:
        BadRewardError: it takes something else; the message says what, where, and what would be right.
    """
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(None)
    except TypeError as error:
        right = SIGNATURE.format(name=_name(reward))
        taken = ", ".join(signature.parameters)
        raise BadRewardError(f"{place(reward)} takes ({taken}), but a reward takes one sample: {right}") from error


def call(reward: Reward, sample: RewardInput, runner: asyncio.Runner) -> RewardOutput:
    """Call a reward, in `runner` if it is async.

    Raises:
        BadRewardError: its value is no reward; the message begins with the reward's place.
        Exception: whatever the reward raises.
    """
    value = reward(sample)
    if inspect.isawaitable(value):
        value = runner.run(_await(value))
    try:
        return check_output(value)
    except BadRewardError as error:
        raise BadRewardError(f"{place(reward)}: {error}") from error


async def _await(value: Awaitable[Any]) -> Any:
    return await value


def place(reward: Callable[..., Any]) -> str:
    """Return name and place of a reward, such as "score (reward.py:12)"; files in the current folder are relative."""
    code = getattr(inspect.unwrap(reward), "__code__", None)
    return f"{_name(reward)} ({_file(code.co_filename)}:{code.co_firstlineno})" if code else _name(reward)


def describe_error(error: BaseException) -> str:
    """Return an exception in one line, with the place in the reward's file where it came about."""
    text = f"{type(error).__name__}: {error}".strip(": ")
    frames = _frames(error)
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f"{text} ({_file(own[-1].filename)}:{own[-1].lineno}, in {own[-1].name})" if own else text


def place_in_stacks(lines: Sequence[str]) -> str:
    """Return where a reward is, from lines of a faulthandler dump: "reward.py:12, in score"; "" if it isn't in one.

    It is the innermost line in the file of the reward, as in `describe_error`. An async reward that awaits something is
    in no stack.
    """
    own: list[tuple[str, str, str]] = []
    for line in lines:
        match = FRAME.match(line)
        if match is None:  # the next thread's stack
            own = []
        elif match[1] not in MACHINERY:
            own.append((match[1], match[2], match[3]))
        elif not own or own[-1][0] == asyncio.runners.__file__:
            return ""
        else:
            file, number, function = next(frame for frame in own if frame[0] == own[-1][0])
            return f"{_file(file)}:{number}, in {function}"
    return ""


def user_traceback(error: BaseException) -> str:
    """Return the traceback of an exception that a reward raised, from the reward on."""
    lines = ["Traceback:\n", *traceback.format_list(_frames(error)), *traceback.format_exception_only(error)]
    return "".join(lines).strip()


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames below this package's call or import of the reward."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [index for index, frame in enumerate(frames) if frame.filename in MACHINERY]
    below = frames[ours[-1] + 1 :] if ours else frames
    return [frame for frame in below if "importlib" not in frame.filename]


def _name(reward: Callable[..., Any]) -> str:
    return getattr(reward, "__name__", None) or type(reward).__name__


def _file(name: str) -> str:
    path = Path(name)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else name
