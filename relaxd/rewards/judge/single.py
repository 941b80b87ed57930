"""The reward that has the judge score each answer."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from relaxd.rewards.interface import RewardInput
from relaxd.rewards.judge.asking import ask
from relaxd.rewards.judge.questions_and_replies import (
    ANSWER,
    GIVEN,
    REFERENCE,
    TASK,
    conversation,
    fill,
    read_field,
    read_number,
    read_yes_no,
    visible,
)

_ASKS = {
    "number": (
        "How good is this answer?",
        'Explain in one or two sentences. Then end with a line "Score: N", where N is a number from {minimum:g} '
        "(useless) to {maximum:g} (perfect).",
    ),
    "yes_no": (
        "Is this answer right?",
        'Explain in one or two sentences. Then end with a line "Judgement: yes" or "Judgement: no".',
    ),
    "json": (
        "How good is this answer?",
        'Reply with one JSON object: {{"reason": "one or two sentences", "{field}": N}}, where N is a number from '
        "{minimum:g} (useless) to {maximum:g} (perfect).",
    ),
}
"""Question and instruction of the default templates, by settings.reply."""


async def judge(
    sample: RewardInput,
    *,
    template: str = "",
    system: str = "",
    reply: str = "number",
    field: str = "score",
    minimum: float = 0.0,
    maximum: float = 10.0,
    votes: int = 1,
    vote: str = "mean",
    retries: int = 2,
    thinking: bool = False,
) -> dict[str, float]:
    """Verdict of the run's judge (roles.judge) on the reply, from 0 to 1.

    Settings: template: the question, with {response}, and {prompt}, {answer} and {metadata.KEY} as needed; system: a
    system message before it; reply: "number", from minimum to maximum after "Score:" or the like; "yes_no"; or "json",
    an object with a number in `field`; votes: how often to ask; vote: "mean" or "majority" of them; retries: how often
    to ask again for a vote that can't be read; thinking = true: the judge also sees what is before </think>. Part:
    agreement: share of the votes that are the most frequent one, with several votes.

    Raises:
        ValueError: a setting is wrong.
        JudgeError: no usable reply.
    """
    read = _reader(reply, field, minimum, maximum)
    if votes < 1 or retries < 0 or vote not in ("mean", "majority"):
        raise ValueError(
            f'settings are votes = {votes}, retries = {retries}, vote = "{vote}": judge needs votes >= 1, retries >= 0 '
            'and vote = "mean" or "majority"'
        )
    response = sample.response if thinking else visible(sample.response)
    if not template:
        question, instruction = _ASKS[reply]
        reference = REFERENCE if sample.answer else ""
        told = instruction.format(minimum=minimum, maximum=maximum, field=field)
        template = f"{TASK}{question}{GIVEN}{reference}{ANSWER}\n{told}"
    messages = conversation(system, fill(template, sample, ("response",), response=response))
    asking = (ask(messages, read=read, retries=retries, seed=number) for number in range(votes))
    values = list(await asyncio.gather(*asking))
    return {
        "reward": _majority(values) if vote == "majority" else sum(values) / votes,
        **({"agreement": max(Counter(values).values()) / votes} if votes > 1 else {}),
    }


def _reader(reply: str, field: str, minimum: float, maximum: float) -> Callable[[str], float]:
    """Return the function that reads a reply as a number from 0 to 1. Raises ValueError."""
    if reply == "yes_no":
        return read_yes_no
    if minimum >= maximum:
        raise ValueError(f"settings are minimum = {minimum:g}, maximum = {maximum:g}: minimum must be less")
    if reply == "number":
        read = partial(read_number, minimum=minimum, maximum=maximum)
    elif reply == "json":
        read = partial(read_field, field=field, minimum=minimum, maximum=maximum)
    else:
        raise ValueError(f'reward.settings.reply is "{reply}": it must be "number", "yes_no" or "json"')
    return lambda text: (read(text) - minimum) / (maximum - minimum)


def _majority(values: Sequence[float]) -> float:
    """Return the most frequent value, or the mean of several equally frequent ones."""
    counts = Counter(values)
    most = max(counts.values())
    winners = [value for value, count in counts.items() if count == most]
    return sum(winners) / len(winners)
