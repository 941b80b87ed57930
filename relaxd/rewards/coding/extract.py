"""The code in a reply."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from relaxd.rewards.tags import THINKING

_MARKERS = re.compile(r"[ \t]*+(?:(?:[-*+]|[0-9]{1,9}[.)])[ \t]++|>[ \t]*+)*+")
"""Marks of lists and quotes before the text of a line."""
_TILDES = re.compile(r"(~{3,}+)(.*)")
_BACKTICKS = re.compile(r"(?<!`)(`{3,}+)([^`]*)\Z")
_PYTHON = re.compile(r"\{?\s*\.?(?:language-|lang-)?i?py(?:thon)?-?[0-9.]*(?![\w-])", re.IGNORECASE)
_LANGUAGE = re.compile(r"[\w{.]")
"""Beginning of a language's name, behind a fence."""
_ROOM = 3
"""Blanks that the closing fence may have before it more than the opening one, as in CommonMark."""


@dataclass
class _Block:
    """A fenced block while its lines are read."""

    fence: str
    """Opening fence, such as "```"."""
    info: str
    """Text behind the opening fence, which names the language."""
    indent: int
    """Letters before the opening fence: those of the lists that it is in."""
    quotes: int
    """Marks of quotes before the opening fence, which all its lines have."""
    lines: list[str] = field(default_factory=list)
    closed: bool = False

    def unquoted(self, line: str) -> str:
        """Return a line without the marks of the quotes that the block is in."""
        return re.sub(rf"\A(?:[ \t]*+> ?){{1,{self.quotes}}}", "", line) if self.quotes else line

    def behind_fence(self, line: str) -> str | None:
        """Return the rest of a line after the fence that ends this block; None if the line doesn't begin with one."""
        said = line.lstrip(" \t")
        if len(line) - len(said) > self.indent + _ROOM or not said.startswith(self.fence):
            return None
        return said.lstrip(self.fence[0]).strip()

    def ends_in(self, line: str) -> bool:
        """Return whether the closing fence is at the end of a line of code instead of on the next line."""
        said = line.strip()
        return said.endswith(self.fence) and said.strip(self.fence[0]) != "" and said.count(self.fence) % 2 == 1

    def code(self) -> str:
        """Return the code, without the indentation of the fence."""
        text = "".join(self.lines)
        if not self.closed:
            text = text.partition(self.fence)[0]
        first = next((line for line in self.lines if line.strip()), "")
        indent = min(self.indent, len(first) - len(first.lstrip(" \t")))
        return re.sub(rf"^[ \t]{{1,{indent}}}", "", text, flags=re.MULTILINE) if indent else text


def code_in(reply: str) -> tuple[str, bool]:
    """Return a reply's code, and whether it is in a fenced block.

    It is the last fenced block after the thinking: of those that say that they are Python, else of those that don't say
    what they are, else of all. A block that was cut off ends with the reply. A reply without a block is all code. Of a
    thinking that was cut off nothing counts.

    Fences begin their lines, but for marks of lists and quotes, and have the indentation of their code. One of ``` may
    also follow text that ends in ":", "*" or a tag, or be followed by "python" alone; one of ~~~ that doesn't say that
    it is Python must be closed.
    """
    ends = [tag.end() for tag in THINKING.finditer(reply) if tag[1]]
    said, blocks = _read(reply[ends[-1] :] if ends else reply)
    for chosen in ([one for one in blocks if _PYTHON.match(one.info)], [one for one in blocks if not one.info]):
        if chosen:
            return chosen[-1].code(), True
    return (blocks[-1].code(), True) if blocks else (said, False)


def _read(text: str) -> tuple[str, list[_Block]]:
    """Return a text up to a thinking that doesn't end, and its fenced blocks."""
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    closable = _closable(lines)
    blocks: list[_Block] = []
    block: _Block | None = None
    for number, line in enumerate(lines):
        if block is not None:
            inside = block.unquoted(line)
            behind = block.behind_fence(inside)
            if behind is None and not block.ends_in(inside):
                block.lines.append(inside)
                continue
            if behind is None:
                block.lines.append(inside.rstrip().removesuffix(block.fence))
            # A fence that names a language begins the next block: the closing one is missing.
            opens = _LANGUAGE.match(behind or "") is not None
            block.closed = not opens
            block = _opened(line, False) if opens else None
        elif thinking := THINKING.search(line):
            return "".join(lines[:number]) + line[: thinking.start()], blocks
        else:
            block = _opened(line, number in closable)
        if block is not None:
            blocks.append(block)
    return text, blocks


def _closable(lines: Sequence[str]) -> set[int]:
    """Return the numbers of lines that begin with ~~~ and have a closing fence of as many below."""
    longest, found = 0, set()
    for number in reversed(range(len(lines))):
        said = lines[number].strip(" \t\r\n>")
        tildes = len(said) - len(said.lstrip("~"))
        if 3 <= tildes <= longest:
            found.add(number)
        if tildes == len(said):
            longest = max(longest, tildes)
    return found


def _opened(line: str, closable: bool) -> _Block | None:
    """Return the block that a line opens. A fence of ~~~ must be `closable`, or say that it is Python."""
    marks = _MARKERS.match(line)
    assert marks is not None  # it also matches nothing
    said = line[marks.end() :].rstrip()
    if fence := _TILDES.match(said):
        if not closable and not _PYTHON.match(fence[2].strip()):
            return None
    elif fence := _BACKTICKS.search(said):
        before = said[: fence.start()].rstrip()
        if before and before[-1] not in ":*>" and not _PYTHON.fullmatch(fence[2].strip()):
            return None
    else:
        return None
    return _Block(fence[1], fence[2].strip(), len(re.sub("> ?", "", marks[0])), marks[0].count(">"))
