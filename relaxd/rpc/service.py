"""What a service that is not the coordinator implements; relaxd.rpc.replica lives its life."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from relaxd.config import RunConfig
from relaxd.rpc.gpus import Gpu
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
    progress: int = 0
    """Counts what gets done, in steps that never take long: see GetStatusResponse.progress."""
    gauges: Mapping[str, float] = field(default_factory=dict)
    """Numbers worth a look, by name."""
    awake: bool = False
    """In a colocated run: whether its children have the device's memory."""


class ReplicaService(ABC):
    """What a service adds to the life that all replicas share.

    run_replica calls everything here from one event loop, never two of start_run, stop_run, pause_run, resume_run and
    drain at once (status and drain excepted).
    """

    role: "ClassVar[replica_pb2.Role.ValueType]"
    """The part that the service plays."""
    engine_ranks: int = 0
    """Ranks of its engine (rollout). When a run changes it, the replica is registered again."""
    max_connection_age_seconds: ClassVar[float | None] = None
    """Age at which its server renews connections: for services whose callers spread their calls over the replicas
    behind one name. None: never."""
    lease_gpus: Callable[[int], Awaitable[tuple[Gpu, ...]]]
    """Lease so many of the GPUs that this process sees, for children of the run that is started; `gpu_environment` of
    the answer is what the children need. () where there is no GPU. They are given back after stop_run. Raises
    ResourceExhausted, with who holds what. Set by run_replica."""
    take_turn: Callable[[Callable[[str], None]], Awaitable[None]]
    """In a colocated run: wait until children may be started, which there are none of. What it is given hears why they
    may not yet. Set by run_replica."""
    give_up: Callable[[str], None]
    """Something broke that only a new process mends: say why, hand back what is held and end with exit code 1, so that
    whoever supervises this process starts another. Any thread may call it. Set by run_replica."""

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
