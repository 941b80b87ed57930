"""Scale requests as protobuf."""

from relaxd.v1 import scaling_pb2 as pb
from services.coordinator.state.scale_records import ScaleRecord


def scale_message(record: ScaleRecord) -> pb.ScaleRequest:
    """Convert a scale request."""
    message = pb.ScaleRequest(
        request_id=record.request_id,
        direction=pb.ScaleDirection.Value(f"SCALE_DIRECTION_{record.spec.direction.value}"),
        role=record.spec.role,
        replicas=record.spec.replicas,
        state=pb.ScaleState.Value(f"SCALE_STATE_{record.state.value}"),
        reason=record.reason or "; ".join(f"{r.launch_id}: {r.detail}" for r in record.scaled if r.detail),
        cancelled=record.cancelled,
        scaled=[
            pb.ScaledReplica(
                launch_id=replica.launch_id,
                replica_id=replica.replica_id,
                address=replica.address,
                state=pb.ScaleState.Value(f"SCALE_STATE_{replica.state.value}"),
                detail=replica.detail,
                gpu_uuids=replica.gpu_uuids,
            )
            for replica in record.scaled
        ],
    )
    message.create_time.FromDatetime(record.create_time)
    message.update_time.FromDatetime(record.update_time)
    message.deadline.FromDatetime(record.deadline)
    return message
