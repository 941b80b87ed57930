"""What the coordinator keeps of scale requests, as models."""

from datetime import UTC, datetime
from enum import StrEnum

from pydantic import Field

from services.coordinator.state.records import Record


class Direction(StrEnum):
    """Which way a request goes; the names are those of the ScaleDirection enum."""

    OUT = "OUT"
    IN = "IN"


class ScaleState(StrEnum):
    """How far a request or a replica of it is; the names are those of the ScaleState enum, which explains them."""

    PENDING = "PENDING"
    CREATING = "CREATING"
    SYNCING = "SYNCING"
    DRAINING = "DRAINING"
    REMOVING = "REMOVING"
    ACTIVE = "ACTIVE"
    DONE = "DONE"
    PARTIAL = "PARTIAL"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def ended(self) -> bool:
        """Whether nothing more happens."""
        return self not in UNDER_WAY

    @property
    def can_go_back(self) -> bool:
        """Whether a replica in this state is rolled back when its request is cancelled."""
        return self in UNDER_WAY and self != ScaleState.REMOVING


UNDER_WAY = (
    *(ScaleState.PENDING, ScaleState.CREATING, ScaleState.SYNCING),
    *(ScaleState.DRAINING, ScaleState.REMOVING),
)
"""From the least advanced on."""


class Wish(Record):
    """What a caller asked for."""

    direction: Direction
    role: str
    """Name of a Role without its prefix, such as ROLLOUT."""
    replicas: int = 0
    """How many there should be; 0 where `addresses` or `replica_ids` say which."""
    addresses: tuple[str, ...] = ()
    replica_ids: tuple[str, ...] = ()
    gpu_uuids: tuple[str, ...] = ()
    seconds: float
    """Until everything must be active (out), or drained (in)."""


class ScaledReplica(Record):
    """One replica that a request is about."""

    launch_id: str
    state: ScaleState = ScaleState.PENDING
    outcome: ScaleState | None = None
    """The state after REMOVING."""
    replica_id: str = ""
    address: str = ""
    """Where it is, once that is known."""
    gpu_uuids: tuple[str, ...] = ()
    detail: str = ""


class ScaleRecord(Record):
    """One request."""

    request_id: str
    wish: Wish
    scaled: tuple[ScaledReplica, ...] = ()
    cancelled: bool = False
    reason: str = ""
    create_time: datetime = Field(default_factory=lambda: datetime.now(UTC))
    update_time: datetime = Field(default_factory=lambda: datetime.now(UTC))
    deadline: datetime

    @property
    def state(self) -> ScaleState:
        """As far as its least advanced replica; at the end, what came of all of them."""
        states = {replica.state for replica in self.scaled}
        if under_way := [state for state in UNDER_WAY if state in states]:
            return under_way[0]
        good = ScaleState.ACTIVE if self.wish.direction == Direction.OUT else ScaleState.DONE
        if states <= {good}:
            return good
        if ScaleState.CANCELLED in states:
            return ScaleState.CANCELLED
        return ScaleState.PARTIAL if good in states else ScaleState.FAILED
