"""The code in a reply."""

import re

_BLOCK = re.compile(r"```([^\n`]*)\n(.*?)(?:```|\Z)", re.DOTALL)
_PYTHON = ("python", "python3", "py", "")


def code_in(reply: str) -> tuple[str, bool]:
    """Return a reply's code, and whether it is in a fenced block.

    It is the last fenced block after the thinking, of those that are Python or don't say what they are if there is one;
    a block that was cut off ends with the reply. A reply without a block is all code.
    """
    said = reply.rpartition("</think>")[2]
    blocks = [(match[1].strip().lower(), match[2]) for match in _BLOCK.finditer(said)]
    python = [text for language, text in blocks if language in _PYTHON]
    if python:
        return python[-1], True
    return (blocks[-1][1], True) if blocks else (said, False)
