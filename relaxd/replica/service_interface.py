"""The interface of a replica's service; `relaxd.replica.replica_life.run_replica` runs it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from relaxd.config import RunConfig
from relaxd.v1 import replica_pb2
from relaxd.v1.coordinator_pb2 import Assignment


@dataclass(frozen=True, kw_only=True)
class ServiceStatus:
    """A service's part of ReplicaStatus; run_replica adds the rest."""

    held_groups: int = 0
    """Groups held now; for an engine that agents use, its running requests."""
    done_groups: int = 0
    """Groups finished since the process started."""
    detail: str = ""
    """One sentence for people."""
    state: "replica_pb2.ReplicaState.ValueType | None" = None
    """STARTING, QUARANTINED or FAILED instead of READY. Ignored while run_replica itself knows the replica to be idle,
    starting, failed or draining."""
    weights: replica_pb2.WeightVersion | None = None
    """The weights that the service uses or has trained."""
    progress: int = 0
    """Counter of work done, in steps that never take long: see ReplicaStatus.progress."""
    gauges: Mapping[str, float] = field(default_factory=dict)
    """Further measurements by name."""
    wait: "replica_pb2.ReplicaWait.ValueType" = replica_pb2.REPLICA_WAIT_UNSPECIFIED
    """Kind of the wait in `detail`, if any."""
    start_refused: bool = False
    """With the state FAILED: the settings or the model are wrong, so that another start would fail as well."""
    awake: bool = False
    """True if its children hold the device's memory, in a colocated run."""


class ReplicaService(ABC):
    """The role-specific part of a replica. The services take a `ReplicaContext` in their constructor.

    run_replica calls every method from one event loop, and never two of start_run, stop_run, pause_run, resume_run and
    drain at once (status and drain excepted).
    """

    role: str
    """Role that the replica registers with."""
    engine_ranks: int = 0
    """Ranks of its engine (rollout). When a run changes it, the replica registers again."""
    max_connection_age_seconds: ClassVar[float | None] = None
    """Age at which its server asks clients to reconnect: for services whose callers spread their calls over the
    replicas behind one name. None: never."""

    @abstractmethod
    async def start_run(self, config: RunConfig, assignment: Assignment) -> None:
        """Prepare for a run and start to work on it; the replica is STARTING until this returns, then READY.

        It is cancelled when the assignment changes or the process ends. An exception is reported as status.detail;
        InvalidArgument also as status.start_refused. In either case stop_run is called next.
        """

    @abstractmethod
    async def stop_run(self) -> None:
        """Release held work and everything from start_run, whether it completed or not."""

    @abstractmethod
    async def drain(self, seconds: float) -> int:
        """Take no new work, and finish or hand back held work within `seconds`. Returns the number still held.

        May be called again. Only the next start_run takes work again.
        """

    @abstractmethod
    def status(self) -> ServiceStatus:
        """Return the current status, without blocking."""

    @abstractmethod
    async def pause_run(self) -> None:
        """Take no new work until resume_run. Only called between start_run and stop_run."""

    @abstractmethod
    async def resume_run(self) -> None:
        """Take work again after pause_run."""
