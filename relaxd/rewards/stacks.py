"""The stack of a slow reward, extracted from all threads' stacks written by faulthandler."""

import asyncio
import re
from pathlib import Path

from relaxd.rewards.calling import MACHINERY, shown_file

DUMP = re.compile(r"Timeout \(\d+:\d\d:\d\d(\.\d+)?\)!")
THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+.* \(most recent call first\):")
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
OTHER = ("", "  ...", "  <no Python frame>")
"""Further lines of a dump. Dots stand for frames beyond the first hundred."""


class RewardStacks:
    """Filters a worker's output: of a stack dump it passes only the reward's own frames, and remembers their place."""

    def __init__(self) -> None:
        self.place = ""
        """Place of the reward in the newest dump: "reward.py:12, in score"; "" if it was in no stack, such as an async
        reward that awaits something. It is the innermost line in the file of the reward, as in `describe_error`."""
        self._in_dump = False
        self._own: list[tuple[str, str, str]] | None = None
        """This thread's frames so far, innermost first; None once its stack has been passed or dropped."""

    def forget(self) -> None:
        """Forget the place, because another call begins."""
        self.place = ""

    def filter(self, line: str) -> list[str]:
        """Return the lines to pass in place of one line of output."""
        if DUMP.fullmatch(line):
            self._in_dump, self._own = True, None
            return []
        if not self._in_dump:
            return [line]
        if THREAD.fullmatch(line):
            self._own = []
        elif frame := FRAME.fullmatch(line):
            return self._add(frame[1], frame[2], frame[3])
        elif line == "  ..." and self._own:  # a recursion of the reward's: no thread of relaxd has that many frames
            return self._pass()
        elif line not in OTHER:
            self._in_dump = False
            return [line]
        return []

    def _add(self, file: str, number: str, function: str) -> list[str]:
        if self._own is None:
            return []
        if str(Path(file).parent) != MACHINERY:
            self._own.append((file, number, function))
            return []
        if not self._own or self._own[-1][0] == asyncio.runners.__file__:
            self._own = None
            return []
        return self._pass()

    def _pass(self) -> list[str]:
        own, self._own = self._own or [], None
        file, number, function = next(frame for frame in own if frame[0] == own[-1][0])
        self.place = f"{shown_file(file)}:{number}, in {function}"
        stack = [f'  File "{file}", line {number} in {function}' for file, number, function in own]
        return ["the reward takes long; it is here (most recent call first):", *stack]
