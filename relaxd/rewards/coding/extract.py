"""The code in a reply."""

import re

_BLOCK = re.compile(r"(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[^\n`]*)\n(?P<code>.*?)(?:(?P=fence)|\Z)", re.DOTALL)
_PYTHON = ("python", "python3", "py")


def code_in(reply: str) -> tuple[str, bool]:
    """Return a reply's code, and whether it is in a fenced block.

    It is the last fenced block after the thinking: of those that say that they are Python, else of those that don't say
    what they are, else of all. Fences are of ``` or ~~~; one within a list is indented, and so is its code. A block
    that was cut off ends with the reply. A reply without a block is all code.
    """
    said = reply.rpartition("</think>")[2]
    blocks = [(match["language"].strip().lower().split(" ")[0], _dedented(match)) for match in _BLOCK.finditer(said)]
    for chosen in (_PYTHON, ("",)):
        if found := [text for language, text in blocks if language in chosen]:
            return found[-1], True
    return (blocks[-1][1], True) if blocks else (said, False)


def _dedented(block: re.Match[str]) -> str:
    """Return the code of a block without the indentation of its fence."""
    before = block.string[block.string.rfind("\n", 0, block.start()) + 1 : block.start()]
    indent = len(before) if before.isspace() else 0
    lines = block["code"].split("\n")
    return "\n".join(line[min(indent, len(line) - len(line.lstrip())) :] for line in lines)
