"""The reasoning_gym source: prompts of one of reasoning-gym's procedural tasks.

An item is identified by task, settings, size, seed and index. The reward (rewards/hub/reasoning_gym.py) generates the
item again from this identification, instead of receiving its Python objects.
"""

import difflib
from collections.abc import Mapping
from typing import Any, Protocol

from relaxd.config import ReasoningGymConfig
from relaxd.data.examples import Example
from relaxd.models import DataError

FIELD = "data.reasoning_gym"
PACKAGE = "reasoning-gym is not installed: pip install 'relaxd[reasoning]'"
NOT_REPRODUCIBLE = frozenset(
    {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
)
"""Tasks whose generated items depend on the order of Python's sets, which differs between processes."""
KEY = "reasoning_gym"
"""Key of a prompt's metadata under which the item's task, settings, size, seed and index are."""


class Task(Protocol):
    """Interface of the part of reasoning-gym's ProceduralDataset that relaxd uses."""

    def __getitem__(self, place: int) -> dict[str, Any]: ...

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        """Return the score of an answer to an item, from 0 to 1."""


def reasoning_gym(config: ReasoningGymConfig) -> tuple[list[Example], list[Example]]:
    """Return the training examples and the held-out examples of a task.

    Raises DataError if reasoning-gym isn't installed, has no such task, or the task refuses its settings.
    """
    size = config.size + config.held_out
    task = make_task(config.task, config.settings, size, config.seed)
    item = {"task": config.task, "settings": config.settings, "size": size, "seed": config.seed}
    try:
        examples = [_example(task[place], item | {"index": place}, config.instruction) for place in range(size)]
    except Exception as error:  # tasks raise anything if their settings allow no item
        problem = f"the task {config.task} can't generate an item: {type(error).__name__}: {error}"
        raise DataError(f"{FIELD}.settings", problem) from error
    held_out = examples[config.size :]
    unseen = {example.prompt for example in held_out}
    train = [example for example in examples[: config.size] if example.prompt not in unseen]
    if not train:
        raise DataError(
            f"{FIELD}.held_out", f"= {config.held_out} holds out every question of {config.task}: hold out fewer"
        )
    return train, held_out


def make_task(name: str, settings: Mapping[str, Any], size: int, seed: int) -> Task:
    """Create a task as a reasoning-gym data set with `size` items.

    Raises DataError if reasoning-gym isn't installed, has no such task, or the task refuses its settings.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        if error.name != "reasoning_gym":
            raise
        raise DataError("data.source", PACKAGE) from error
    tasks = sorted(set(reasoning_gym.factory.DATASETS) - {"composite"} - NOT_REPRODUCIBLE)
    if name in NOT_REPRODUCIBLE:
        problem = f"= {name!r} is not supported: reasoning-gym generates different items of it in each process"
        raise DataError(f"{FIELD}.task", problem)
    if name not in tasks:
        near = difflib.get_close_matches(name, tasks, n=3) or tasks
        raise DataError(f"{FIELD}.task", f"= {name!r} is not a task of reasoning-gym; there are {', '.join(near)}")
    if taken := {"size", "seed"} & settings.keys():
        raise DataError(f"{FIELD}.settings", f"has {' and '.join(sorted(taken))}: set {FIELD}.size and .seed instead")
    try:
        task: Task = reasoning_gym.create_dataset(name, size=size, seed=seed, **settings)
    except Exception as error:  # the configuration classes raise AssertionError, ValueError and TypeError
        known = ", ".join(
            sorted(reasoning_gym.factory.DATASETS[name][1].__dataclass_fields__.keys() - {"size", "seed"})
        )
        problem = f"the task {name} refuses them: {error or type(error).__name__} (its settings are {known})"
        raise DataError(f"{FIELD}.settings", problem) from error
    return task


def _example(entry: Mapping[str, Any], item: dict[str, Any], instruction: str) -> Example:
    question = entry["question"]
    return Example(
        prompt=f"{question.rstrip()}\n\n{instruction}" if instruction else question,
        answer="" if entry["answer"] is None else str(entry["answer"]),
        metadata={KEY: item},
        place=f"item {item['index']} of reasoning-gym's {item['task']}",
    )
