"""[placement] and [autoscale]: replicas and GPUs of each role, and automatic scaling of rollout replicas."""

import difflib
from collections.abc import Iterator
from typing import Literal

from pydantic import Field, PositiveInt

from relaxd.config.section import Section

PLACED = ("ranks", "rollout", "reward", "advantage", "reference", "teacher", "critic", "judge", "agent")
"""Roles that may be placed: all except coordinator and trainer, which every run has once."""


class PlacementConfig(Section):
    """Replicas that commands start for the run, in two tables by role (docs/placement.md)."""

    replicas: dict[str, PositiveInt] = Field(default_factory=dict)
    """Replicas of each role, such as { rollout = 2, reward = 4 }. Any other role has one replica if the run needs
    it."""
    gpus: dict[str, PositiveInt] = Field(default_factory=dict)
    """Instead of replicas: GPUs of all replicas of a role together, such as { rollout = 4 }. It must be a multiple of a
    replica's GPUs, such as rollout.tensor_parallel."""

    def problems(self) -> Iterator[str]:
        for setting, numbers in (("replicas", self.replicas), ("gpus", self.gpus)):
            for role, number in numbers.items():
                given = f"placement.{setting}.{role} is {number}"
                if role == "trainer":
                    yield f"{given}, but there is one trainer, whose GPUs are trainer.ranks: set that"
                if role not in PLACED:
                    close = difflib.get_close_matches(role, PLACED, n=1)
                    hint = f"; did you mean {close[0]}?" if close else ""
                    yield f"{given}, but the roles that can be placed are {', '.join(PLACED)}{hint}"
        if both := [role for role in self.replicas if role in self.gpus]:
            role = both[0]
            yield (
                f"placement.replicas.{role} is {self.replicas[role]} and placement.gpus.{role} is {self.gpus[role]}: "
                "give one of them, the other follows from the GPUs of a replica"
            )


class AutoscaleConfig(Section):
    """The autoscaler of rollout replicas (docs/scaling.md)."""

    mode: Literal["off", "dry_run", "on"] = "off"
    """"on": the coordinator adds rollout replicas while the trainer waits for engines that are busy, and removes them
    while they are idle. "dry_run": it only says what it would do. `relaxd autoscale` changes it during the run."""
    min_replicas: PositiveInt = 1
    """Minimum number of rollout replicas. Only replicas that were scaled out are ever removed."""
    max_replicas: PositiveInt = 8
    """Maximum number of rollout replicas."""
    out_seconds: float = Field(default=30.0, ge=1, le=3600)
    """Seconds that a reason must last before replicas are added."""
    in_seconds: float = Field(default=120.0, ge=1, le=3600)
    """Seconds that a reason must last before a replica is removed."""
    out_cooldown_seconds: float = Field(default=60.0, ge=0)
    """Seconds after adding replicas during which no more are added."""
    in_cooldown_seconds: float = Field(default=300.0, ge=0)
    """Seconds after adding or removing replicas during which none are removed."""

    def problems(self) -> Iterator[str]:
        if self.min_replicas > self.max_replicas:
            yield (
                f"autoscale.min_replicas is {self.min_replicas}, but autoscale.max_replicas is {self.max_replicas}: "
                "it must be at least as large"
            )
