"""The real coordinator, supervisor and launcher, and requests to scale; trainer and engines are doubles."""

import sys
from pathlib import Path
from typing import Any

from relaxd.local.supervisor import ServiceSpec
from relaxd.roles import ROLLOUT
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1 import scaling_pb2 as scale_pb
from tests.integration.coordinator.supervised import SupervisedCluster

PENDING, CREATING, SYNCING = (
    scale_pb.SCALE_STATE_PENDING,
    scale_pb.SCALE_STATE_CREATING,
    scale_pb.SCALE_STATE_SYNCING,
)
ACTIVE, DRAINING, REMOVING = (
    scale_pb.SCALE_STATE_ACTIVE,
    scale_pb.SCALE_STATE_DRAINING,
    scale_pb.SCALE_STATE_REMOVING,
)
DONE, PARTIAL, FAILED, CANCELLED = (
    scale_pb.SCALE_STATE_DONE,
    scale_pb.SCALE_STATE_PARTIAL,
    scale_pb.SCALE_STATE_FAILED,
    scale_pb.SCALE_STATE_CANCELLED,
)


class ScalingCluster(SupervisedCluster):
    """`closed` blocks the start of launched replicas, `hold` the end of their work; `fail` ends those that it names."""

    def __init__(self, folder: Path, redis_url: str, model: Path) -> None:
        super().__init__(folder, redis_url, model)
        self.closed = folder / "closed"
        self.hold = folder / "hold"

    def fail(self, suffix: str) -> Path:
        """End launched replicas with this suffix of the launch id, as long as the returned file exists."""
        path = self.folder / f"fail-{suffix}"
        path.touch()
        return path

    def supervisor(self, max_restarts: int = 5, **environment: str) -> None:
        """Start the supervisor with a template for rollout doubles."""
        command = [sys.executable, "-m", "tests.integration.scaling.gated", str(self.folder), "rollout"]
        environment |= self.environment(grace_seconds=5) | {"PEER_HOLD": str(self.hold)}
        template = ServiceSpec(name="", role="rollout", command=command, environment=environment)
        self.start_supervisor([], {"rollout": template}, max_restarts)

    # --- asking

    def out(self, replicas: int, **fields: Any) -> scale_pb.ScaleRequest:
        return self.stub.ScaleOut(scale_pb.ScaleOutRequest(replicas=replicas, **fields), timeout=10).request

    def into(self, replicas: int, **fields: Any) -> scale_pb.ScaleRequest:
        return self.stub.ScaleIn(scale_pb.ScaleInRequest(replicas=replicas, **fields), timeout=10).request

    def request(self, request_id: str = "") -> scale_pb.ScaleRequest:
        asked = scale_pb.GetScaleRequestRequest(request_id=request_id)
        return self.stub.GetScaleRequest(asked, timeout=5).request

    def requests(self, **fields: Any) -> list[scale_pb.ScaleRequest]:
        return list(self.stub.ListScaleRequests(scale_pb.ListScaleRequestsRequest(**fields), timeout=5).requests)

    def cancel(self, request_id: str = "") -> scale_pb.ScaleRequest:
        asked = scale_pb.CancelScaleRequestRequest(request_id=request_id)
        return self.stub.CancelScaleRequest(asked, timeout=5).request

    def until_scaled(self, *states: int) -> scale_pb.ScaleRequest:
        """Wait until the newest request is in one of these states."""
        names = " or ".join(map(scale_pb.ScaleState.Name, states))
        return self.until(names, lambda: (request := self.request()).state in states and request)

    # --- looking

    def rollouts(self) -> dict[str, pb.RegisteredReplica]:
        """Return the registered rollout replicas by id."""
        replicas = self.stub.ListReplicas(pb.ListReplicasRequest(role=ROLLOUT), timeout=5).replicas
        return {replica.registration.replica_id: replica for replica in replicas}

    def launched(self) -> dict[str, int]:
        """Return the process ids of launched replicas."""
        state = self.state.read()
        return {s.name: s.pid or 0 for s in state.services if s.launched} if state else {}
