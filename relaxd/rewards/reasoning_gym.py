"""What a task of reasoning-gym gives for an answer: its own score, part of it for a part of the answer."""

import json
import re
from functools import lru_cache
from typing import Any

from relaxd.data.reasoning_gym import KEY, Task, make_task
from relaxd.rewards.base import RewardInput

UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, SyntaxError)
"""What tasks raise over answers that they can't read, such as letters where prime factors should be: the model's fault,
which must not cost the group."""
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reasoning_gym(sample: RewardInput) -> dict[str, float]:
    """The score that the prompt's task of reasoning-gym gives, from 0 to 1.

    What is scored is the text in the reply's last <answer>...</answer>, or the whole reply where it has none. Parts:
    accuracy: 1 if the score is 1, and format: 1 if an answer was found: in the tag, or the reply is a single line.

    Raises:
        ValueError: the prompt is none of reasoning-gym's (data.source = "reasoning_gym"), or the task doesn't make the
            item that the prompt was.
        DataError: reasoning-gym isn't installed here.
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
    tagged = _TAGGED.findall(sample.response)
    answer = (tagged[-1] if tagged else sample.response).strip()
    try:
        score = float(task.score_answer(answer, entry))
    except UNREADABLE:
        score = 0.0
    answered = bool(answer) and (bool(tagged) or "\n" not in answer)
    return {"reward": score, "accuracy": float(score >= 1.0), "format": float(answered)}


@lru_cache(maxsize=1024)
def _item(description: str) -> tuple[Task, dict[str, Any]]:
    """A task and one of its items; the samples of a group ask for the same one."""
    item = json.loads(description)
    index = item.pop("index")
    task = _task(json.dumps(item, sort_keys=True))
    return task, task[index]


@lru_cache(maxsize=8)
def _task(description: str) -> Task:
    item = json.loads(description)
    return make_task(item["task"], item["settings"], item["size"], item["seed"])
