"""The reward of jsonl.toml: one function of one sample. `relaxd reward test run.toml` tries it on three prompts."""

import re

from relaxd.rewards import RewardInput


def score(sample: RewardInput) -> dict:
    """Score an answer: most for the right word, a little for few others.

    `sample.prompt`, `.response` and `.answer` are texts; `.metadata` has the other fields of the prompt's line. Return
    a number, or {"reward": number, "parts": {name: number}} whose parts are only reported. It may be `async def`. If
    it raises, the prompt's samples are not trained on.
    """
    words = re.findall(r"[a-z]+", sample.response.lower())
    right = sample.answer.lower() in words
    brief = 1 / len(words) if words else 0.0
    return {"reward": 0.8 * right + 0.2 * brief, "parts": {"accuracy": right, "brief": brief}}
