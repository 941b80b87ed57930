"""Rules of GPU handoff in a colocated run: pure functions from a situation, failures included, to the next move."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class HandoffMove(StrEnum):
    """The next action."""

    WAIT = "wait"
    """No move: a replica works, starts, or is missing."""
    TRAIN = "train"
    """Put the engines to sleep and wake the trainer up."""
    SYNCHRONISE = "synchronise"
    """Send the trainer's weights to the engines, put the trainer to sleep and let the engines generate."""
    START_TRAINER = "start the trainer"
    """Put the engines to sleep, so that a trainer that waits can load its model."""
    START_ENGINES = "start engines"
    """Put the trainer to sleep, so that replicas without engines can start them."""
    WAKE_JUDGES = "wake the judges"
    """Wake up the judges, which are on the GPUs of engines that serve."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The state of replicas, weights and board."""

    trainer: Literal["absent", "waiting", "starting", "ready"]
    """State of the trainer. Waiting: for the GPU, without a model. Starting: it has the GPU and isn't ready."""
    trainer_awake: bool
    """True if the trainer holds device memory."""
    engines_waiting: bool = False
    """Some replicas without engines wait for the GPU."""
    engines_starting: bool = False
    """Some have the GPU and no engine yet."""
    engines_awake: bool = False
    """Some hold device memory."""
    engines_able: bool = False
    """Some engines, asleep or not, can receive weights."""
    engines_serving: bool = False
    """Some serve the announced version."""
    generating: bool = False
    """The engines must finish their work: groups of the next step, or an evaluation."""
    due: bool = False
    """The trainer has work: all groups of the next step are ready, or a checkpoint or export is requested."""
    judges_asleep: bool = False
    """True if some judges that take turns sleep and aren't given up. Judges that are awake, or without a model, count
    as engines above."""
    announced: bool = False
    """This trainer announced the newest step's version."""


def next_move(now: Situation) -> HandoffMove:
    """Return the next move. No move takes a device from a replica that is starting on it."""
    # First of all: without its judge the groups of engines that generate are never ready, so that no turn would end.
    # Where they are ready all the same, other judges have answered, and the turn doesn't wait for one that sleeps on.
    turn_ends = now.due and not now.generating
    trainer_holds = now.trainer_awake or now.trainer == "starting"
    if now.judges_asleep and now.engines_serving and not trainer_holds and not turn_ends:
        return HandoffMove.WAKE_JUDGES
    if now.engines_starting or now.trainer in ("absent", "starting"):
        return HandoffMove.WAIT
    if now.trainer == "waiting":
        return HandoffMove.START_TRAINER if now.engines_awake and not now.generating else HandoffMove.WAIT
    if now.due:
        turn_is_over = now.engines_awake or not now.trainer_awake
        return HandoffMove.TRAIN if turn_is_over and not now.generating else HandoffMove.WAIT
    if now.engines_waiting:
        return HandoffMove.START_ENGINES if now.trainer_awake else HandoffMove.WAIT
    if now.engines_able and now.announced and not now.engines_serving:
        return HandoffMove.SYNCHRONISE
    return HandoffMove.WAIT


PATIENCE = 3
"""Factor on run.switch_timeout_seconds after which a failing process is given up."""


@dataclass(frozen=True)
class HandoffFailure:
    """The consecutive failed calls of one process."""

    action: str
    """The failed action, such as "wake up"."""
    error: str
    """Error of the last call."""
    began: float
    ended: float
    """Times of the first call's beginning and the last one's end, by the clock."""

    @property
    def seconds(self) -> float:
        """Seconds of known failure, without those in which nothing was requested."""
        return self.ended - self.began

    def __str__(self) -> str:
        return f"it has not been able to {self.action} for {self.seconds:.0f} s: {self.error}"


class HandoffFailures:
    """Counts the seconds for which processes have failed; a new process of an instance starts at zero."""

    def __init__(self, switch_timeout_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_seconds = PATIENCE * switch_timeout_seconds
        self._clock = clock
        self._failures: dict[str, HandoffFailure] = {}

    def now(self) -> float:
        """Return the clock's time, for `began`."""
        return self._clock()

    def failed(self, replica_id: str, action: str, error: str, began: float) -> None:
        """Record a failed call and the time of its beginning."""
        before = self._failures.get(replica_id)
        first = before.began if before is not None and before.action == action else began
        self._failures[replica_id] = HandoffFailure(action, error, first, self._clock())

    def worked(self, replica_id: str) -> None:
        """Record a call that the replica answered."""
        self._failures.pop(replica_id, None)

    def of(self, replica_id: str) -> HandoffFailure | None:
        """Return the failure of a process; None if its last call worked."""
        return self._failures.get(replica_id)

    def given_up(self, replica_id: str) -> bool:
        """Return whether a process has failed for longer than allowed: its health then restarts it, and turns go on."""
        failure = self._failures.get(replica_id)
        return failure is not None and failure.seconds > self._limit_seconds
