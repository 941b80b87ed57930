"""Who has the devices of a colocated run, and what follows from that: the rules alone, without calls."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class Move(StrEnum):
    """What to do next."""

    WAIT = "wait"
    """Nothing: somebody works, starts, or is missing."""
    TRAIN = "train"
    """The engines sleep, the trainer wakes up."""
    SYNCHRONISE = "synchronise"
    """The trainer's weights go to the engines, which then generate while the trainer sleeps."""
    START_TRAINER = "start the trainer"
    """The engines sleep, so that a trainer without ranks gets its turn."""
    START_ENGINES = "start engines"
    """The trainer sleeps, so that replicas without engines get their turn."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """How things are."""

    trainer: Literal["absent", "waiting", "starting", "ready"]
    """Waiting: for its turn, without ranks. Starting: it has been given the devices, and isn't ready."""
    trainer_awake: bool
    """It has the devices' memory."""
    engines_waiting: bool = False
    """Some replicas wait for their turn, without engines."""
    engines_starting: bool = False
    """Some have been given the devices, and have no engines yet."""
    engines_awake: bool = False
    """Some have the devices' memory."""
    engines_able: bool = False
    """Some engines are there, asleep or not, that may receive weights."""
    engines_serving: bool = False
    """Some serve the version that was announced last."""
    generating: bool = False
    """What the engines work on is wanted to its end: the next step's groups, or an evaluation."""
    due: bool = False
    """The trainer has something to do: all groups of the next step are ready for it, or somebody wants its model."""
    announced: bool = False
    """The newest step's version is announced, by this trainer."""


def next_move(now: Situation) -> Move:
    """What to do next. No move is made on top of another, and none takes a device from somebody who starts on it."""
    if now.engines_starting or now.trainer in ("absent", "starting"):
        return Move.WAIT
    if now.trainer == "waiting":
        return Move.START_TRAINER if now.engines_awake and not now.generating else Move.WAIT
    if now.due:
        turn_is_over = now.engines_awake or not now.trainer_awake
        return Move.TRAIN if turn_is_over and not now.generating else Move.WAIT
    if now.engines_waiting:
        return Move.START_ENGINES if now.trainer_awake else Move.WAIT
    if now.engines_able and now.announced and not now.engines_serving:
        return Move.SYNCHRONISE
    return Move.WAIT
