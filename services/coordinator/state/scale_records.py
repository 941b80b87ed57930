"""Records of scale requests in Redis."""

from datetime import UTC, datetime
from enum import StrEnum

from pydantic import Field

from services.coordinator.state.records import Record


class Direction(StrEnum):
    """Direction of a request; the names are those of the ScaleDirection enum."""

    OUT = "OUT"
    IN = "IN"


class ScaleState(StrEnum):
    """State of a request or of one of its replicas; names and meanings are those of the ScaleState enum."""

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
        """The state is final."""
        return self not in UNDER_WAY

    @property
    def can_go_back(self) -> bool:
        """A replica in this state is rolled back when its request is cancelled."""
        return self in UNDER_WAY and self != ScaleState.REMOVING


UNDER_WAY = (
    *(ScaleState.PENDING, ScaleState.CREATING, ScaleState.SYNCING),
    *(ScaleState.DRAINING, ScaleState.REMOVING),
)
"""States in progress, the least advanced first."""


class ScaleSpec(Record):
    """The content of a request."""

    direction: Direction
    role: str
    replicas: int = 0
    """Target number; 0 if `addresses` or `replica_ids` name the replicas."""
    addresses: tuple[str, ...] = ()
    replica_ids: tuple[str, ...] = ()
    gpu_uuids: tuple[str, ...] = ()
    seconds: float
    """Time until all replicas must be active (out) or drained (in)."""


class ScaledReplica(Record):
    """One replica of a request."""

    launch_id: str
    state: ScaleState = ScaleState.PENDING
    outcome: ScaleState | None = None
    """The state after REMOVING."""
    replica_id: str = ""
    address: str = ""
    """Empty until known."""
    gpu_uuids: tuple[str, ...] = ()
    detail: str = ""


class ScaleRecord(Record):
    """One scale request."""

    request_id: str
    spec: ScaleSpec
    scaled: tuple[ScaledReplica, ...] = ()
    cancelled: bool = False
    reason: str = ""
    create_time: datetime = Field(default_factory=lambda: datetime.now(UTC))
    update_time: datetime = Field(default_factory=lambda: datetime.now(UTC))
    deadline: datetime

    @property
    def state(self) -> ScaleState:
        """State of the least advanced replica; at the end, the result of all replicas."""
        states = {replica.state for replica in self.scaled}
        if under_way := [state for state in UNDER_WAY if state in states]:
            return under_way[0]
        good = ScaleState.ACTIVE if self.spec.direction == Direction.OUT else ScaleState.DONE
        if states <= {good}:
            return good
        if ScaleState.CANCELLED in states:
            return ScaleState.CANCELLED
        return ScaleState.PARTIAL if good in states else ScaleState.FAILED
