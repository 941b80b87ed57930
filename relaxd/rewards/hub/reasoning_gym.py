"""Reward for reasoning-gym's tasks: the task's own score."""

import json
from functools import lru_cache
from typing import Any

from relaxd.data.sources.reasoning_gym_source import KEY, Task, make_task
from relaxd.rewards.base import RewardInput
from relaxd.rewards.hub.readable import make_safe, readable
from relaxd.rewards.limit import TooSlow, time_limit
from relaxd.rewards.tags import tagged

CHECK_SECONDS = 3.0
"""Time for a task to score an answer. Then it scores 0."""
_REFUSED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, SyntaxError, RecursionError)
"""Exceptions of tasks for unreadable answers, such as letters instead of prime factors. They score 0 instead of failing
the group."""


def reasoning_gym(sample: RewardInput) -> dict[str, float]:
    """The score of the prompt's reasoning-gym task, from 0 to 1.

    Scores the text in the reply's last <answer>...</answer>, or else the whole reply. No answer is evaluated as Python
    code: tasks that would do so get formulas and lists only. Parts: accuracy: 1 if the score
    is 1, and format: 1 if the answer is in the tag or the reply is a single line.

    Raises:
        ValueError: the prompt is not from data.source = "reasoning_gym", or the task generates a different item.
        DataError: reasoning-gym isn't installed.
    """
    item = sample.metadata.get(KEY)
    if not isinstance(item, dict):
        raise ValueError(f'the prompt has no "{KEY}" in its metadata: this reward is for data.source = "reasoning_gym"')
    task, entry = _item(json.dumps(item, sort_keys=True))
    expected = "" if entry["answer"] is None else str(entry["answer"])
    if expected != sample.answer:
        raise ValueError(
            f"item {item['index']} of {item['task']} has the answer {expected!r} here, but the prompt's is "
            f"{sample.answer!r}: coordinator and reward need the same version of reasoning-gym"
        )
    found = tagged(sample.response)
    answer = (found[-1] if found else sample.response).strip()
    try:
        with time_limit(CHECK_SECONDS):
            score = float(task.score_answer(readable(answer, item["task"]), entry))
    except (TooSlow, *_REFUSED):
        score = 0.0
    answered = bool(answer) and (bool(found) or "\n" not in answer)
    return {"reward": score, "accuracy": float(score >= 1.0), "format": float(answered)}


@lru_cache(maxsize=1024)
def _item(description: str) -> tuple[Task, dict[str, Any]]:
    """Return a task and one of its items, cached for the samples of a group."""
    item = json.loads(description)
    index = item.pop("index")
    task = _task(json.dumps(item, sort_keys=True))
    return task, task[index]


@lru_cache(maxsize=8)
def _task(description: str) -> Task:
    item = json.loads(description)
    task = make_task(item["task"], item["settings"], item["size"], item["seed"])
    make_safe(task, item["task"])
    return task
