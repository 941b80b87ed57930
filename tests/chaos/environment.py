"""An environment that a fault makes hang, raise, leak, write too much or fork."""

import os
import time
import zlib
from pathlib import Path
from typing import ClassVar

from relaxd.envs.environment import Reply

SECONDS = 0.05
FORK_SECONDS = 600.0
LEAKED_BYTES = 64 << 20
"""Size of what leaks, in bytes, up to the stack's agent.memory_bytes."""
MOODS = {
    "hangs": "took longer than",
    "raises": "no mood",
    "leaks": "agent.memory_bytes = ",
    "answers invalid UTF-8": "isn't valid UTF-8",
    "writes 100 MB": "100000000 bytes",
}
"""Words in the details of groups that are dropped for each mood."""
BUSY = "host did not answer"
"""The same of a host that is busy with such texts, or was frozen."""
FORKS = "forks"
"""Mood in which each step leaves a process. Their ids are in a file beside that of the mood, with this suffix."""


class Moody:
    """Ends a conversation after three turns, unless its mood is bad."""

    leaked: ClassVar[list[bytearray]] = []

    def __init__(self, mood: str) -> None:
        self._mood = Path(mood)
        self._turn = 0

    def step(self, reply: Reply) -> tuple[str, float, bool]:
        """Answer, or do what the mood says."""
        self._turn += 1
        time.sleep(SECONDS)
        match self._mood.read_text() if self._mood.exists() else "":
            case "hangs":
                time.sleep(3600)
            case "raises":
                raise OSError("no mood")
            case "leaks":
                self._leak()
            case "answers invalid UTF-8":
                return b"\xff".decode(errors="surrogateescape"), 0.0, False
            case "writes 100 MB":
                return "x" * 100_000_000, 0.0, False
            case "forks":
                self._fork()
        return f"turn {self._turn}", zlib.crc32(reply.text.encode()) / 2**32, self._turn == 3

    def _leak(self) -> None:
        while True:
            Moody.leaked.append(bytearray(LEAKED_BYTES))

    def _fork(self) -> None:
        if not (child := os.fork()):
            time.sleep(FORK_SECONDS)
            os._exit(0)
        with self._mood.with_suffix(f".{FORKS}").open("a") as file:
            file.write(f"{child}\n")
