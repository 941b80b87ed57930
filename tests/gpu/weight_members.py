"""Members of a weight group, each in a process of its own."""

import json
import select
import time
from typing import Any

from tests.kit.processes import Partner

ELEMENTS = [3, 1 << 20, 77, (64 << 20) + 5, 1 << 10, 128 << 20]
"""Small and large ones, of sizes that divide by nothing: 387 MB."""


class Member(Partner):
    """One process of a group, on a GPU of its own."""

    def __init__(self, device: int, *words: str, **environment: str) -> None:
        super().__init__(
            "-m", "tests.gpu.nccl_member", str(device), *words, environment={"NCCL_DEBUG": "WARN", **environment}
        )

    def answer(self, seconds: float = 90.0) -> dict[str, Any]:
        """How it ended. NCCL writes to stdout, too."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + seconds
        while select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            line = self.process.stdout.readline()
            if line.startswith("{"):
                return dict(json.loads(line))
            assert line, f"the process ended with {self.process.wait()}"
            print(line, end="")
        raise AssertionError(f"no answer within {seconds:g} s")


def connect(members: list[Member], port: int, name: str) -> float:
    """Everybody joins; returns how long it took."""
    for rank, member in enumerate(members):
        member.tell(do="connect", store_port=port, name=name, rank=rank, world_size=len(members), timeout=60)
    answers = [member.answer() for member in members]
    assert not any("error" in answer for answer in answers), answers
    return float(max(answer["took"] for answer in answers))


def broadcast(members: list[Member], source: int, value: float, repeat: int = 1) -> float:
    """Everybody takes part and gets what was sent; returns how long it took."""
    for member in members:
        member.tell(do="broadcast", elements=ELEMENTS, source=source, value=value, timeout=60, repeat=repeat)
    answers = [member.answer() for member in members]
    assert not any("error" in answer for answer in answers), answers
    assert all(answer["whole"] for answer in answers), answers
    return float(max(answer["seconds"] for answer in answers))
