"""The commands to Redis in what a client sends: to strike at one of them."""

from functools import cache
from typing import NamedTuple

from relaxd.board.scripts import script_hash, script_names, script_text

WORDS = 2
"""So many words of a command make its name."""


class Command(NamedTuple):
    """One command."""

    name: str
    """Of a script of the board, its name; else the command and its first argument, such as "SET columns:a:0".

    A script in a transaction is done by its EXEC, which then has the script's name.
    """
    data: bytes
    """As it was sent."""


class CommandStream:
    """Cuts what one connection sends into commands."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._at = 0
        self._words: list[bytes] = []
        self._left = 0
        """Words of the command that are still to come."""
        self._queued = ""
        """The first script of the transaction."""

    def feed(self, data: bytes) -> list[Command]:
        """Return the commands that are complete with this data. Raises ValueError: that isn't RESP."""
        self._held += data
        found = []
        while (end := self._held.find(b"\r\n", self._at)) >= 0:
            number = int(self._held[self._at + 1 : end])
            if not self._left:
                self._left, self._at = number, end + 2
                continue
            after = end + 2 + number + 2
            if len(self._held) < after:
                break
            if len(self._words) < WORDS:
                self._words.append(bytes(self._held[end + 2 : after - 2]))
            self._left -= 1
            self._at = after
            if not self._left:
                found.append(Command(self._name_of(self._words), bytes(self._held[:after])))
                del self._held[:after]
                self._at, self._words = 0, []
        return found

    def _name_of(self, words: list[bytes]) -> str:
        """Return the name of the next command, which begins with these words."""
        first, *rest = (word.decode(errors="replace") for word in words)
        first = first.upper()
        if first == "EVALSHA":
            return _scripts().get(rest[0], first)
        if first == "EVAL":
            self._queued = self._queued or _scripts().get(rest[0], "")
        elif first == "EXEC" and self._queued:
            script, self._queued = self._queued, ""
            return script
        return " ".join([first, *rest])


@cache
def _scripts() -> dict[str, str]:
    """Return the names of the board's scripts, by their hashes and by their texts, which transactions have."""
    return {key: name for name in script_names() for key in (script_hash(name), script_text(name))}
