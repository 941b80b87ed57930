"""Checks whether a run's evaluation sets fit its data, its model and the rewards."""

from collections.abc import Collection, Mapping
from pathlib import Path

from relaxd.config import RunConfig
from relaxd.config.agent import SERVICE
from relaxd.data.dataset import PromptDataset
from relaxd.envs.loading import check_name as check_environment_name
from relaxd.evaluation.sets import sets_of
from relaxd.rewards import UnknownRewardError, check_name
from relaxd.run_folder import HELD_OUT
from relaxd.text import parse_json


def set_problems(
    config: RunConfig, data: Mapping[str, PromptDataset], names: Collection[str] | None = None
) -> list[tuple[str, str]]:
    """Return (setting, problem) for each fault of a run's evaluation sets, or only of the sets in `names`."""
    problems = []
    numbers = {one.name: number for number, one in enumerate(config.eval.sets)}
    for one in sets_of(config):
        if names is not None and one.name not in names:
            continue
        here = "eval" if one.name == HELD_OUT else f"eval.sets.{numbers[one.name]}"
        found = data.get(one.name)
        if found is None:
            wrong = f"= {one.prompts}, but nothing is held out: set data.eval_path, or eval.prompts = 0"
            problems.append((f"{here}.prompts", wrong if one.name == HELD_OUT else "the set has no prompts"))
        elif one.prompts > len(found):
            what = "are held out" if one.name == HELD_OUT else f"are in the set {one.name!r}"
            problems.append((f"{here}.prompts", f"= {one.prompts}, but only {len(found)} prompts {what}"))
        if one.reward is not None and one.reward.name:
            try:
                check_name(one.reward.name)
            except UnknownRewardError as error:
                problems.append((f"{here}.reward", str(error)))
    return problems


def environment_problems(config: RunConfig) -> list[tuple[str, str]]:
    """Return (setting, problem) for each environment name that resembles a bundled environment's name but isn't one."""
    names = {"agent.environment": config.agent.environment}
    names |= {f"eval.sets.{number}.environment": one.environment for number, one in enumerate(config.eval.sets)}
    problems = []
    for setting, name in names.items():
        if name and not name.startswith(SERVICE):
            try:
                check_environment_name(name, setting)
            except ValueError as error:
                problems.append((setting, str(error).removeprefix(f"{setting} ")))
    return problems


def context_problems(config: RunConfig, folder: Path) -> list[tuple[str, str]]:
    """Return (setting, problem) for each set whose answers may exceed the context of the model in `folder`."""
    try:
        context = parse_json((folder / "config.json").read_text()).get("max_position_embeddings")
    except (OSError, ValueError):
        return []
    if not isinstance(context, int):
        return []
    return [
        (
            "eval.sets",
            f"the set {one.name!r} has answers of up to {one.max_new_tokens} tokens: with data.max_prompt_tokens = "
            f"{config.data.max_prompt_tokens} that is more than the model's context of {context}",
        )
        for one in sets_of(config)
        if one.max_new_tokens > config.rollout.max_new_tokens
        and one.max_new_tokens + config.data.max_prompt_tokens > context
    ]
