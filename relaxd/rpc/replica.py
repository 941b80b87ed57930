"""The life of a service that is not the coordinator: register, heartbeat, follow the assignment, drain, end.

A service implements ReplicaService; run_replica does the rest:

- It starts the gRPC server, then registers. A coordinator that is away, at the start or later, is waited for; one that
  forgot this replica (NOT_FOUND) is registered with again. Work goes on meanwhile.
- The assignment says which run to work on. A new run: stop_run of the old one, start_run of the new one. PAUSED and
  back: pause_run, resume_run. No run, or one that ended: stop_run.
- A start_run that fails puts the replica in FAILED with the reason in status.detail and is tried again, after 1 s, 2 s,
  4 s ... at most 30 s, as long as the assignment stays: what failed may be a Redis that is just starting.
- SIGTERM or SIGINT: health says NOT_SERVING, the service drains within grace_seconds, the process ends with code 0. A
  second signal ends it at once, with code 1.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from relaxd.config import RunConfig
from relaxd.rpc.settings import ServiceSettings
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
    state: replica_pb2.ReplicaState | None = None
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

    role: ClassVar[replica_pb2.Role]
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


async def run_replica(
    service: ReplicaService,
    settings: ServiceSettings,
    services: Sequence[tuple[Callable[[Any, Any], None], Any, str]] = (),
) -> None:
    """Live the whole life of a replica; returns after a drain.

    Args:
        service: the service.
        settings: of this process.
        services: gRPC services to serve besides relaxd.v1.Replica: (add function, servicer, full name).

    Sets up logging and telemetry. Raises SystemExit(1), the reason being logged, when the port is taken or the
    coordinator refuses this replica (another protocol version, a wrong token).
    """
    raise NotImplementedError
