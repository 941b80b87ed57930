"""Finds the content of the last \\boxed{...} or \\fbox{...}."""

import re

_BOX = re.compile(r"\\(?:boxed|fbox)")
_TAIL = 1000
"""Number of last characters in which `rfind` searches for a box first: most boxes are there, and `re` is slower."""
_SPACES = 40
_OTHERS = (r"\fbox", r"\{", r"\}")
_BEHIND = ("\n", "\t", "{", "}", "$")
"""Characters after which a new box always begins, because the content of a box without braces contains none of them."""
# Every alternative begins with another literal character, so that re skips other text ten times as fast.
_TOKEN = re.compile(r"\\(?:(?:boxed|fbox)(?:\s*\{| +(?P<bare>[^\s{}$]+))|(?<!\\\\)[{}])|\{|\}")


def last_boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{...} or \\fbox{...}, or None if there is none.

    The last box is the box that begins last: for "\\boxed{\\boxed{5}}" the content is "5". Its braces must be balanced,
    except escaped braces; an unclosed box, as in an answer that was cut off, doesn't count. "\\boxed 5" counts, too.
    Takes time linear in the text.
    """
    found = _boxed_at_end(text)
    if found is not None:
        return found
    first = _BOX.search(text)
    if first is None:
        return None
    opened: list[tuple[int, bool]] = []  # indices after open braces, and whether each belongs to a box
    last = (-1, "")
    for token in _TOKEN.finditer(text, first.start()):  # braces before it close no box
        word = token.group()
        if token["bare"] is not None:
            last = max(last, (token.end(), token["bare"]))
        elif word == "}":
            start, is_box = opened.pop() if opened else (-1, False)
            if is_box and start > last[0]:
                last = start, text[start : token.start()]
        elif word.endswith("{") and word != r"\{":
            opened.append((token.end(), word != "{"))
    return last[1].strip() if last[0] >= 0 else None


def _boxed_at_end(text: str) -> str | None:
    """Fast path: return the content of a \\boxed{...} near the end if it surely is the last box, or else None."""
    start = text.rfind(r"\boxed", max(0, len(text) - _TAIL))
    if start < 0 or not text.startswith("{", start + 6):
        return None
    before = text[max(0, start - _SPACES) : start]
    said = before.rstrip(" ")
    # It may be in another box's content without braces: that of "\\boxed \\boxed{5}" is "\\boxed".
    if not said:
        inside = start > _SPACES
    else:
        inside = said.endswith(("boxed", "fbox")) if said != before else not said.endswith(_BEHIND)
    if inside:
        return None
    if any(text.find(other, start) >= 0 for other in _OTHERS):
        return None
    depth, place = 0, start
    while (end := text.find("}", place)) >= 0:
        depth += text.count("{", place, end) - 1
        if not depth:
            return text[start + 7 : end].strip()
        place = end + 1
    return None
