"""Templates of questions to a judge, and the reading of its replies. A reply that is not understood is an error, never
a guess.
"""

import json
import re
from collections.abc import Mapping

from relaxd.rewards.interface import RewardInput

_PLACE = re.compile(r"\{(prompt|response|answer|first|second|metadata\.[\w-]+)\}")

TASK = "You are a strict and fair judge of answers. "
GIVEN = "\n\n<question>\n{prompt}\n</question>\n"
REFERENCE = "\n<reference_answer>\n{answer}\n</reference_answer>\n"
ANSWER = "\n<answer>\n{response}\n</answer>\n"
"""Parts of the default templates. {answer} is the reference, as in rewards."""


def fill(template: str, sample: RewardInput, needed: tuple[str, ...], **texts: str) -> str:
    """Fill a template in: {prompt}, {answer}, {metadata.KEY} and the texts; any other brace stays as it is.

    What is filled in isn't looked at for places. Raises ValueError when a place of `needed` is missing, or the metadata
    lack a key.
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
    """Return the messages of a question, with the system message, if any."""
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
"""Maximum number of braces, from the reply's end, at which to look for a JSON object."""


def visible(text: str) -> str:
    """Return a text without its thinking, which ends with the last </think>."""
    return text.rpartition("</think>")[2]


def read_number(reply: str, minimum: float, maximum: float) -> float:
    """Return the number after the last mark such as "Score:", or on the last line alone. Raises ValueError."""
    return _in_range(float(_stated(reply, _NUMBER, "number", rest=r"\s*(?:/\s*\d+)?")), minimum, maximum)


def read_yes_no(reply: str) -> float:
    """Return 1 for yes and 0 for no, after the last mark such as "Judgement:", or as the last line.

    Also takes true and false, correct and incorrect, right and wrong, 1 and 0. Raises ValueError.
    """
    return float(_stated(reply, _WORD, "yes or no").lower() in _YES)


def read_side(reply: str) -> str:
    """Return "A", "B" or "TIE", after the last mark such as "Verdict:", or on the last line alone. Raises
    ValueError."""
    return _stated(reply, _SIDE, "A, B or tie").upper()


def read_field(reply: str, field: str, minimum: float, maximum: float) -> float:
    """Return the number in a field of the last JSON object that has it; true is the maximum, false the minimum.

    Raises ValueError.
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
    """Return the match of a pattern after the last mark, or on the last line alone. Raises ValueError."""
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
