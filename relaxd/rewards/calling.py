"""Calling of rewards: their signature, their place in the source, and those that are coroutines."""

import asyncio
import difflib
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from relaxd.rewards.interface import BadRewardError, Reward, RewardInput, RewardOutput, check_output
from relaxd.rewards.other_interfaces import VERL, VERL_BATCH, scored_parameters, takes_group

MACHINERY = str(Path(__file__).parent)
"""Folder of the files that call and import rewards; bundled rewards are in folders below it."""
NOT_SETTINGS = VERL | VERL_BATCH | {"sample", "samples"}
"""Parameters of functions that hold what is scored."""
SIGNATURE = (
    "def {name}(sample), with sample.prompt, .response, .answer and .metadata; or def {name}(samples), which returns a "
    "list for a group"
)


FORMS = (
    (
        "TRL",
        {"completions"},
        "sample.prompt and sample.response stand for prompts and completions, metadata for columns",
    ),
    ("TRL", {"completion_ids"}, "sample.response has the text of completion_ids"),
    ("slime", {"args", "sample"}, "settings are in reward.settings, and sample.response, .answer and .metadata in it"),
    ("slime", {"args", "samples"}, "settings are in reward.settings, and .response, .answer and .metadata in a sample"),
    ("OpenRLHF", {"queries"}, "sample.response stands for queries, sample.answer for labels"),
    ("verl", {"solution_str"}, f"verl passes only {', '.join(sorted(VERL))}; other parameters are settings"),
    ("verl", {"solution_strs"}, f"verl passes only {', '.join(sorted(VERL_BATCH))}; other parameters are settings"),
)
"""Other frameworks, parameters of their rewards that hold what is scored, and what stands for them here."""


def check_signature(reward: Callable[..., Any]) -> None:
    """Check that a reward can be called with a sample.

    Raises:
        BadRewardError: it takes something else; the message says what, where, and what would be right.
    """
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # some builtins have none
        return
    scored = scored_parameters(signature.parameters)
    for framework, names, instead in FORMS:
        if scored >= names:
            right, taken = SIGNATURE.format(name=_name(reward)), ", ".join(signature.parameters)
            raise BadRewardError(
                f"{place(reward)} takes ({taken}), the form of {framework}; here a reward is {right}. {instead}"
            )
    try:
        signature.bind(None)
    except TypeError as error:
        right = SIGNATURE.format(name=_name(reward))
        taken = ", ".join(signature.parameters)
        raise BadRewardError(f"{place(reward)} takes ({taken}), but a reward takes one sample: {right}") from error


def check_settings(name: str, reward: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """Check that a function or class takes these settings as keyword arguments.

    Raises:
        BadRewardError: it doesn't know one of them, or a class lacks one; the message says which, and which it takes.
    """
    try:
        parameters = inspect.signature(reward).parameters
    except (TypeError, ValueError):  # some builtins have none
        return
    is_class = inspect.isclass(reward)
    known = [one for one in parameters if is_class or one not in NOT_SETTINGS]
    if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        for wrong in settings.keys() - set(known):
            near = difflib.get_close_matches(wrong, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known) or 'none'}"
            raise BadRewardError(f'reward.settings.{wrong} is not a setting of the reward "{name}": {hint}')
    for one in parameters.values() if is_class else ():
        needed = one.default is one.empty and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        if needed and one.name not in settings:
            raise BadRewardError(f'reward.settings.{one.name} is missing: the reward "{name}" needs it')


Outcome = RewardOutput | BaseException
"""A sample's score, or what was raised instead."""


def call(reward: Reward, samples: Sequence[RewardInput], runner: asyncio.Runner, key: str = "") -> list[Outcome]:
    """Call a reward for samples of a group. Coroutines run in `runner`, all at the same time.

    `key` is the key of the reward in mappings, see `check_output`.

    Returns for each sample its score, or what was raised: whatever the reward raises, or BadRewardError if its value is
    no reward, or no list of one for each sample; the message of the latter begins with its place.
    """
    if takes_group(reward):
        (values,) = _finish([_begin(cast(Callable[..., Any], reward), samples)], runner)
        outcomes = _of_group(values, len(samples))
    else:
        function = cast(Callable[[RewardInput], Any], reward)
        outcomes = _finish([_begin(function, sample) for sample in samples], runner)
    return [_checked(reward, outcome, key) for outcome in outcomes]


def _begin(function: Callable[[Any], Any], scored: Any) -> Any:
    """Call a function. Returns its value, which may be awaitable, or what it raised."""
    try:
        return function(scored)
    except BaseException as error:  # SystemExit as well: a reward that calls sys.exit() has only failed
        return error


def _finish(values: list[Any], runner: asyncio.Runner) -> list[Any]:
    """Await those values that are awaitable, at the same time. Returns the values, or what was raised."""
    return runner.run(_await_all(values)) if any(map(inspect.isawaitable, values)) else values


async def _await_all(values: Sequence[Any]) -> list[Any]:
    return list(await asyncio.gather(*(_await(value) for value in values)))


async def _await(value: Any) -> Any:
    try:
        return await value if inspect.isawaitable(value) else value
    except BaseException as error:  # as in `_begin`
        return error


def _of_group(values: Any, count: int) -> list[Any]:
    """Return a group's values one by one, or for each the error of all."""
    if isinstance(values, BaseException):
        return [values] * count
    if not isinstance(values, Sequence) and hasattr(values, "tolist"):
        values = values.tolist()  # of numpy and torch
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != count:
        found = f"{len(values)} values" if isinstance(values, Sequence) else type(values).__name__
        error = BadRewardError(f"it returned {found} for {count} samples: return a list, one for each sample")
        return [error] * count
    return list(values)


def _checked(reward: Reward, value: Any, key: str) -> Outcome:
    try:
        if isinstance(value, BadRewardError):
            raise value
        return value if isinstance(value, BaseException) else check_output(value, key)
    except BadRewardError as error:
        return BadRewardError(f"{place(reward)}: {error}")


def place(reward: Callable[..., Any]) -> str:
    """Return name and place of a reward, such as "score (reward.py:12)"; files in the current folder are relative."""
    function = getattr(reward, "func", reward)  # of functools.partial
    function = inspect.unwrap(getattr(function, "reward", function))
    code = getattr(function, "__code__", None)
    return f"{_name(reward)} ({shown_file(code.co_filename)}:{code.co_firstlineno})" if code else _name(reward)


def describe_error(error: BaseException) -> str:
    """Return an exception in one line, with the place in the reward's file where it came about."""
    text = f"{type(error).__name__}: {error}".strip(": ")
    frames = _frames(error)
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f"{text} ({shown_file(own[-1].filename)}:{own[-1].lineno}, in {own[-1].name})" if own else text


def user_traceback(error: BaseException) -> str:
    """Return the traceback of an exception that a reward raised, from the reward on."""
    lines = ["Traceback:\n", *traceback.format_list(_frames(error)), *traceback.format_exception_only(error)]
    return "".join(lines).strip()


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames below this package's call or import of the reward."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [index for index, frame in enumerate(frames) if str(Path(frame.filename).parent) == MACHINERY]
    below = frames[ours[-1] + 1 :] if ours else frames
    return [frame for frame in below if "importlib" not in frame.filename]


def _name(reward: Callable[..., Any]) -> str:
    reward = getattr(reward, "func", reward)
    return getattr(reward, "__name__", None) or type(reward).__name__


def shown_file(name: str) -> str:
    """Return a file's path, relative if it is in the current folder."""
    path = Path(name)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else name
