"""Replicas and GPUs of each role, for commands that start services."""

import difflib
from typing import Self

from pydantic import Field, PositiveInt, model_validator

from relaxd.config.section import Section

PLACED = ("ranks", "rollout", "reward", "advantage", "reference", "teacher", "critic", "judge", "agent")
"""Roles that may be placed: all except coordinator and trainer, which every run has once."""


class PlacementConfig(Section):
    """Replicas that commands start for the run, in two tables by role (docs/placement.md)."""

    replicas: dict[str, PositiveInt] = Field(default_factory=dict)
    """Replicas of each role, such as { rollout = 2, reward = 4 }. Any other role has one replica if the run needs
    it."""
    gpus: dict[str, PositiveInt] = Field(default_factory=dict)
    """Instead of replicas: GPUs of all replicas of a role together, such as { rollout = 4 }. It must be a multiple of
    what a replica has, such as rollout.tensor_parallel."""

    @model_validator(mode="after")
    def _roles_are_known(self) -> Self:
        for setting, numbers in (("replicas", self.replicas), ("gpus", self.gpus)):
            for role, number in numbers.items():
                given = f"placement.{setting}.{role} is {number}"
                if role == "trainer":
                    raise ValueError(f"{given}, but there is one trainer, whose GPUs are trainer.ranks: set that")
                if role not in PLACED:
                    close = difflib.get_close_matches(role, PLACED, n=1)
                    hint = f"; did you mean {close[0]}?" if close else ""
                    raise ValueError(f"{given}, but the roles that can be placed are {', '.join(PLACED)}{hint}")
        if both := [role for role in self.replicas if role in self.gpus]:
            role = both[0]
            raise ValueError(
                f"placement.replicas.{role} is {self.replicas[role]} and placement.gpus.{role} is {self.gpus[role]}: "
                "give one of them, the other follows from the GPUs of a replica"
            )
        return self
