"""Actions of operators: each is a call of the coordinator, which checks the permission."""

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import Message

from relaxd.rpc.message_parts import plain
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1 import scaling_pb2
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub
from services.console.guard import Refusal


@dataclass(frozen=True)
class Action:
    """A call that changes something."""

    method: str
    request: type[Message]
    seconds: float = 30.0
    """Deadline of the call."""

    async def take(self, stub: CoordinatorStub, fields: dict[str, Any]) -> dict[str, Any]:
        """Make the call with the request's fields in JSON's form. Raises Refusal, AioRpcError."""
        try:
            request = ParseDict(fields, self.request())
        except ParseError as error:
            raise Refusal(HTTPStatus.BAD_REQUEST, f"{self.method}: {error}") from error
        return plain(await getattr(stub, self.method)(request, timeout=self.seconds))


ACTIONS = {
    "pause": Action("PauseRun", pb.PauseRunRequest),
    "resume": Action("ResumeRun", pb.ResumeRunRequest),
    "stop": Action("StopRun", pb.StopRunRequest),
    "checkpoint": Action("SaveCheckpoint", pb.SaveCheckpointRequest, seconds=3600.0),
    "sync-weights": Action("SyncWeights", pb.SyncWeightsRequest, seconds=600.0),
    "drain": Action("DrainReplica", pb.DrainReplicaRequest),
    "scale-out": Action("ScaleOut", scaling_pb2.ScaleOutRequest),
    "scale-in": Action("ScaleIn", scaling_pb2.ScaleInRequest),
    "cancel-scaling": Action("CancelScaleRequest", scaling_pb2.CancelScaleRequestRequest),
    "autoscaler": Action("SetAutoscaler", scaling_pb2.SetAutoscalerRequest),
}
"""Actions by their names in addresses."""
