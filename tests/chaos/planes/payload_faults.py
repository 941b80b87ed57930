"""Faults at each command of the protocol by which large columns get to Redis and out of it again."""

import random
import threading
import time
from collections.abc import Sequence
from functools import partial

import psutil

from tests.chaos.faults import NOTICE_SECONDS, Fault, MomentMissed, kill_now
from tests.chaos.proxy import Link, Moment
from tests.chaos.stack import ChaosStack

REGISTER, WRITE, READ = ("register", "register"), ("write", "SET *:columns:*"), ("read", "MGET *:columns:*")
STEPS: dict[str, tuple[tuple[str, str], ...]] = {
    "rollout": (READ, REGISTER, WRITE, ("save", "save"), ("commit", "commit")),
    "agent": (READ, REGISTER, WRITE, ("commit", "commit")),
    "reward": (READ, REGISTER, WRITE, ("commit", "commit")),
    "teacher": (REGISTER, WRITE, ("commit", "commit")),
    "trainer": (READ, REGISTER, WRITE, ("commit", "commit_step")),
    "coordinator": (
        *(REGISTER, WRITE, ("publish", "publish"), ("sweep", "sweep")),
        ("free", "UNLINK *:columns:*"),
    ),
}
"""Role -> what it does to payloads, and the command of it: a name of relaxd/board/lua, or a pattern."""


def payload_faults() -> list[Fault]:
    """A broken connection and a death, each before and after each command of each role."""
    return [fault for how in ("cut", "dies") for fault in _faults(how)]


def deaths_at_scripts() -> list[Fault]:
    """A death before and after each script, which is the board's Redis's wherever the columns are."""
    return _faults("dies", scripts_only=True)


def _faults(how: str, *, scripts_only: bool = False) -> list[Fault]:
    moments: tuple[Moment, Moment] = ("before", "after")
    return [
        Fault(f"payload: {role} {how} {moment} {step}", partial(strike, role, pattern, moment, how == "dies"))
        for role, steps in STEPS.items()
        for step, pattern in steps
        for moment in moments
        if not (scripts_only and "*" in pattern)
    ]


def strike(role: str, pattern: str, moment: Moment, dies: bool, stack: ChaosStack, rng: random.Random) -> float:
    """Break the connection of whichever service of a role sends the command first; it dies, too, or tries again."""
    links = [(stack.links[name, "redis"], stack.tree(name) if dies else []) for name in stack.names(role)]
    return strike_first(stack, links, pattern, moment, f"Redis by a {role}")


def strike_first(
    stack: ChaosStack, links: Sequence[tuple[Link, list[psutil.Process]]], pattern: str, moment: Moment, to: str
) -> float:
    """Break the first of some links that carries a command, and kill the processes that belong to it.

    Raises MomentMissed: none carried one `to` whom it is for.
    """
    done = threading.Event()
    for link, victims in links:
        stack.loop.do(link.arm(pattern, moment, partial(_strike_once, done, victims)))
    happened = done.wait(NOTICE_SECONDS)
    now = time.time()
    for link, _ in links:
        stack.loop.do(link.disarm())
    if not happened:
        raise MomentMissed(f"{pattern} was not sent to {to} in {NOTICE_SECONDS:g} s")
    return now


def _strike_once(done: threading.Event, victims: list[psutil.Process]) -> None:
    if not done.is_set():  # else another service was first
        kill_now(victims)
        done.set()


SHORT_SUITE = (
    "payload: rollout cut after register",
    "payload: rollout dies after write",
    "payload: reward cut before commit",
    "payload: trainer cut after commit",
    "payload: coordinator cut after free",
    "payload: coordinator dies before sweep",
)
"""What the ordinary tests do: each of the protocol's parts once."""
