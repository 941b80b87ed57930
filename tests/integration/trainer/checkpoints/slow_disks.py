"""Slow disks for ranks that are real processes."""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tests.kit.processes import python_path

FOLDER = Path(__file__).with_name("slow_disk")


@dataclass(frozen=True)
class Slow:
    """Some calls of a rank that take long."""

    rank: int
    operation: Literal["read", "write", "rename"]
    path: str
    """A pattern, as of a shell."""
    seconds: float
    """How much longer they take."""
    times: int = 1
    """How many of them, in each of the rank's lives."""


def slowed(output: str) -> set[tuple[str, str]]:
    """Which operations, on which paths, were slow, according to what the processes have written."""
    return set(re.findall(r"^slow: (\w+) (\S+)$", output, re.MULTILINE))


def slow_disk(*rules: Slow) -> dict[str, str]:
    """The environment of a trainer whose ranks have such disks."""
    return {"SLOW_DISK": json.dumps([asdict(rule) for rule in rules]), "PYTHONPATH": python_path(FOLDER)}
