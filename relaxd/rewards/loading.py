"""Loads rewards by name: bundled rewards, users' functions and classes, and verl's `compute_score`."""

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any, cast

from relaxd.importing import describe_missing, import_file
from relaxd.rewards.calling import describe_error, name_of, parameters_of, place
from relaxd.rewards.interface import BadRewardError, Reward, RewardInput, ground_truth
from relaxd.rewards.mathematics.normal_forms import last_boxed
from relaxd.rewards.table import BOXED, PACKAGES, REWARDS, UnknownRewardError, check_name

VERL = frozenset({"data_source", "solution_str", "ground_truth", "extra_info"})
"""Names of the arguments that verl passes to `compute_score` for one sample."""
VERL_BATCH = frozenset(f"{name}s" for name in VERL)
"""Names of the arguments that verl passes to `compute_score` for a batch."""
NOT_SETTINGS = VERL | VERL_BATCH | {"sample", "samples"}
"""Names of reward parameters that receive samples or fields of samples; other parameters are settings."""
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
"""Rewards of other frameworks: the framework, the parameters that identify its rewards, and a hint how to adapt one."""


def resolve(name: str, settings: Mapping[str, Any] | None = None) -> Reward:
    """Import and return a reward by its name (see `check_name`), with its settings.

    A class is created with the settings; a function gets them as keyword arguments of every call. The package that a
    bundled reward needs is imported now, because that may take longer than a sample's deadline.

    Raises:
        UnknownRewardError: the name is unknown, or the module or package can't be imported.
        BadRewardError: the reward can't be called with a sample, or rejects the settings.
    """
    check_name(name)
    settings = dict(settings or {})
    bare = name.removeprefix(BOXED)
    if bare in REWARDS:
        _import_package(bare)
    function: Any = REWARDS[bare] if bare in REWARDS else _find(name)
    if inspect.isclass(function):
        check_settings(name, function, settings)
        try:
            function = function(**settings)
        except Exception as error:  # a user's class may raise anything
            reason = describe_error(error)
            raise UnknownRewardError(f'reward "{name}" can\'t be made with {settings}: {reason}') from error
    elif settings:
        check_settings(name, function, settings)
        function = partial(function, **settings)
    if bare in REWARDS:
        return cast(Reward, function if bare == name else boxed(function))
    function = adapt(function)
    check_signature(function)
    return cast(Reward, function)


def _import_package(name: str) -> None:
    if name in PACKAGES:
        package, requirement = PACKAGES[name]
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise UnknownRewardError(f"reward \"{name}\": {error} (pip install '{requirement}')") from error


def _find(name: str) -> Any:
    """Import a user's module or file and return the named function or class."""
    module_name, _, function_name = name.rpartition(":")
    try:
        if module_name.endswith(".py"):
            module = import_file(module_name, "reward")
        else:
            module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        reason = describe_error(error) + describe_missing(module_name, error)
        raise UnknownRewardError(f'reward "{name}": module {module_name} cannot be imported: {reason}') from error
    function = getattr(module, function_name, None)
    if function is None:
        near = difflib.get_close_matches(function_name, vars(module), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UnknownRewardError(f'reward "{name}": module {module_name} has no {function_name}{hint}')
    if not callable(function):
        raise UnknownRewardError(f'reward "{name}": {function_name} is a {type(function).__name__}, not a function')
    return function


def check_signature(reward: Callable[..., Any]) -> None:
    """Check that a reward can be called with a sample.

    Raises:
        BadRewardError: the signature is wrong; the message has its place and a valid signature.
    """
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # some builtins have none
        return
    scored = _scored_parameters(signature.parameters)
    for framework, names, instead in FORMS:
        if scored >= names:
            right, taken = SIGNATURE.format(name=name_of(reward)), ", ".join(signature.parameters)
            raise BadRewardError(
                f"{place(reward)} takes ({taken}), the form of {framework}; here a reward is {right}. {instead}"
            )
    try:
        signature.bind(None)
    except TypeError as error:
        right = SIGNATURE.format(name=name_of(reward))
        taken = ", ".join(signature.parameters)
        raise BadRewardError(f"{place(reward)} takes ({taken}), but a reward takes one sample: {right}") from error


def check_settings(name: str, reward: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """Check that a function or class accepts these settings as keyword arguments.

    Raises:
        BadRewardError: a setting is unknown, or a class needs another; the message names it and the known settings.
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


def boxed(reward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a reward so that it scores the content of the reply's last box, or "" if the reply has no box."""

    @wraps(reward)
    def of_box(sample: RewardInput) -> Any:
        return reward(replace(sample, response=last_boxed(sample.response) or "", response_messages=()))

    return of_box


def adapt(function: Callable[..., Any]) -> Callable[..., Any]:
    """Convert verl's `compute_score`, for one sample or a batch, to a reward; return other functions unchanged.

    verl passes data_source, solution_str, ground_truth and extra_info by name, so a function may accept only some of
    them, or **kwargs. Its other parameters are settings.
    """
    parameters = parameters_of(function)
    only_names = bool(parameters) and all(one.kind is one.VAR_KEYWORD for one in parameters.values())
    if only_names or _is_given(parameters, VERL):

        def score(sample: RewardInput) -> Any:
            return function(**_accepted(parameters, _verl_arguments(sample)))

        return _named(score, function)
    if _is_given(parameters, VERL_BATCH):

        def scores(samples: Sequence[RewardInput]) -> Any:
            of_each = [_verl_arguments(sample) for sample in samples]
            lists = {f"{name}s": [one[name] for one in of_each] for name in of_each[0]}
            return function(**_accepted(parameters, lists))

        return _named(scores, function)
    return function


def _is_given(parameters: Mapping[str, inspect.Parameter], names: frozenset[str]) -> bool:
    """Return True if all parameters that receive samples or their fields are in `names` and can be passed by name."""
    scored = _scored_parameters(parameters)
    by_name = all(parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY for name in scored)
    return bool(scored) and scored <= names and by_name


def _scored_parameters(parameters: Mapping[str, inspect.Parameter]) -> set[str]:
    """Return the names of a reward's parameters without a default, or else the first: they receive the samples."""
    named = [one for one in parameters.values() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    return {one.name for one in named if one.default is one.empty} or {one.name for one in named[:1]}


def _verl_arguments(sample: RewardInput) -> dict[str, Any]:
    """Return the keyword arguments with which verl would call `compute_score` for a sample.

    extra_info is the sample's metadata.extra_info, or all metadata without it.
    """
    extra = sample.metadata.get("extra_info")
    return {
        "data_source": sample.metadata.get("data_source", ""),
        "solution_str": sample.response,
        "ground_truth": ground_truth(sample),
        "extra_info": dict(extra if isinstance(extra, dict) else sample.metadata),
    }


def _accepted(parameters: dict[str, inspect.Parameter], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return those of the keyword arguments that a function with these parameters accepts."""
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _named(score: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Give an adapter function the name and place of the reward that it wraps, but not the signature."""
    score.__name__ = getattr(function, "__name__", type(function).__name__)
    score.reward = function  # type: ignore[attr-defined]  # for `place`
    return score
