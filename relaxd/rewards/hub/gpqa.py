"""GPQA's reward: the letter of a choice, anywhere in the reply (Rein et al. 2023, arXiv 2311.12022)."""

import re
import string
from collections.abc import Sequence

from relaxd.media.messages import without_thinking
from relaxd.rewards.interface import RewardInput

# Possessive quantifiers (*+) never backtrack: a reply of blanks takes time linear in its length.
_LETTER = r"[\s*_(\[{\"'$]*+(?:\\(?:boxed|text|mathrm)\{\s*+)*+[(]?+([A-Z])(?![^\W_])"
_STATED = (
    re.compile(rf"(?i:\b(?:answer|option|choice)\b)\s*(?i:is\s*+:?+|:|=)(?:\s*+(?i:option|choice)\b)?+{_LETTER}"),
    re.compile(r"(?<![^\W_])([A-Z])[)\].*_]{0,4}\s+(?i:is\s+(?:the\s+)?correct)\b"),
    re.compile(rf"(?i:\bfinal\s+answer\b)[^\nA-Za-z]{{0,20}}{_LETTER}"),
    re.compile(r"\\boxed\{\s*(?:\\(?:text|mathrm)\{)?\(?([A-Z])\b"),
)
_FREE = re.compile(r"(?<![^\W_])(?<!['\u2019])([A-Z])(?![^\W_]|['\u2019])")


def gpqa(sample: RewardInput) -> dict[str, float]:
    """1 if the reply chooses the right letter, else 0.

    The reply's letter, after its thinking, is the X of the last "answer is X" (or option, choice); or else of "X is
    correct", of "final answer ... X", of a box, or the last capital letter that stands alone. Valid letters are
    metadata.valid_letters, or one for each of metadata.choices, or A to H. The right letter is metadata.correct_letter;
    or else the answer is a letter, an index into the choices from 0, or the text of a choice. Parts: accuracy (equal to
    the reward), and format: 1 if a letter was found. Without choices, an answer that is no letter is searched for in
    the reply as text.

    Raises:
        ValueError: there is neither an answer nor metadata.correct_letter, or the answer is none of the choices.
    """
    response = without_thinking(sample.response)
    choices = sample.metadata.get("choices")
    texts = [str(choice) for choice in choices] if isinstance(choices, list | tuple) else []
    valid = _valid_letters(sample.metadata.get("valid_letters"), len(texts))
    right = _right_letter(sample, texts, valid)
    if right is None:
        gold = _words(sample.answer)
        if not gold:
            raise ValueError(f"answer is {sample.answer!r}: the reward gpqa needs a letter, an index or a text")
        accuracy = float(f" {gold} " in f" {_words(response)} ")
        return {"reward": accuracy, "accuracy": accuracy, "format": float(bool(response.strip()))}
    chosen = _chosen(response, valid)
    accuracy = float(chosen == right)
    return {"reward": accuracy, "accuracy": accuracy, "format": float(chosen is not None)}


def _valid_letters(given: object, choices: int) -> str:
    if isinstance(given, str | list | tuple) and given:
        return "".join(str(letter) for letter in given).upper()
    return string.ascii_uppercase[: choices or 8]


def _right_letter(sample: RewardInput, choices: Sequence[str], valid: str) -> str | None:
    """Return the letter of the right choice; None if the prompt has no choices, only an answer text to search for."""
    named = str(sample.metadata.get("correct_letter") or "").strip().upper()
    answer = sample.answer.strip()
    bare = answer.strip("()[]{}.: ").upper()
    if named or (len(bare) == 1 and bare.isalpha()):
        letter = named or bare
        if letter not in valid or len(letter) != 1:
            raise ValueError(f"the right letter is {letter!r}, but the letters to choose from are {valid}")
        return letter
    if not choices:
        return None
    if bare.isdecimal() and answer not in choices:
        index = int(bare) if len(bare) < 4 else len(valid)
        if index < len(valid):
            return valid[index]
        raise ValueError(f"answer is {answer!r}: an index must be from 0 to {len(valid) - 1}")
    same = [place for place, choice in enumerate(choices) if answer and _words(choice) == _words(answer)]
    if same and same[0] < len(valid):
        return valid[same[0]]
    raise ValueError(f"answer is {answer!r}, which is none of metadata.choices: {list(choices)!r:.200}")


def _chosen(response: str, valid: str) -> str | None:
    for pattern in (*_STATED, _FREE):
        found = [letter for letter in pattern.findall(response) if letter in valid]
        if found:
            return str(found[-1])
    return None


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))
