"""Rewards of verifiable instructions, checked by if-verifiable.

IFEval: Zhou et al. 2023, arXiv 2311.07911. IFBench: Pyatkin et al. 2025, arXiv 2507.02833. Four checkers of
if-verifiable 0.1.2 differ from IFBench (github.com/allenai/IFBench). They are replaced here by checkers that behave
like IFBench's in its tests.
"""

import csv
import string
from collections.abc import Mapping
from functools import cache
from typing import Any

from relaxd.rewards.interface import RewardInput, TooSlow, time_limit

CHECK_SECONDS = 3.0
"""Maximum seconds to check one reply; a slower check counts as failed."""
_BY_REPLY = (IndexError, csv.Error, RecursionError)
"""Errors that checkers raise for odd replies, such as digits only. Such a reply follows no instruction. nltk's
LookupError, for data that isn't installed, isn't among them."""


def ifeval(sample: RewardInput) -> dict[str, float]:
    """1 if the reply follows all of its prompt's instructions, to the letter, else 0.

    Metadata: instruction_id_list, and kwargs: an object for each instruction, whose null values are left out. Parts:
    accuracy (equal to the reward), followed: share of instructions followed, and loose: 1 if all hold for the reply
    without its first or last line, or without asterisks. Needs the package if-verifiable. Counts of sentences and of
    words in capitals also need nltk's data (nltk.download("punkt"), "punkt_tab").

    Raises:
        ValueError: the metadata lack instructions, or have an instruction that IFEval doesn't know.
    """
    from if_verifiable.ifeval import INSTRUCTION_DICT
    from langdetect import DetectorFactory, detector_factory

    DetectorFactory.seed = 0  # by default a short reply is English in one call and not in the next
    detector_factory.init_factory()  # once in a process, for longer than a check: not within its time
    return _followed(sample, "ifeval", INSTRUCTION_DICT)


def ifbench(sample: RewardInput) -> dict[str, float]:
    """1 if the reply follows all of its prompt's instructions of IFBench, to the letter, else 0.

    Metadata, parts and package as `ifeval`; nltk's data are also "stopwords" and "averaged_perceptron_tagger_eng".

    Raises:
        ValueError: the metadata lack instructions, or have an instruction that IFBench doesn't know.
        LookupError: an instruction needs data of nltk that isn't installed.
    """
    return _followed(sample, "ifbench", ifbench_checkers())


def _followed(sample: RewardInput, name: str, known: Mapping[str, Any]) -> dict[str, float]:
    from if_verifiable.common import evaluate_instructions

    names, arguments = _instructions(sample.metadata, name, known)
    prompt = str(sample.metadata.get("prompt_text") or sample.prompt)
    try:
        with time_limit(CHECK_SECONDS):
            _, scores = evaluate_instructions(sample.response, names, arguments, prompt, known)
    except (TooSlow, *_BY_REPLY):
        return {"reward": 0.0, "accuracy": 0.0, "followed": 0.0, "loose": 0.0}
    return {
        "reward": scores.binary_strict,
        "accuracy": scores.binary_strict,
        "followed": scores.partial_strict,
        "loose": scores.binary_loose,
    }


def _instructions(
    metadata: Mapping[str, Any], reward: str, known: Mapping[str, Any]
) -> tuple[list[str], list[dict[str, Any]]]:
    names = metadata.get("instruction_id_list")
    if not isinstance(names, list) or not names:
        raise ValueError(f"metadata.instruction_id_list is {names!r}: the reward {reward} needs a list of instructions")
    if unknown := [name for name in names if name not in known]:
        named = ", ".join(map(repr, unknown))
        raise ValueError(f"metadata.instruction_id_list has {named}, which {reward} doesn't know")
    arguments = metadata.get("kwargs") or [{}] * len(names)
    if not isinstance(arguments, list) or len(arguments) != len(names):
        raise ValueError(f"metadata.kwargs must be a list of {len(names)} objects, one for each instruction")
    return names, [{name: value for name, value in (one or {}).items() if value is not None} for one in arguments]


@cache
def ifbench_checkers() -> dict[str, Any]:
    """Return IFBench's checkers by instruction id: if-verifiable's, of which four are replaced by corrected ones."""
    from if_verifiable.ifbench import INSTRUCTION_DICT

    checks = {
        "words:words_position": _words_position,
        "words:keywords_specific_position": _keyword_position,
        "format:title_case": _title_case,
        "format:quote_unquote": _quotes_are_explained,
    }
    changed = {
        name: type(INSTRUCTION_DICT[name].__name__, (INSTRUCTION_DICT[name],), {"check_following": check})
        for name, check in checks.items()
    }
    return {**INSTRUCTION_DICT, **changed}


def _words_position(self: Any, value: str) -> bool:
    """Return True if the reply's second word and its last but one are the keyword, ignoring case.

    A final punctuation mark is no word.
    """
    words = [word.lower() for word in _tokens(value)]
    last = -3 if words and words[-1] in string.punctuation else -2
    return len(words) >= -last and words[1] == words[last] == self._keyword.lower()


def _keyword_position(self: Any, value: str) -> bool:
    """Return True if word m of the reply's sentence n is the keyword, ignoring case. Punctuation marks are no words."""
    from if_verifiable.ifbench import instructions_util

    sentences = instructions_util.split_into_sentences(value)
    if len(sentences) < self._n:
        return False
    words = [token.lower() for token in _tokens(sentences[self._n - 1]) if any(map(str.isalnum, token))]
    return len(words) >= self._m and words[self._m - 1] == self._keyword.lower()


def _title_case(self: Any, value: str) -> bool:
    """Return True if no word of the reply begins with a small letter. Words like "iPhone" and numbers are ignored."""
    words = (word for word in _tokens(value) if word[0].isalpha())
    return not any(word[0].islower() and (word[1:].islower() or word[1:].isupper() or not word[1:]) for word in words)


def _quotes_are_explained(self: Any, value: str) -> bool:
    """Return True if the reply doesn't end with a quotation, and no quotation directly follows another."""
    text = "".join(value.translate({0x201C: '"', 0x201D: '"'}).replace("'\"'", "").split())
    rest = text.strip(string.digits + string.punctuation.replace('"', ""))
    return '""' not in text and not rest.endswith('"')


def _tokens(text: str) -> list[str]:
    from nltk import word_tokenize

    return list(word_tokenize(text))
