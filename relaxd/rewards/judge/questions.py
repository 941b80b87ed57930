"""Templates of questions to a judge."""

import re
from collections.abc import Mapping

from relaxd.rewards.base import RewardInput

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
