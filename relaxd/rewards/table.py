"""Tables of the bundled rewards by name, and of verl's data sources with the bundled reward that fits each."""

import difflib
from collections.abc import Mapping, Sequence

from relaxd.importing import OWN_NAME
from relaxd.rewards.hub.addition import addition
from relaxd.rewards.hub.code import Code
from relaxd.rewards.hub.dummy import dummy
from relaxd.rewards.hub.environment import environment
from relaxd.rewards.hub.exact_match import exact_match
from relaxd.rewards.hub.f1 import f1
from relaxd.rewards.hub.gpqa import gpqa
from relaxd.rewards.hub.gsm8k import gsm8k
from relaxd.rewards.hub.instructions import ifbench, ifeval
from relaxd.rewards.hub.json_schema import json_schema
from relaxd.rewards.hub.multiple_choice import multiple_choice
from relaxd.rewards.hub.overlong import overlong
from relaxd.rewards.hub.random import random
from relaxd.rewards.hub.reasoning_gym import reasoning_gym
from relaxd.rewards.hub.regex import regex
from relaxd.rewards.hub.search_r1 import search_r1
from relaxd.rewards.hub.verl_tools import VerlToolsReward
from relaxd.rewards.interface import Reward
from relaxd.rewards.judge.pairs import judge_pairs
from relaxd.rewards.judge.single import judge
from relaxd.rewards.mathematics.dapo import dapo
from relaxd.rewards.mathematics.deepscaler import deepscaler
from relaxd.rewards.mathematics.geo3k import geo3k
from relaxd.rewards.mathematics.math import math
from relaxd.rewards.mathematics.openr1mm import openr1mm

REWARDS: Mapping[str, Reward | type[Code] | type[VerlToolsReward]] = {
    reward.__name__: reward
    for reward in (
        addition, dapo, deepscaler, dummy, environment, exact_match, f1, geo3k, gpqa, gsm8k, ifbench, ifeval,
        json_schema, judge, judge_pairs,
        math, multiple_choice, openr1mm, overlong, random, reasoning_gym, regex, search_r1,
    )
} | {"code": Code, "verl_tools": VerlToolsReward}  # fmt: skip
"""The bundled rewards by name: functions, and classes whose constructors take the reward's settings."""
PACKAGES = {
    "deepscaler": ("sympy", "relaxd[reward]"),
    "geo3k": ("sympy", "relaxd[reward]"),
    "ifbench": ("if_verifiable", "relaxd[ifeval]"),
    "ifeval": ("if_verifiable", "relaxd[ifeval]"),
    "json_schema": ("jsonschema", "relaxd[reward]"),
    "math": ("sympy", "relaxd[reward]"),
    "openr1mm": ("math_verify", "relaxd[reward]"),
    "reasoning_gym": ("reasoning_gym", "relaxd[reasoning]"),
    "verl_tools": ("yaml", "relaxd[reward]"),
}
"""Optional dependency of each bundled reward: the imported package, and the requirement that installs it."""
BOXED = "boxed_"
"""Prefix of a bundled reward's name; with it the reward scores the content of the reply's last box, not the reply."""
NEVER_BOXED = frozenset(
    {"code", "dapo", "deepscaler", "environment", "geo3k", "gsm8k", "judge_pairs", "math", "overlong", "verl_tools"}
)
"""Bundled rewards for which the prefix "boxed_" is invalid: they search the reply themselves, or don't read it."""


class UnknownRewardError(ValueError):
    """There is no reward with that name, or it can't be imported."""


def check_name(name: str) -> None:
    """Check a reward's name without importing anything.

    It is the name of a bundled reward, optionally after "boxed_", or "package.module:function" or "file.py:function".

    Raises:
        UnknownRewardError: the name is unknown; the message has the nearest names.
    """
    bare = name.removeprefix(BOXED)
    if bare in REWARDS:
        if bare != name and bare in NEVER_BOXED:
            raise UnknownRewardError(f'unknown reward "{name}": {bare} finds the answer in the reply by itself: use it')
        return
    if OWN_NAME.fullmatch(name):
        return
    near = [name[: -len(bare)] + one for one in difflib.get_close_matches(bare, REWARDS, n=3)] if bare else []
    hint = f"did you mean {' or '.join(near)}?" if near else f"bundled are {', '.join(sorted(REWARDS))}."
    own = '"package.module:function" or "file.py:function"'
    raise UnknownRewardError(f'unknown reward "{name}": {hint} Your own is named as {own}')


def is_bundled(name: str) -> bool:
    """Return True for the name of a bundled reward, whose code any caller may run."""
    return name.removeprefix(BOXED) in REWARDS


def describe(name: str) -> str:
    """Return the first line of a bundled reward's docstring."""
    return (REWARDS[name].__doc__ or "").strip().partition("\n")[0]


_DATA_SOURCES: Mapping[str, Sequence[str]] = {
    "gsm8k": ("openai/gsm8k",),
    "math": (
        *("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"),
        *("numina_aops_forum", "numina_synthetic_math", "numina_amc_aime", "numina_synthetic_amc"),
        *("numina_cn_k12", "numina_olympiads"),
    ),
    "dapo": ("math", "math_dapo", "math_dapo_reasoning"),
    "geo3k": ("hiyouga/geometry3k",),
    "code": ("apps", "codecontests", "codeforces", "taco"),
    "search_r1": (
        *("searchR1_nq", "searchR1_triviaqa", "searchR1_popqa", "searchR1_hotpotqa", "searchR1_2wikimultihopqa"),
        *("searchR1_musique", "searchR1_bamboogle"),
    ),
}
"""For each bundled reward: the names of verl's data sources that verl scores with a similar reward."""


def reward_of_data_source(name: str) -> str | None:
    """Return the name of the bundled reward that fits verl's data source `name`; None if no reward fits."""
    if name.startswith("aime"):
        return "dapo"
    return next((reward for reward, sources in _DATA_SOURCES.items() if name in sources), None)
