"""What a service that is not the coordinator implements; relaxd.rpc.replica lives its life."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from relaxd.config import RunConfig
from relaxd.v1 import replica_pb2
from relaxd.v1.coordinator_pb2 import Assignment


@dataclass(frozen=True, kw_only=True)
class ServiceStatus:
    """What a service says about itself; run_replica adds the rest of GetStatusResponse."""

    held_groups: int = 0
    """Groups held now."""
    done_groups: int = 0
    """Groups finished since the process started."""
    detail: str = ""
    """One sentence for people."""
    state: "replica_pb2.ReplicaState.ValueType | None" = None
    """Instead of READY: STARTING, QUARANTINED or FAILED. While the replica is idle, starting, failed or draining by
    run_replica's own knowledge, this is ignored."""
    weights: replica_pb2.WeightVersion | None = None
    """The weights it serves or has trained."""
    gauges: Mapping[str, float] = field(default_factory=dict)
    """Numbers worth a look, by name."""


class ReplicaService(ABC):
    """What a service adds to the life that all replicas share.

    run_replica calls everything here from one event loop, never two of start_run, stop_run, pause_run, resume_run and
    drain at once (status and drain excepted).
    """

    role: "ClassVar[replica_pb2.Role.ValueType]"
    """The part that the service plays."""
    engine_ranks: int = 0
    """Ranks of its engine (rollout)."""
    gpu_uuids: Sequence[str] = ()
    """GPUs that it sees."""

    @abstractmethod
    async def start_run(self, config: RunConfig, assignment: Assignment) -> None:
        """Prepare for a run and start to work on it; the replica is STARTING until this returns, then READY.

        It is cancelled when the assignment changes or the process ends meanwhile. Whatever it raises is reported as
        status.detail. In either case stop_run is called before anything else.
        """

    @abstractmethod
    async def stop_run(self) -> None:
        """Let go of the run and of everything that start_run, complete or not, made. Work that is held is released."""

    @abstractmethod
    async def drain(self, seconds: float) -> int:
        """Take no new work, finish or hand back what is held within `seconds`. Returns how many groups are still held.

        May be called again. Work is taken again only after the next start_run.
        """

    @abstractmethod
    def status(self) -> ServiceStatus:
        """How the service feels. Must return at once."""

    @abstractmethod
    async def pause_run(self) -> None:
        """The run is paused: take no new work. Called only between start_run and stop_run."""

    @abstractmethod
    async def resume_run(self) -> None:
        """The pause is over."""
