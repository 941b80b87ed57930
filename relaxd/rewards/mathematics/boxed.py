"""Boxes: the content of \\boxed{...} and \\fbox{...}."""

import re

_BOX = re.compile(r"\\(?:boxed|fbox)")
# Every alternative begins with a letter of its own, so that re skips other letters ten times as fast.
_TOKEN = re.compile(r"\\(?:(?:boxed|fbox)(?:\s*\{| +(?P<bare>[^\s{}$]+))|(?<!\\\\)[{}])|\{|\}")


def last_boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{...} or \\fbox{...}, or None if there is none.

    Last is the one that begins last: of "\\boxed{\\boxed{5}}" the content is "5". Its braces must be balanced, except
    for escaped ones; a box that isn't closed, as in an answer that was cut off, is none. "\\boxed 5" counts, too. Takes
    time linear in the text.
    """
    first = _BOX.search(text)
    if first is None:
        return None
    opened: list[tuple[int, bool]] = []  # places behind open braces, and whether each is a box's
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
