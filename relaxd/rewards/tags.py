"""The text in tags of a reply, such as <answer>...</answer>, and outside of its thinking."""

import re
from functools import lru_cache


def tagged(text: str, tag: str = "answer") -> list[str]:
    """Return the contents of a tag, whose case doesn't matter. Takes time linear in the text, whatever it is."""
    opening, closing = _patterns(tag)
    found, start = [], opening.search(text)
    while start is not None:
        end = closing.search(text, start.end())
        if end is None:
            break
        found.append(text[start.end() : end.start()])
        start = opening.search(text, end.end())
    return found


@lru_cache
def _patterns(tag: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    return re.compile(f"<{tag}>", re.IGNORECASE), re.compile(f"</{tag}>", re.IGNORECASE)


THINKING = re.compile(r"<(/?)think(?:ing)?\s{0,9}>", re.IGNORECASE)
"""A tag at the beginning or, with group 1, at the end of thinking."""


def without_thinking(response: str) -> str:
    """Remove the thinking from a response, also one that was cut off, or whose first tag is in the prompt."""
    said: list[str] = []
    place, thinks = 0, False
    for tag in THINKING.finditer(response):
        if tag[1]:
            if not thinks:
                said.clear()
            place, thinks = tag.end(), False
        elif not thinks:
            said.append(response[place : tag.start()])
            thinks = True
    return "".join(said) + ("" if thinks else response[place:])
