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


def without_thinking(response: str) -> str:
    """Remove the thinking from a response. Nothing is left of one that was cut off while thinking."""
    said, start = "", 0
    while (opened := response.find("<think>", start)) >= 0 and (closed := response.find("</think>", opened)) >= 0:
        said += response[start:opened]
        start = closed + len("</think>")
    return (said + response[start:]).rpartition("</think>")[2].partition("<think>")[0]
