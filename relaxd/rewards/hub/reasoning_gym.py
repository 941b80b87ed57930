"""Reward for reasoning-gym's tasks: the task's own score, for answers that the task can read safely."""

import ast
import json
import re
import sys
from functools import lru_cache
from typing import Any

from relaxd.data.sources.reasoning_gym_source import KEY, Task, make_task
from relaxd.media.messages import tagged
from relaxd.rewards.interface import RewardInput, TooSlow, time_limit
from relaxd.rewards.mathematics.equality import Unreadable, parse

_FORMULAS = frozenset({"countdown", "puzzle24", "simple_integration", "intermediate_integration"})
"""Names of reasoning-gym tasks that parse an answer with sympy's parser, which calls eval."""
_LISTS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Names of reasoning-gym tasks that call eval on an answer, which may be a list."""
_FRACTIONS = frozenset({"coin_flip"})
"""Names of reasoning-gym tasks that parse an answer as a fraction; 1e999999999 would take all memory."""
_WORD = re.compile(r"[^\W\d_]+")
_FUNCTIONS = frozenset(
    "sqrt sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log ln pi abs Abs".split()  # noqa: SIM905
)
_LARGE_EXPONENT = re.compile(r"[eE][-+]?[0-9_]{4}")
UNREADABLE = "("
"""A text that no task can parse as an answer; it replaces unsafe answers."""


def readable(answer: str, task: str) -> str:
    """Return an answer if it is safe for a task, or else `UNREADABLE`.

    Tasks that parse formulas get only numbers, letters, operators, brackets and well-known functions, without powers
    whose value would fill the memory. An unsolved "Integral(...)" is refused, because sympy would accept it as right.
    """
    if task in _FORMULAS and not _is_formula(answer):
        return UNREADABLE
    if task in _FRACTIONS and _LARGE_EXPONENT.search(answer):
        return UNREADABLE
    return answer


def make_safe(task: object, name: str) -> None:
    """Replace eval by `ast.literal_eval` in a task's module if the task evaluates answers that are lists."""
    if name in _LISTS:
        module: Any = sys.modules[type(task).__module__]
        module.eval = ast.literal_eval


def _is_formula(answer: str) -> bool:
    if not all(len(word) == 1 or word in _FUNCTIONS for word in _WORD.findall(answer)):
        return False
    try:
        parse(re.sub(r"\s+", "", answer).lower())
    except (Unreadable, ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError):
        return False
    return True


CHECK_SECONDS = 3.0
"""Maximum seconds for a task to score an answer; slower answers score 0."""
_REFUSED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, SyntaxError, RecursionError)
"""Exceptions that tasks raise for invalid answers, such as letters instead of prime factors. These answers score 0."""


def reasoning_gym(sample: RewardInput) -> dict[str, float]:
    """The score of the prompt's reasoning-gym task, from 0 to 1.

    Scores the text in the reply's last <answer>...</answer>, or else the whole reply. No answer is evaluated as Python
    code: tasks that would do so get formulas and lists only. Parts: accuracy: 1 if the score is 1, and format: 1 if the
    answer is in the tag or the reply is a single line.

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
    """Return a task, and the item (question and answer) at the described index. Cached: a group's samples share it."""
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
