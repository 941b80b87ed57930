"""Calling of rewards: their signatures, their place in the source, and coroutines among them."""

import asyncio
import difflib
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from relaxd.rewards.interface import BadRewardError, Reward, RewardInput, RewardOutput, check_output
from relaxd.rewards.logged import Logged, collect_into, logged_parts
from relaxd.rewards.other_interfaces import VERL, VERL_BATCH, scored_parameters, takes_group

MACHINERY = str(Path(__file__).parent)
"""Folder of the files that call and import rewards; bundled rewards are in its subfolders."""
NOT_SETTINGS = VERL | VERL_BATCH | {"sample", "samples"}
"""Parameters of functions that receive what is scored, not settings."""
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
"""Other frameworks, the parameters of their rewards that receive what is scored, and relaxd's equivalents."""


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
"""A sample's score, or the exception in its place."""


def call(reward: Reward, samples: Sequence[RewardInput], runner: asyncio.Runner, key: str = "") -> list[Outcome]:
    """Call a reward for samples of a group. Coroutines run in `runner`, all at the same time.

    `key` is the key of the reward in mappings, see `check_output`.

    What it logs (`log_metric`) becomes parts of the sample's score; for a group, of the first sample's.

    Returns for each sample its score, or what was raised: whatever the reward raises, or BadRewardError if its value is
    no reward, or no list of one for each sample; the message of the latter begins with its place.
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
    """A call of a function, and the numbers that it logs."""

    function: Callable[[Any], Any]
    scored: Any
    logged: Logged = field(default_factory=dict)
    context: Context = field(default_factory=copy_context)

    def begin(self) -> Any:
        """Call the function. Returns its value, which may be awaitable, or the exception."""
        self.context.run(collect_into, self.logged)
        try:
            return self.context.run(self.function, self.scored)
        except BaseException as error:  # SystemExit as well: a reward that calls sys.exit() has only failed
            return error


def _finish(calls: Sequence[_Call], runner: asyncio.Runner) -> list[Any]:
    """Make calls, and await awaitable values concurrently. Returns values or exceptions."""
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
    """Return a group's values one by one, or the common error for each."""
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
    """Return name and place of a reward, such as "score (reward.py:12)"; files in the current folder are relative."""
    function = getattr(reward, "func", reward)  # of functools.partial
    function = inspect.unwrap(getattr(function, "reward", function))
    code = getattr(function, "__code__", None)
    return f"{_name(reward)} ({shown_file(code.co_filename)}:{code.co_firstlineno})" if code else _name(reward)


def describe_error(error: BaseException) -> str:
    """Return an exception in one line, with its place in the reward's file."""
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
    """Return a file's path, relative if the file is in the current folder."""
    path = Path(name)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else name
