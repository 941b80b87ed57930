"""The roles of the replicas, declared once. On the wire a role is its name."""

import difflib
from collections.abc import Iterable

COORDINATOR = "coordinator"
TRAINER = "trainer"
ROLLOUT = "rollout"
REWARD = "reward"
ADVANTAGE = "advantage"

REPLICA_ROLES = (TRAINER, ROLLOUT, REWARD, ADVANTAGE)
"""Roles whose processes register with the coordinator."""
SCALABLE_ROLES = (ROLLOUT, REWARD, ADVANTAGE)
"""Roles that may have any number of replicas."""


def unknown_role(role: str, known: Iterable[str]) -> str:
    """Say that a role is none of the known ones, and which of them is the nearest."""
    names = sorted(known)
    close = difflib.get_close_matches(role.lower().removeprefix("role_"), names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"is {role!r}: it must be one of {', '.join(names)}{hint}"
