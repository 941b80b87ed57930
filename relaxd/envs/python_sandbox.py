"""A Python interpreter in which the model may run code before it answers."""

import os
import threading
from functools import lru_cache

from relaxd.envs.calculator import same_last_number
from relaxd.envs.environment import BadEnvironmentError, Reply, Sample, shorten
from relaxd.envs.function_tools import FunctionTool, ToolsEnvironment
from relaxd.sandbox.limits import ConfinementError, Limits
from relaxd.sandbox.processes import Sandbox, Stopped

OUTPUT_BYTES = 1 << 20
"""Maximum number of bytes that a program may print before it is stopped."""


class PythonSandbox(ToolsEnvironment):
    """Answers calls of the tool `run_python`; the first message without a call is the answer.

    Each call runs in a new confined process, and nothing is kept between calls. The reward is 1 if the last numbers of
    the model's and the reference answer are equal, else 0. Numbers: `calls`, and `errors` (calls that can't be parsed).
    """

    def __init__(
        self, seconds: float = 3.0, memory_mb: int = 512, max_chars: int = 8192, confine_files: bool = True
    ) -> None:
        """Check the settings, and that this machine can confine code.

        Args:
            seconds: maximum processor seconds per call.
            memory_mb: maximum address space of a program, in MiB.
            max_chars: maximum length of a call's result, in characters; longer results lose their middle.
            confine_files: hide all files except Python's own. False is for kernels without Landlock.

        Raises ValueError: a setting is wrong; ConfinementError: this machine can't confine code.
        """
        super().__init__([FunctionTool(self.run_python)])
        for name, value in (("seconds", seconds), ("memory_mb", memory_mb), ("max_chars", max_chars)):
            if not value > 0:
                raise ValueError(f"{name} is {value}: it must be above 0")
        self._pool = _pool(Limits(seconds, memory_mb << 20, OUTPUT_BYTES, confine_files))
        self._max_chars = max_chars
        self._answer = ""

    def open(self, sample: Sample) -> None:
        """Begin a conversation: keep the prompt's reference answer."""
        self._answer = sample.answer

    def run_python(self, code: str) -> str:
        """Run a Python program and return what it prints. Nothing is kept between calls.

        Args:
            code: the whole program. It must print its results.
        """
        try:
            printed, problem = self._pool.run(code)
        except ConfinementError as error:
            raise BadEnvironmentError(str(error)) from error
        text = shorten(printed, self._max_chars)
        if problem:
            return f"{text}\n[{problem}]".lstrip()
        return text or "[it printed nothing]"

    def score(self, reply: Reply) -> float:
        """Return 1 if the last numbers of the message and the reference answer are equal, else 0."""
        return float(same_last_number(reply.text, self._answer))


class _Pool:
    """Sandboxes that all conversations share, one per core, so that running programs don't compete for cores."""

    def __init__(self, limits: Limits) -> None:
        self._free = [Sandbox(limits) for _ in range(os.cpu_count() or 1)]
        self._turn = threading.Semaphore(len(self._free))

    def run(self, code: str) -> tuple[str, Stopped | None]:
        """Run a Python program. Returns the program's output, and the reason why it was stopped, None if it wasn't.
        Raises ConfinementError."""
        with self._turn:
            sandbox = self._free.pop()
            try:
                return sandbox.run({"kind": "program", "programs": [code], "contest": False}, float("inf"))
            finally:
                self._free.append(sandbox)


_pool = lru_cache(maxsize=1)(_Pool)  # a host has one environment, with the same settings in all conversations
