"""Calls rewards, async ones included, and finds where a failed or slow reward is in its source."""

import asyncio
import inspect
import re
import traceback
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from relaxd.rewards.interface import BadRewardError, Reward, RewardInput, RewardOutput, check_output
from relaxd.rewards.logged import Logged, collect_into, logged_parts

MACHINERY = str(Path(__file__).parent)
"""Folder of relaxd's files that call and import rewards; bundled rewards are in its subfolders."""
Outcome = RewardOutput | BaseException
"""A sample's score, or the exception that its reward raised."""
DUMP = re.compile(r"Timeout \(\d+:\d\d:\d\d(\.\d+)?\)!")
THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+.* \(most recent call first\):")
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
OTHER = ("", "  ...", "  <no Python frame>")
"""Lines of a stack dump that name no frame; "  ..." stands for the frames beyond the first hundred."""


def takes_group(reward: Callable[..., Any]) -> bool:
    """Return True if a reward scores all samples of a group at once: its first parameter is `samples`."""
    return next(iter(parameters_of(reward)), "") == "samples"


def awaits(reward: Callable[..., Any]) -> bool:
    """Return True if a reward, or its `__call__`, is a coroutine function."""
    function = inspect.unwrap(getattr(reward, "func", reward))
    function = getattr(function, "reward", function)  # of `adapt`
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function or class by name; {} for a builtin without a signature."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some builtins have none
        return {}


def call(reward: Reward, samples: Sequence[RewardInput], runner: asyncio.Runner, key: str = "") -> list[Outcome]:
    """Call a reward for samples of a group.

    Coroutines run in `runner`, all at the same time.

    `key` is the key of the reward in mappings, see `check_output`. Numbers that the reward logs (`log_metric`) become
    parts of the sample's score; if it scores a group at once, of the first sample's.

    Returns for each sample its score or an exception: the reward's own, or BadRewardError if its result is invalid or
    not one for each sample. The message of a BadRewardError begins with the reward's place.
    """
    if takes_group(reward):
        calls = [_Call(cast(Callable[..., Any], reward), samples)]
        outcomes = _of_group(_finish(calls, runner)[0], len(samples))
    else:
        function = cast(Callable[[RewardInput], Any], reward)
        calls = [_Call(function, sample) for sample in samples]
        outcomes = _finish(calls, runner)
    logged = [call.logged for call in calls] + [{}] * (len(outcomes) - len(calls))
    return [_with_logged(_checked(reward, outcome, key), one) for outcome, one in zip(outcomes, logged, strict=True)]


@dataclass
class _Call:
    """A pending call of a reward, and the numbers that the reward logs during the call."""

    function: Callable[[Any], Any]
    scored: Any
    logged: Logged = field(default_factory=dict)
    context: Context = field(default_factory=copy_context)

    def begin(self) -> Any:
        """Call the reward. Returns the reward's result, which may be awaitable, or the exception that it raised."""
        self.context.run(collect_into, self.logged)
        try:
            return self.context.run(self.function, self.scored)
        except BaseException as error:  # SystemExit as well: a reward that calls sys.exit() has only failed
            return error


def _finish(calls: Sequence[_Call], runner: asyncio.Runner) -> list[Any]:
    """Call the rewards, and await async ones concurrently. Returns a result or an exception for each call."""
    values = [call.begin() for call in calls]
    return runner.run(_await_all(calls, values)) if any(map(inspect.isawaitable, values)) else values


async def _await_all(calls: Sequence[_Call], values: Sequence[Any]) -> list[Any]:
    tasks = [
        asyncio.create_task(_await(value), context=call.context) for call, value in zip(calls, values, strict=True)
    ]
    return list(await asyncio.gather(*tasks))


async def _await(value: Any) -> Any:
    try:
        return await value if inspect.isawaitable(value) else value
    except BaseException as error:  # as in `_Call.begin`
        return error


def _of_group(values: Any, count: int) -> list[Any]:
    """Split a group reward's result into one value per sample.

    If the reward raised, or its result isn't one value per sample, each sample gets the error.
    """
    if isinstance(values, BaseException):
        return [values] * count
    if not isinstance(values, Sequence) and hasattr(values, "tolist"):
        values = values.tolist()  # of numpy and torch
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != count:
        found = f"{len(values)} values" if isinstance(values, Sequence) else type(values).__name__
        error = BadRewardError(f"it returned {found} for {count} samples: return a list, one for each sample")
        return [error] * count
    return list(values)


def _with_logged(outcome: Outcome, logged: Logged) -> Outcome:
    if isinstance(outcome, RewardOutput) and logged:
        return replace(outcome, parts=outcome.parts | logged_parts(logged))
    return outcome


def _checked(reward: Reward, value: Any, key: str) -> Outcome:
    try:
        if isinstance(value, BadRewardError):
            raise value
        return value if isinstance(value, BaseException) else check_output(value, key)
    except BadRewardError as error:
        return BadRewardError(f"{place(reward)}: {error}")


def place(reward: Callable[..., Any]) -> str:
    """Return a reward's name and place, such as "score (reward.py:12)"; paths in the current folder are relative."""
    function = getattr(reward, "func", reward)  # of functools.partial
    function = inspect.unwrap(getattr(function, "reward", function))
    code = getattr(function, "__code__", None)
    return f"{name_of(reward)} ({shown_file(code.co_filename)}:{code.co_firstlineno})" if code else name_of(reward)


def describe_error(error: BaseException) -> str:
    """Describe a reward's exception in one line, with the innermost place in the reward's file."""
    text = f"{type(error).__name__}: {error}".strip(": ")
    frames = _frames(error)
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f"{text} ({shown_file(own[-1].filename)}:{own[-1].lineno}, in {own[-1].name})" if own else text


def user_traceback(error: BaseException) -> str:
    """Return the traceback of a reward's exception, without frames outside the reward."""
    lines = ["Traceback:\n", *traceback.format_list(_frames(error)), *traceback.format_exception_only(error)]
    return "".join(lines).strip()


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the traceback's frames inside the reward: those after relaxd's call or import of the reward."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [index for index, frame in enumerate(frames) if str(Path(frame.filename).parent) == MACHINERY]
    below = frames[ours[-1] + 1 :] if ours else frames
    return [frame for frame in below if "importlib" not in frame.filename]


def name_of(reward: Callable[..., Any]) -> str:
    """Return the name of a reward function; for a callable object, the name of its class."""
    reward = getattr(reward, "func", reward)
    return getattr(reward, "__name__", None) or type(reward).__name__


def shown_file(name: str) -> str:
    """Return a file's path as messages show it: relative if the file is in the current folder."""
    path = Path(name)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else name


class RewardStacks:
    """Filters a worker's output: shortens stack dumps to the reward's frames, and remembers the reward's place."""

    def __init__(self) -> None:
        self.place = ""
        """Place of the reward in the newest stack dump, such as "reward.py:12, in score": the innermost line in the
        reward's file. "" if no stack contained the reward, for example while an async reward awaits."""
        self._in_dump = False
        self._own: list[tuple[str, str, str]] | None = None
        """Frames read so far of the current thread's stack, as (file, line, function), innermost first. None after
        the stack has been printed or discarded."""

    def filter(self, line: str) -> list[str]:
        """Return the lines to print instead of a line of the worker's output; [] to hide the line."""
        if DUMP.fullmatch(line):
            self._in_dump, self._own = True, None
            return []
        if not self._in_dump:
            return [line]
        if THREAD.fullmatch(line):
            self._own = []
        elif frame := FRAME.fullmatch(line):
            return self._add(frame[1], frame[2], frame[3])
        elif line == "  ..." and self._own:  # the reward's recursion: relaxd's threads have fewer frames
            return self._pass()
        elif line not in OTHER:
            self._in_dump = False
            return [line]
        return []

    def _add(self, file: str, number: str, function: str) -> list[str]:
        if self._own is None:
            return []
        if str(Path(file).parent) != MACHINERY:
            self._own.append((file, number, function))
            return []
        if not self._own or self._own[-1][0] == asyncio.runners.__file__:
            self._own = None
            return []
        return self._pass()

    def _pass(self) -> list[str]:
        own, self._own = self._own or [], None
        file, number, function = next(frame for frame in own if frame[0] == own[-1][0])
        self.place = f"{shown_file(file)}:{number}, in {function}"
        stack = [f'  File "{file}", line {number} in {function}' for file, number, function in own]
        return ["the reward takes long; it is here (most recent call first):", *stack]
