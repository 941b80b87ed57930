"""Find the text in tags of a reply, such as <answer>...</answer>."""

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
