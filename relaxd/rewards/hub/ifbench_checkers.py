"""Checkers of IFBench's instructions that if-verifiable 0.1.2 has otherwise than IFBench itself.

They behave as IFBench's own (github.com/allenai/IFBench, by its tests), and are written anew.
"""

import string
from functools import cache
from typing import Any


@cache
def ifbench_checkers() -> dict[str, Any]:
    """Return if-verifiable's checkers by instruction, four of them corrected."""
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
    """Return True if the second word and the last but one are the keyword, in any case. A final sign is no word."""
    words = [word.lower() for word in _tokens(value)]
    last = -3 if words and words[-1] in string.punctuation else -2
    return len(words) >= -last and words[1] == words[last] == self._keyword.lower()


def _keyword_position(self: Any, value: str) -> bool:
    """Return True if word m of sentence n is the keyword, in any case. Signs are no words."""
    from if_verifiable.ifbench import instructions_util

    sentences = instructions_util.split_into_sentences(value)
    if len(sentences) < self._n:
        return False
    words = [token.lower() for token in _tokens(sentences[self._n - 1]) if any(map(str.isalnum, token))]
    return len(words) >= self._m and words[self._m - 1] == self._keyword.lower()


def _title_case(self: Any, value: str) -> bool:
    """Return True if no word begins with a small letter. Signs, numbers and words like "iPhone" are ignored."""
    words = (word for word in _tokens(value) if word[0].isalpha())
    return not any(word[0].islower() and (word[1:].islower() or word[1:].isupper() or not word[1:]) for word in words)


def _quotes_are_explained(self: Any, value: str) -> bool:
    """Return True if no quotation directly follows another one or ends the reply."""
    text = "".join(value.translate({0x201C: '"', 0x201D: '"'}).replace("'\"'", "").split())
    rest = text.strip(string.digits + string.punctuation.replace('"', ""))
    return '""' not in text and not rest.endswith('"')


def _tokens(text: str) -> list[str]:
    from nltk import word_tokenize

    return list(word_tokenize(text))
