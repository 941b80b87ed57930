"""The reward for which the judge scores each answer; question templates, and parsing of the judge's replies.

A reply that can't be parsed is an error, never a guess.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from relaxd.rewards.interface import RewardInput
from relaxd.rewards.judge import ask

_PLACE = re.compile(r"\{(prompt|response|answer|first|second|metadata\.[\w-]+)\}")

TASK = "You are a strict and fair judge of answers. "
GIVEN = "\n\n<question>\n{prompt}\n</question>\n"
REFERENCE = "\n<reference_answer>\n{answer}\n</reference_answer>\n"
ANSWER = "\n<answer>\n{response}\n</answer>\n"
"""Sections of the judge's default question templates. {answer} is the reference answer, as in rewards."""


def fill(template: str, sample: RewardInput, needed: tuple[str, ...], **texts: str) -> str:
    """Fill in a question template: {prompt}, {answer}, {metadata.KEY} and the names in `texts`; other braces stay.

    Inserted texts aren't searched for placeholders. Raises ValueError if a placeholder of `needed` or a key of the
    metadata is missing.
    """
    missing = [name for name in needed if f"{{{name}}}" not in template]
    if missing:
        raise ValueError(f"reward.settings.template has no {{{missing[0]}}}: it must have {_listed(needed)}")
    values: Mapping[str, str] = {"prompt": sample.prompt, "answer": sample.answer, **texts}

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name in values:
            return values[name]
        kind, _, key = name.partition(".")
        if kind != "metadata":
            raise ValueError(f"reward.settings.template has {{{name}}}, which this reward doesn't fill in")
        if key not in sample.metadata:
            raise ValueError(f"reward.settings.template has {{{name}}}, but this prompt's metadata have no {key!r}")
        return str(sample.metadata[key])

    return _PLACE.sub(value, template)


def conversation(system: str, question: str) -> list[dict[str, str]]:
    """Return a question to the judge as chat messages: the system message, unless "", and the question."""
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": question}]


def _listed(names: tuple[str, ...]) -> str:
    return " and ".join(f"{{{name}}}" for name in names)


_MARK = r"\b(?:score|rating|grade|judge?ment|verdict|answer|result|winner)\s*(?:is\b)?\s*[:=]?\s*"
_NUMBER = r"[-+]?\d+(?:\.\d+)?(?![\w%])"
_WORD = r"(?:yes|no|true|false|correct|incorrect|right|wrong|1|0)(?!\w)"
_SIDE = r"(?:A|B|tie)(?!\w)"
_YES = frozenset({"yes", "true", "correct", "right", "1"})
_FORMATTING = re.compile(r"[*_`#\[\]\"]")
_MAX_OBJECTS = 64
"""Maximum number of opening braces, counted from the end of a judge's reply, at which a JSON object is searched for."""


def visible(text: str) -> str:
    """Return a text without its thinking, which ends with the last </think>."""
    return text.rpartition("</think>")[2]


def read_number(reply: str, minimum: float, maximum: float) -> float:
    """Return the score in a judge's reply: the number after the last word such as "Score:", or alone on the last line.

    Raises ValueError if there is none in the range from minimum to maximum.
    """
    return _in_range(float(_stated(reply, _NUMBER, "number", rest=r"\s*(?:/\s*\d+)?")), minimum, maximum)


def read_yes_no(reply: str) -> float:
    """Return 1 if a judge's reply says yes, 0 if it says no.

    Reads the word that follows the last "Judgement:" or the like; without one, the last line must be that word alone.
    Also accepts true and false, correct and incorrect, right and wrong, 1 and 0. Raises ValueError for other replies.
    """
    return float(_stated(reply, _WORD, "yes or no").lower() in _YES)


def read_side(reply: str) -> str:
    """Return the winner in a judge's reply: "A", "B" or "TIE".

    Reads the word that follows the last "Verdict:" or the like; without one, the last line must be that word alone.
    Raises ValueError for other replies.
    """
    return _stated(reply, _SIDE, "A, B or tie").upper()


def read_field(reply: str, field: str, minimum: float, maximum: float) -> float:
    """Return the score in a judge's reply: the number in `field` of the last JSON object that has this field.

    The value true stands for the maximum, false for the minimum. Raises ValueError if there is no such number.
    """
    text = visible(reply)
    decoder = json.JSONDecoder()
    for start in [match.start() for match in re.finditer(r"\{", text)][: -_MAX_OBJECTS - 1 : -1]:
        try:
            found, _ = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if field in found:
            value = found[field]
            if isinstance(value, bool):
                return maximum if value else minimum
            if isinstance(value, int | float):
                return _in_range(float(value), minimum, maximum)
            raise ValueError(f'"{field}" is {value!r}, which is neither a number nor true or false')
    raise ValueError(f'it has no JSON object with "{field}"')


def _stated(reply: str, pattern: str, what: str, rest: str = "") -> str:
    """Return the text that matches `pattern` after a reply's last word such as "Score:", or alone on its last line.

    Raises ValueError if nothing matches.
    """
    text = _FORMATTING.sub("", visible(reply)).strip()
    marked = re.findall(f"{_MARK}({pattern})", text, re.IGNORECASE)
    if marked:
        return str(marked[-1])
    last = text.rpartition("\n")[2].strip()
    alone = re.fullmatch(rf"({pattern}){rest}\s*[.!]?", last, re.IGNORECASE)
    if alone is None:
        raise ValueError(f'it states no {what}, neither after "Score:" or the like nor as its last line')
    return alone[1]


def _in_range(number: float, minimum: float, maximum: float) -> float:
    if not minimum <= number <= maximum:
        raise ValueError(f"it states {number:g}, which is not from {minimum:g} to {maximum:g}")
    return number


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
"""Question to the judge, and instruction how to reply, for each kind of reply (`reward.settings.reply`)."""


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
    system message before it; reply: "number", from minimum to maximum after "Score:" or a similar word; "yes_no"; or
    "json", an object with a number in `field`; votes: number of times to ask; vote: "mean" or "majority" of the votes;
    retries: maximum number of further requests for a vote that can't be parsed; thinking = true: the judge also sees
    the thinking. Part: agreement: share of the most frequent value among several votes.

    Raises:
        ValueError: a setting is wrong.
        JudgeError: the judge gave no usable reply.
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
    """Return a function that parses the judge's reply into a score from 0 to 1. Raises ValueError for bad settings."""
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
    """Return the most frequent value, or the mean of equally frequent values."""
    counts = Counter(values)
    most = max(counts.values())
    winners = [value for value, count in counts.items() if count == most]
    return sum(winners) / len(winners)
