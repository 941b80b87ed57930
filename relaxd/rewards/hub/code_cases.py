"""Extracts the code of a reply, and reads a prompt's tests in the formats of data sets."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from relaxd.media.messages import THINKING
from relaxd.rewards.interface import RewardInput, ground_truth

_MARKERS = re.compile(r"[ \t]*+(?:(?:[-*+]|[0-9]{1,9}[.)])[ \t]++|>[ \t]*+)*+")
"""Pattern of Markdown's list and quote marks at the beginning of a line."""
_TILDES = re.compile(r"(~{3,}+)(.*)")
_BACKTICKS = re.compile(r"(?<!`)(`{3,}+)([^`]*)\Z")
_PYTHON = re.compile(r"\{?\s*\.?(?:language-|lang-)?i?py(?:thon)?-?[0-9.]*(?![\w-])", re.IGNORECASE)
_LANGUAGE = re.compile(r"[\w{.]")
"""Pattern of the first character of a language's name after a code block's fence."""
_ROOM = 3
"""Maximum number of blanks by which a closing fence is indented more than its opening fence, as in CommonMark."""


@dataclass
class _Block:
    """A fenced code block of a reply; collects the block's lines during parsing."""

    fence: str
    """The block's opening fence, such as "```"."""
    info: str
    """Text after the opening fence, which names the language."""
    indent: int
    """Number of characters before the opening fence: indentation and list marks."""
    quotes: int
    """Number of quote marks before the opening fence; all lines of the block have them."""
    lines: list[str] = field(default_factory=list)
    closed: bool = False

    def unquoted(self, line: str) -> str:
        """Return a line of the block without the quote marks (">") that precede it."""
        return re.sub(rf"\A(?:[ \t]*+> ?){{1,{self.quotes}}}", "", line) if self.quotes else line

    def behind_fence(self, line: str) -> str | None:
        """Return the rest of a line after this block's closing fence; None if the line doesn't begin with one."""
        said = line.lstrip(" \t")
        if len(line) - len(said) > self.indent + _ROOM or not said.startswith(self.fence):
            return None
        return said.lstrip(self.fence[0]).strip()

    def ends_in(self, line: str) -> bool:
        """Return True if the closing fence is at the end of a line of code, instead of on a separate line."""
        said = line.strip()
        return said.endswith(self.fence) and said.strip(self.fence[0]) != "" and said.count(self.fence) % 2 == 1

    def code(self) -> str:
        """Return the block's code, without the fence's indentation."""
        text = "".join(self.lines)
        if not self.closed:
            text = text.partition(self.fence)[0]
        first = next((line for line in self.lines if line.strip()), "")
        indent = min(self.indent, len(first) - len(first.lstrip(" \t")))
        return re.sub(rf"^[ \t]{{1,{indent}}}", "", text, flags=re.MULTILINE) if indent else text


def code_in(reply: str) -> tuple[str, bool]:
    """Return a reply's code, and whether it is in a fenced block.

    The code is the last fenced block after the thinking that is marked as Python; without such blocks, the last without
    a language, or else the last of all. A block that was cut off ends with the reply. A reply without a block is all
    code. Thinking that was cut off doesn't count.

    Fences begin their lines, after list and quote marks, and are indented like their code. A fence of ``` may also
    follow text that ends in ":", "*" or a tag, or any text if only "python" comes after it. A block of ~~~ that isn't
    marked as Python must be closed.
    """
    ends = [tag.end() for tag in THINKING.finditer(reply) if tag[1]]
    said, blocks = _read(reply[ends[-1] :] if ends else reply)
    for chosen in ([one for one in blocks if _PYTHON.match(one.info)], [one for one in blocks if not one.info]):
        if chosen:
            return chosen[-1].code(), True
    return (blocks[-1].code(), True) if blocks else (said, False)


def _read(text: str) -> tuple[str, list[_Block]]:
    """Return the text before any unfinished thinking, and the fenced blocks in that text."""
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
            # A fence that names a language begins the next block: the closing fence is missing.
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
    """Return the indices of lines that begin with ~~~ and have a closing fence below."""
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
    """Return a new code block if a line opens one, else None. A fence of ~~~ must be `closable` or marked as Python."""
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


RIGHT = (
    'the reward code needs tests: {"inputs": [...], "outputs": [...]} as the answer, metadata.input_output or '
    "metadata.reward_model.ground_truth; metadata.test with metadata.entry_point; or metadata.test_list"
)


@dataclass(frozen=True)
class Script:
    """A test of a whole program: its standard input, and the output to expect."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class Call:
    """A test that calls a function: the function's name, its arguments and its expected result, as JSON values."""

    name: str
    arguments: Sequence[Any]
    returns: Any


@dataclass(frozen=True)
class Asserts:
    """Tests as Python code, which raises an exception if the answer is wrong."""

    setup: str
    """Code to run before the tests."""
    tests: tuple[str, ...]
    prefix: str = ""
    """Beginning of the program, from the prompt, that the answer continues."""
    entry_point: str = ""
    """Name of the tested function; "" if the data don't name it."""


Cases = tuple[Script, ...] | tuple[Call, ...] | Asserts


def cases_of(sample: RewardInput) -> Cases:
    """Return the tests of a sample's prompt. Raises ValueError if the prompt has no tests or an invalid one."""
    metadata = sample.metadata
    for where, given in (("metadata.input_output", metadata.get("input_output")), ("answer", ground_truth(sample))):
        pairs = _mapping(given)
        if pairs is not None and {"inputs", "outputs"} <= pairs.keys():
            return _pairs(where, pairs)
    if metadata.get("test") and metadata.get("entry_point"):
        entry_point = str(metadata["entry_point"])
        prefix, _ = code_in(str(metadata.get("prompt_text") or sample.prompt))
        return Asserts(
            str(metadata["test"]), (f"check({entry_point})",), prefix if entry_point in prefix else "", entry_point
        )
    if tests := metadata.get("test_list"):
        if not isinstance(tests, list) or not all(isinstance(one, str) for one in tests):
            raise ValueError(f"metadata.test_list is {tests!r:.80}: it must be a list of asserts, as text")
        imports = metadata.get("test_imports") or []
        setup = [*([imports] if isinstance(imports, str) else imports), str(metadata.get("test_setup_code") or "")]
        return Asserts("\n".join(setup), tuple(tests), entry_point=str(metadata.get("entry_point") or ""))
    raise ValueError(RIGHT)


def _pairs(where: str, pairs: Mapping[str, Any]) -> tuple[Script, ...] | tuple[Call, ...]:
    inputs, outputs, name = pairs["inputs"], pairs["outputs"], pairs.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not 0 < len(inputs) == len(outputs):
        raise ValueError(f"{where} has {_count(inputs)} inputs and {_count(outputs)} outputs: give a list of as many")
    if not name:
        return tuple(Script(_text(given), _text(wanted)) for given, wanted in zip(inputs, outputs, strict=True))
    return tuple(
        Call(str(name), _arguments(f"{where}.inputs[{number}]", given), _value(f"{where}.outputs[{number}]", wanted))
        for number, (given, wanted) in enumerate(zip(inputs, outputs, strict=True))
    )


def _arguments(where: str, given: Any) -> Sequence[Any]:
    """Return the arguments of a test's function call, from a list or from verl's format: a line of JSON per
    argument."""
    if isinstance(given, list):
        return given
    return [_value(where, line) for line in str(given).split("\n")]


def _value(where: str, given: Any) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except ValueError as error:
        raise ValueError(f"{where} is {given!r:.80}: with fn_name it must be JSON") from error


def _text(given: Any) -> str:
    return "\n".join(map(str, given)) if isinstance(given, list) else str(given)


def _mapping(given: Any) -> Mapping[str, Any] | None:
    if isinstance(given, str) and given.lstrip().startswith("{"):
        try:
            given = json.loads(given)
        except ValueError:
            return None
    return given if isinstance(given, Mapping) else None


def _count(given: Any) -> str:
    return str(len(given)) if isinstance(given, list) else "no list of"
